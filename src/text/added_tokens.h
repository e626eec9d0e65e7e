// Added tokens ("<｜User｜>", ...): whole strings that are found in text before it is
// pre-tokenised.
//
// As in Hugging Face's library: tokens with normalized=false are found first, the others in what
// lies between (there is no normaliser, so both see the same text); among those that begin at the
// leftmost place the longest wins; lstrip and rstrip swallow the white space beside a match.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/ids.h"

namespace fathom {

struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool lstrip = false;
  bool rstrip = false;
  bool normalized = false;
  bool special = false;
};

// A stretch of text: one added token, or ordinary text between them.
struct TextSpan {
  std::optional<TokenId> added;
  std::string_view text;
};

// Immutable after construction, thread-safe.
class AddedTokenMatcher {
 public:
  explicit AddedTokenMatcher(
      const std::vector<AddedToken>& tokens);  // contents not empty, distinct

  // The spans of `text` in order. Those of ordinary text are not empty.
  std::vector<TextSpan> Find(std::string_view text) const;

 private:
  struct Rule {
    TokenId id;
    bool lstrip, rstrip;
  };
  // A byte trie; a node is an index, 0 the root.
  struct Trie {
    struct Node {
      std::vector<std::pair<uint8_t, uint32_t>> children;  // sorted by byte
      std::optional<Rule> rule;
    };
    std::vector<Node> nodes{Node{}};
    std::vector<uint32_t> first = std::vector<uint32_t>(256, 0);  // the root's children; 0: none

    void Insert(const AddedToken& token);
    // Longest entry at the beginning of `text`, and its length in bytes.
    const Rule* Longest(std::string_view text, size_t* length) const;
    void Find(std::string_view text, std::vector<TextSpan>& spans) const;
    bool empty() const { return nodes.size() == 1; }
  };
  Trie verbatim_, normalized_;
};

}  // namespace fathom
