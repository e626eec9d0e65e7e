// tokenizer.json, checked: what the file says, in the form the tokenizer is built from.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/ids.h"
#include "core/status.h"
#include "text/added_tokens.h"
#include "text/bpe.h"

namespace fathom {

struct TokenizerFile {
  // The bytes each id stands for (added tokens: their content); empty where the file has no entry.
  std::vector<std::string> bytes;
  std::array<TokenId, 256> byte_ids{};
  std::vector<Merge> merges;
  std::vector<AddedToken> added;
  std::vector<std::string> split_regexes;
  bool ignore_merges = false;  // a piece that is a token is not merged
  // With ignore_merges, the pieces in question.
  std::unordered_map<std::string, TokenId> whole;
};

// Accepts byte-level BPE and nothing else. Broken files are kDataLoss, features that are not
// supported kUnimplemented; both name the key. `origin` opens every message.
//
// "post_processor" is not read: it would add tokens around a text, which is the chat encoder's work
// (and DeepSeek's only adjusts offsets).
Expected<TokenizerFile> ParseTokenizerFile(std::string_view json, std::string_view origin);

}  // namespace fathom
