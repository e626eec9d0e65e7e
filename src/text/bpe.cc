#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

namespace fathom {
namespace {

// Above this many bytes a heap beats scanning all pairs for the lowest rank.
constexpr size_t kShort = 96;

uint64_t HashBytes(std::string_view text) {
  constexpr uint64_t kMul = 0x9FB21C651E98DF25u;
  uint64_t h = text.size() * kMul;
  const char* p = text.data();
  size_t n = text.size();
  for (; n >= 8; p += 8, n -= 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    h = (h ^ word) * kMul;
    h ^= h >> 32;
  }
  if (n >= 4) {
    uint32_t low, high;
    std::memcpy(&low, p, 4);
    std::memcpy(&high, p + n - 4, 4);
    h = (h ^ (low | static_cast<uint64_t>(high) << 32)) * kMul;
  } else if (n > 0) {
    // First, middle and last byte: all of up to three.
    uint64_t word = static_cast<uint8_t>(p[0]) |
                    static_cast<uint64_t>(static_cast<uint8_t>(p[n / 2])) << 8 |
                    static_cast<uint64_t>(static_cast<uint8_t>(p[n - 1])) << 16;
    h = (h ^ word) * kMul;
  }
  return h ^ h >> 29;
}

}  // namespace

Bpe::Bpe(const std::array<TokenId, 256>& byte_ids, const std::vector<Merge>& merges,
         std::unordered_map<std::string, TokenId> whole)
    : byte_ids_(byte_ids), byte_pairs_(256 * 256, kNone), whole_(std::move(whole)) {
  size_t size = std::bit_ceil(std::max<size_t>(2 * merges.size() + 1, 16));
  table_.resize(size);
  shift_ = 64 - std::countr_zero(size);
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Merge& m = merges[rank];
    uint64_t key =
        static_cast<uint64_t>(static_cast<uint32_t>(m.left)) << 32 | static_cast<uint32_t>(m.right);
    size_t i = Hash(key);
    while (table_[i].key != kNone && table_[i].key != key) i = (i + 1) & (size - 1);
    table_[i] = {key, static_cast<uint64_t>(rank) << 32 | static_cast<uint32_t>(m.result)};
  }
  for (size_t a = 0; a < 256; ++a) {
    for (size_t b = 0; b < 256; ++b) byte_pairs_[a << 8 | b] = Find(byte_ids_[a], byte_ids_[b]);
  }
}

void Bpe::Encode(std::string_view piece, BpeScratch& scratch, std::vector<TokenId>& ids) const {
  using Slot = BpeScratch::Slot;
  if (piece.size() > Slot::kMaxBytes) return MergePiece(piece, scratch, ids);
  Slot& slot = scratch.slots_[HashBytes(piece) & (BpeScratch::kSlots - 1)];
  if (slot.length == piece.size() && std::memcmp(slot.bytes, piece.data(), piece.size()) == 0) {
    ids.insert(ids.end(), slot.ids, slot.ids + slot.count);
    return;
  }
  size_t before = ids.size();
  MergePiece(piece, scratch, ids);
  size_t count = ids.size() - before;
  if (count > Slot::kMaxIds) return;
  slot.length = static_cast<uint8_t>(piece.size());
  slot.count = static_cast<uint8_t>(count);
  std::memcpy(slot.bytes, piece.data(), piece.size());
  std::copy(ids.begin() + static_cast<ptrdiff_t>(before), ids.end(), slot.ids);
}

void Bpe::MergePiece(std::string_view piece, BpeScratch& scratch, std::vector<TokenId>& ids) const {
  if (!whole_.empty()) {
    if (auto it = whole_.find(std::string(piece)); it != whole_.end()) {
      ids.push_back(it->second);
      return;
    }
  }
  if (piece.size() <= kShort) {
    MergeShort(piece, scratch, ids);
  } else {
    MergeLong(piece, scratch, ids);
  }
}

