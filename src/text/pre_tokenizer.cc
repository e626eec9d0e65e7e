#include "text/pre_tokenizer.h"

namespace fathom {
namespace {

// Some files spell CR and LF in the regex as escapes, some as the characters themselves.
std::string EscapeLineBreaks(std::string_view regex) {
  std::string out;
  for (char c : regex) {
    if (c == '\r') {
      out += "\\r";
    } else if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out;
}

}  // namespace

const std::vector<std::string>& DeepSeekRegexes() {
  static const std::vector<std::string> regexes = {
      R"re(\p{N}{1,3})re", "[一-龥\u3040-ゟ゠-ヿ]+",
      R"re([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+)re"
      R"re(|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+)re"
      R"re(| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)re"};
  return regexes;
}

Expected<std::unique_ptr<PreTokenizer>> MakePreTokenizer(const std::vector<std::string>& regexes) {
  std::vector<std::string> escaped;
  for (const std::string& regex : regexes) escaped.push_back(EscapeLineBreaks(regex));
  if (escaped == DeepSeekRegexes()) return MakeDeepSeekPreTokenizer();
  return MakeRegexPreTokenizer(regexes);
}

}  // namespace fathom
