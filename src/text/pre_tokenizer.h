// Pre-tokenisation: cutting text into the pieces inside which byte pairs are merged.
//
// A pre-tokeniser is a list of split regexes, each applied to the pieces the one before left; both
// matches and what lies between them stay as pieces ("Isolated" in tokenizer.json). There are two
// implementations: the regexes themselves, through PCRE2, for any list; and a hand-written scanner
// for DeepSeek's three (model.md 10.1), which reads each character about once. They must agree on
// every text; pre_tokenizer_test.cc holds them to it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace fathom {

class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  // Appends the end offset (bytes, ascending) of every piece; the last is text.size(). Pieces are
  // never empty. `text` is valid UTF-8 under 4 GiB. Thread-safe.
  virtual void Split(std::string_view text, std::vector<uint32_t>& ends) const = 0;
};

// The scanner if `regexes` are DeepSeek's, else PCRE2. Errors name the regex and what is wrong.
Expected<std::unique_ptr<PreTokenizer>> MakePreTokenizer(const std::vector<std::string>& regexes);

Expected<std::unique_ptr<PreTokenizer>> MakeRegexPreTokenizer(
    const std::vector<std::string>& regexes);
std::unique_ptr<PreTokenizer> MakeDeepSeekPreTokenizer();

// DeepSeek's three regexes as tokenizer.json spells them.
const std::vector<std::string>& DeepSeekRegexes();

// A regex in Oniguruma's Ruby syntax, which Hugging Face's library speaks, as a PCRE2 regex with
// the same meaning. Constructs that the two read differently, or that depend on Unicode data we do
// not hold, are refused by name (kUnimplemented).
Expected<std::string> TranslateRegex(std::string_view regex);

}  // namespace fathom