// Symbols stand side by side; pairs[i] is what symbols i and i+1 merge into. Each round scans for
// the smallest: O(n^2), all within a few cache lines.
void Bpe::MergeShort(std::string_view piece, BpeScratch&, std::vector<TokenId>& ids) const {
  TokenId symbols[kShort];
  uint64_t pairs[kShort];
  size_t n = piece.size();
  auto byte = [&](size_t i) { return static_cast<size_t>(static_cast<uint8_t>(piece[i])); };
  for (size_t i = 0; i < n; ++i) symbols[i] = byte_ids_[byte(i)];
  for (size_t i = 0; i + 1 < n; ++i) pairs[i] = byte_pairs_[byte(i) << 8 | byte(i + 1)];
  while (n > 1) {
    size_t best = 0;
    uint64_t lowest = pairs[0];
    for (size_t i = 1; i + 1 < n; ++i) {
      if (pairs[i] < lowest) lowest = pairs[i], best = i;
    }
    if (lowest == kNone) break;
    symbols[best] = Result(lowest);
    --n;
    std::memmove(symbols + best + 1, symbols + best + 2, (n - best - 1) * sizeof(TokenId));
    if (best + 1 < n) {
      std::memmove(pairs + best + 1, pairs + best + 2, (n - best - 2) * sizeof(uint64_t));
      pairs[best] = Find(symbols[best], symbols[best + 1]);
    }
    if (best > 0) pairs[best - 1] = Find(symbols[best - 1], symbols[best]);
  }
  ids.insert(ids.end(), symbols, symbols + n);
}

// Symbols form a linked list over byte positions. The heap holds rank << 32 | position of every
// pair that could merge; entries whose pair has changed since are dropped when they surface.
void Bpe::MergeLong(std::string_view piece, BpeScratch& scratch, std::vector<TokenId>& ids) const {
  const auto n = static_cast<uint32_t>(piece.size());
  std::vector<TokenId>& symbols = scratch.symbols_;
  std::vector<uint64_t>& pairs = scratch.pairs_;  // of the symbol at a position and the one after
  std::vector<uint32_t>& next = scratch.next_;
  std::vector<uint32_t>& previous = scratch.previous_;
  std::vector<uint64_t>& heap = scratch.heap_;
  symbols.resize(n);
  pairs.assign(n, kNone);
  next.resize(n);
  previous.resize(n);
  heap.clear();

  auto byte = [&](size_t i) { return static_cast<size_t>(static_cast<uint8_t>(piece[i])); };
  auto entry = [&](uint32_t at) { return (pairs[at] >> 32) << 32 | at; };
  for (uint32_t i = 0; i < n; ++i) {
    symbols[i] = byte_ids_[byte(i)];
    next[i] = i + 1;
    previous[i] = i - 1;  // of position 0: never followed
    if (i + 1 < n) pairs[i] = byte_pairs_[byte(i) << 8 | byte(i + 1)];
    if (pairs[i] != kNone) heap.push_back(entry(i));
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  auto update = [&](uint32_t at) {
    pairs[at] = next[at] < n ? Find(symbols[at], symbols[next[at]]) : kNone;
    if (pairs[at] == kNone) return;
    heap.push_back(entry(at));
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    uint64_t top = heap.front();
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    heap.pop_back();
    const auto at = static_cast<uint32_t>(top);
    if (pairs[at] == kNone || pairs[at] >> 32 != top >> 32) continue;
    symbols[at] = Result(pairs[at]);
    const uint32_t gone = next[at];
    pairs[gone] = kNone;
    next[at] = next[gone];
    if (next[at] < n) previous[next[at]] = at;
    update(at);
    if (at > 0) update(previous[at]);
  }
  for (uint32_t i = 0; i < n; i = next[i]) ids.push_back(symbols[i]);

  // A rare giant must not stay in every thread's memory.
  constexpr size_t kKeep = 1 << 16;
  if (n > kKeep) {
    symbols = {}, pairs = {}, next = {}, previous = {}, heap = {};
  }
}

}  // namespace fathom
