#include "api/testing_tokenizer.h"

namespace fathom::testing {
namespace {

constexpr const char* kControls[] = {"<｜begin▁of▁sentence｜>",
                                     "<｜end▁of▁sentence｜>",
                                     "<｜User｜>",
                                     "<｜Assistant｜>",
                                     "<think>",
                                     "</think>",
                                     "<｜latest_reminder｜>"};
constexpr TokenId kThinkBegin = 260;

}  // namespace

ByteTokenizer::ByteTokenizer() {
  for (int byte = 0; byte < 256; ++byte) tokens_.emplace_back(1, static_cast<char>(byte));
  for (const char* control : kControls) tokens_.emplace_back(control);
}

std::vector<TokenId> ByteTokenizer::Encode(std::string_view text, AddedTokens added) const {
  std::vector<TokenId> ids;
  for (size_t i = 0; i < text.size();) {
    TokenId id = static_cast<uint8_t>(text[i]);
    size_t length = 1;
    if (added == AddedTokens::kMatch && text[i] == '<') {
      for (TokenId control = 256; control < vocab_size(); ++control) {
        const std::string& content = tokens_[control];
        if (text.substr(i, content.size()) != content) continue;
        id = control;
        length = content.size();
      }
    }
    ids.push_back(id);
    i += length;
  }
  return ids;
}

std::string ByteTokenizer::Decode(const std::vector<TokenId>& ids, DecodeOptions options) const {
  Detokenizer detokenizer(*this, options.skip_special);
  std::string text;
  for (const TokenId id : ids) text += detokenizer.Push(id);
  return text + detokenizer.Finish();
}

std::string_view ByteTokenizer::TokenBytes(TokenId id) const {
  return id >= 0 && id < vocab_size() ? std::string_view(tokens_[id]) : std::string_view();
}

// As in V4's vocabulary the think markers are added tokens without the special flag.
bool ByteTokenizer::is_special(TokenId id) const {
  return is_added(id) && id != kThinkBegin && id != kThinkBegin + 1;
}

std::optional<TokenId> ByteTokenizer::AddedTokenId(std::string_view content) const {
  for (TokenId id = 256; id < vocab_size(); ++id) {
    if (tokens_[id] == content) return id;
  }
  return std::nullopt;
}

}  // namespace fathom::testing
