// For tests and fuzzers: a vocabulary of bytes and the V4 control tokens.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace fathom::testing {

// Tokens 0..255 are bytes; BOS, EOS, User, Assistant, <think>, </think> and latest_reminder follow.
class ByteTokenizer : public Tokenizer {
 public:
  ByteTokenizer();
  std::vector<TokenId> Encode(std::string_view text, AddedTokens added) const override;
  std::string Decode(const std::vector<TokenId>& ids, DecodeOptions options) const override;
  std::string_view TokenBytes(TokenId id) const override;
  bool is_special(TokenId id) const override;
  bool is_added(TokenId id) const override { return id >= 256 && id < vocab_size(); }
  std::optional<TokenId> AddedTokenId(std::string_view content) const override;
  int64_t vocab_size() const override { return static_cast<int64_t>(tokens_.size()); }

 private:
  std::vector<std::string> tokens_;
};

}  // namespace fathom::testing
