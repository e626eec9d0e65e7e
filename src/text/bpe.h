// Byte-pair merging of one piece of text, with a cache of pieces already seen.
//
// The result is defined by the merge list alone: as long as two neighbours form a pair of the list,
// the pair that stands first in the list is joined, leftmost first. Two implementations give it,
// one for short pieces and one for long (a run of a million letters is one piece).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/ids.h"

namespace fathom {

// One entry of the merge list, in ids.
struct Merge {
  TokenId left, right, result;
};

// A thread's working memory for one Bpe: never shared, bounded, worth keeping between calls.
class BpeScratch {
 public:
  BpeScratch() : slots_(kSlots) {}
  void Clear() { slots_.assign(kSlots, Slot{}); }

 private:
  friend class Bpe;
  // One cache line per piece. Longer pieces, and those of more ids, are merged every time.
  struct alignas(64) Slot {
    static constexpr size_t kMaxBytes = 30;
    static constexpr size_t kMaxIds = 8;
    uint8_t length = 0;  // 0: empty slot
    uint8_t count = 0;
    char bytes[kMaxBytes];
    TokenId ids[kMaxIds];
  };
  static constexpr size_t kSlots = 1 << 14;  // 1 MiB; direct-mapped, the last piece stays

  std::vector<Slot> slots_;
  std::vector<TokenId> symbols_;
  std::vector<uint64_t> pairs_;
  std::vector<uint32_t> next_, previous_;
  std::vector<uint64_t> heap_;
};

// Immutable after construction; Encode is thread-safe with a scratch per thread.
class Bpe {
 public:
  // `byte_ids[b]` is the token of the single byte b; the place in `merges` is the rank, and of two
  // entries for the same pair the later counts (as in Hugging Face's library). `whole` gives the
  // pieces that are tokens before any merging ("ignore_merges"); empty otherwise.
  Bpe(const std::array<TokenId, 256>& byte_ids, const std::vector<Merge>& merges,
      std::unordered_map<std::string, TokenId> whole);

  // Appends the ids of `piece` (not empty, under 4 GiB) to `ids`. Linear in the piece's length up
  // to a logarithm.
  void Encode(std::string_view piece, BpeScratch& scratch, std::vector<TokenId>& ids) const;

 private:
  // rank << 32 | result; ordered by rank. kNone: the two do not merge.
  static constexpr uint64_t kNone = ~uint64_t{0};
  static constexpr TokenId Result(uint64_t pair) { return static_cast<TokenId>(pair); }

  uint64_t Find(TokenId left, TokenId right) const {
    uint64_t key =
        static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
    for (size_t i = Hash(key);; i = (i + 1) & (table_.size() - 1)) {
      if (table_[i].key == key) return table_[i].pair;
      if (table_[i].key == kNone) return kNone;
    }
  }
  size_t Hash(uint64_t key) const { return (key * 0x9E3779B97F4A7C15u) >> shift_; }

  void MergePiece(std::string_view piece, BpeScratch& scratch, std::vector<TokenId>& ids) const;
  void MergeShort(std::string_view piece, BpeScratch& scratch, std::vector<TokenId>& ids) const;
  void MergeLong(std::string_view piece, BpeScratch& scratch, std::vector<TokenId>& ids) const;

  struct Entry {
    uint64_t key = kNone;  // left << 32 | right; ids are not negative, so kNone is no key
    uint64_t pair = kNone;
  };
  std::array<TokenId, 256> byte_ids_;
  std::vector<uint64_t> byte_pairs_;  // [256][256]: the first look at a piece is all byte pairs
  std::vector<Entry> table_;          // open addressing, at most half full
  int shift_ = 0;
  std::unordered_map<std::string, TokenId> whole_;
};

}  // namespace fathom
