#include "text/bpe.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <numeric>

#include "text/testing.h"

namespace fathom {
namespace {

// The definition: while neighbours form a pair of the list, join the pair of lowest rank, leftmost.
std::vector<TokenId> MergeByDefinition(const std::vector<Merge>& merges, std::string_view piece) {
  std::vector<TokenId> symbols;
  for (char c : piece) symbols.push_back(static_cast<uint8_t>(c));
  for (;;) {
    const Merge* best = nullptr;
    size_t best_at = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      // The last entry of a pair counts.
      auto it = std::find_if(merges.rbegin(), merges.rend(), [&](const Merge& m) {
        return m.left == symbols[i] && m.right == symbols[i + 1];
      });
      if (it != merges.rend() && (best == nullptr || &*it < best)) best = &*it, best_at = i;
    }
    if (best == nullptr) return symbols;
    symbols[best_at] = best->result;
    symbols.erase(symbols.begin() + static_cast<ptrdiff_t>(best_at) + 1);
  }
}

std::array<TokenId, 256> Bytes() {
  std::array<TokenId, 256> ids;
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

// Merges over the letters a..d, each joining two tokens that exist by then.
std::vector<Merge> GenMerges() {
  std::vector<TokenId> tokens = {'a', 'b', 'c', 'd'};
  std::vector<Merge> merges;
  const int count = *rc::gen::inRange(0, 30);
  for (int i = 0; i < count; ++i) {
    auto pick = [&] { return tokens[*rc::gen::inRange<size_t>(0, tokens.size())]; };
    merges.push_back({pick(), pick(), 256 + i});
    tokens.push_back(256 + i);
  }
  // Ranks need not follow the order of creation.
  if (*rc::gen::arbitrary<bool>()) std::reverse(merges.begin(), merges.end());
  return merges;
}

RC_GTEST_PROP(Bpe, EqualsTheDefinitionForShortAndLongPieces, ()) {
  const std::vector<Merge> merges = GenMerges();
  Bpe bpe(Bytes(), merges, {});
  BpeScratch scratch;
  for (size_t length : {1u, 2u, 7u, 30u, 31u, 96u, 97u, 300u}) {
    const auto piece =
        *rc::gen::container<std::string>(length, rc::gen::elementOf(std::string("aaabbcd")));
    const std::vector<TokenId> expected = MergeByDefinition(merges, piece);
    for (int round = 0; round < 2; ++round) {  // the second may come from the cache
      std::vector<TokenId> ids;
      bpe.Encode(piece, scratch, ids);
      RC_ASSERT(ids == expected);
    }
  }
}

TEST(Bpe, APieceInTheCacheIsNotMistakenForAnother) {
  Bpe bpe(Bytes(), {{'a', 'b', 256}}, {});
  BpeScratch scratch;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 100000; ++i) {
      const std::string piece = "ab" + std::to_string(i * 7919 % 100000);
      std::vector<TokenId> ids;
      bpe.Encode(piece, scratch, ids);
      ASSERT_EQ(ids.size(), piece.size() - 1);
      ASSERT_EQ(ids[0], 256);
      for (size_t k = 1; k < ids.size(); ++k) ASSERT_EQ(ids[k], piece[k + 1]);
    }
  }
}

TEST(Bpe, AMegabyteOfOneLetterIsNotQuadratic) {
  std::vector<Merge> merges = {{'a', 'a', 256}};
  for (int i = 0; i < 9; ++i) merges.push_back({256 + i, 256 + i, 257 + i});
  Bpe bpe(Bytes(), merges, {});
  BpeScratch scratch;
  std::vector<TokenId> ids;
  bpe.Encode(std::string(1 << 20, 'a'), scratch, ids);
  EXPECT_EQ(ids, std::vector<TokenId>(1 << 10, 265));
}

TEST(Bpe, WholePiecesComeBeforeMerging) {
  Bpe bpe(Bytes(), {{'a', 'b', 256}}, {{"abc", 300}});
  BpeScratch scratch;
  std::vector<TokenId> ids;
  bpe.Encode("abc", scratch, ids);
  bpe.Encode("abd", scratch, ids);
  EXPECT_EQ(ids, (std::vector<TokenId>{300, 256, 'd'}));
}

}  // namespace
}  // namespace fathom
