// `fathom tokenize`: standard input (or an argument) to token ids.
#include <fmt/ranges.h>

#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/input.h"
#include "cli/model_source.h"
#include "text/tokenizer.h"

namespace fathom {
namespace {

struct TokenizeOptions {
  std::string model;
  std::string tokenizer;
  bool pieces = false;
  bool count = false;
  bool added_tokens = true;
};

Expected<std::unique_ptr<Tokenizer>> LoadTokenizer(const TokenizeOptions& options) {
  const std::string& given = options.tokenizer.empty() ? options.model : options.tokenizer;
  std::string demo;
  if (given.empty()) {
    FATHOM_ASSIGN(demo, DemoModelDirectory());
  }
  FATHOM_ASSIGN(const std::string path, TokenizerPath(given, demo));
  return Tokenizer::Load(path);
}

// A token's bytes with control characters, backslashes and broken UTF-8 spelled out.
std::string Printable(std::string_view bytes) {
  std::string text;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const unsigned char c = static_cast<unsigned char>(bytes[i]);
    const int length = c < 0x80 ? 1 : c >= 0xf0 ? 4 : c >= 0xe0 ? 3 : c >= 0xc2 ? 2 : 0;
    bool whole = length > 0 && i + static_cast<size_t>(length) <= bytes.size();
    for (int k = 1; whole && k < length; ++k) {
      whole = (static_cast<unsigned char>(bytes[i + static_cast<size_t>(k)]) & 0xc0) == 0x80;
    }
    if (c == '\n') {
      text += "\\n";
    } else if (c == '\\') {
      text += "\\\\";
    } else if (!whole || c < 0x20 || c == 0x7f) {
      text += fmt::format("\\x{:02x}", c);
    } else {
      text += bytes.substr(i, static_cast<size_t>(length));
      i += static_cast<size_t>(length) - 1;
    }
  }
  return text;
}

Status RunTokenize(const TokenizeOptions& options) {
  FATHOM_ASSIGN(std::unique_ptr<Tokenizer> tokenizer, LoadTokenizer(options));
  FATHOM_ASSIGN(std::string text, ReadStandardInput());
  const std::vector<TokenId> ids =
      tokenizer->Encode(text, options.added_tokens ? AddedTokens::kMatch : AddedTokens::kInert);
  if (options.count) {
    fmt::print("{}\n", ids.size());
  } else if (options.pieces) {
    for (TokenId id : ids) fmt::print("{}\t{}\n", id, Printable(tokenizer->TokenBytes(id)));
  } else {
    fmt::print("[{}]\n", fmt::join(ids, ", "));
  }
  return {};
}

}  // namespace

void AddTokenizeCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<TokenizeOptions>();
  auto command = Command::Add(app, "tokenize", "Standard input to token ids, as a JSON array",
                              "  echo 'a file' | fathom tokenize\n"
                              "  fathom tokenize --count < manual.txt\n"
                              "  fathom tokenize --pieces --tokenizer tokenizer.json < manual.txt");
  command->Positional("model", options->model, "whose tokenizer; left out: the demo model's");
  command->Text("--tokenizer", options->tokenizer, "PATH",
                "directory or tokenizer.json, instead of the model's own");
  command->Switch("--pieces", options->pieces, "one token a line: id, tab, text");
  command->Switch("--count", options->count, "print only the number of tokens");
  command->Switch("--added-tokens", options->added_tokens,
                  "recognise control tokens in the text (on by default)");
  command->OnRun(exit_code, [options](Command&) {
    const Status status = RunTokenize(*options);
    return status ? 0 : ReportError(status.error());
  });
}

}  // namespace fathom
