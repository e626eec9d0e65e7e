#include "cache/prefix_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace fathom {
namespace {

// Sequences that compute their tokens and end, on a cache of 32 blocks.
class Small {
 public:
  std::vector<int64_t> PlanSaves(int64_t from, int64_t prompt, std::vector<int64_t> boundaries,
                                 int64_t junction = 0) const {
    return cache_.PlanSaves(from, prompt, prompt, boundaries, junction);
  }
  // Returns how many tokens were found.
  int64_t Run(int seed, int64_t length, double now, double keep_until = 0) {
    std::vector<TokenId> tokens(static_cast<size_t>(length));
    std::iota(tokens.begin(), tokens.end(), seed * 100'000);
    PrefixPath path = cache_.Open("");
    const PrefixMatch match = cache_.Find(path, tokens, now);
    std::vector<BlockId> table;
    const bool found = match.found() && cache_.Attach(match, SlotId{0}, &path, &table, now);
    const int64_t from = found ? match.boundary : 0;
    std::vector<int64_t> saves = cache_.PlanSaves(from, length, length, {}, match.junction);
    saves.push_back(length);
    for (const int64_t at : saves) {
      while (static_cast<int64_t>(table.size()) * 256 < at) {
        table.push_back(*cache_.AllocateBlock(now));
      }
      cache_.Extend(&path, tokens, at, &table);
      cache_.Save(path, tokens, at, table, SlotId{0}, now);
    }
    if (keep_until > 0) cache_.Keep(path, length - 1, keep_until);
    cache_.Leave(&path, &table, now);
    cache_.CheckInvariants();
    return from;
  }

 private:
  BlockPool blocks_{nullptr, 1, 32};
  BundlePool bundles_{nullptr, 1, 10};
  std::vector<CacheOp> ops_;
  PrefixCache cache_{{}, blocks_, bundles_, nullptr, &ops_};
};

// A retained path is the last to go, and its place is its own: what is computed later, also below
// the same root, is not retained with it.
TEST(PrefixCache, ARetainedPathSurvivesWhatEvictsOthers) {
  Small cache;
  cache.Run(1, 606, 1, 600);
  cache.Run(2, 606, 1);
  for (int i = 0; i < 6; ++i) cache.Run(10 + i, 3'000, 2 + i);
  EXPECT_EQ(cache.Run(2, 606, 20), 0);
  EXPECT_GE(cache.Run(1, 640, 21), 606 - 1);
}

TEST(PrefixCache, RetentionEnds) {
  Small cache;
  cache.Run(1, 606, 1, 5);
  for (int i = 0; i < 6; ++i) cache.Run(10 + i, 3'000, 10 + i);
  EXPECT_EQ(cache.Run(1, 640, 21), 0);
}

// The end of a prompt lies inside the path of its answer. That makes it worth less than the ends of
// other sessions, but not so little that it goes the moment it was written.
TEST(PrefixCache, WhatWasJustWrittenOutlivesEndsOfLongAgo) {
  Small cache;
  for (int i = 0; i < 12; ++i) cache.Run(10 + i, 600, 1 + i);
  EXPECT_EQ(cache.Run(1, 900, 100), 0);
  EXPECT_EQ(cache.Run(1, 900, 101), 899);
  // Among bundles of about the same age the interior ones go first.
  for (int i = 0; i < 3; ++i) cache.Run(30 + i, 600, 102);
  EXPECT_EQ(cache.Run(32, 640, 103), 600);
}

// A short question after a system message, or after the last block edge, must not hide where others
// go on: 64 tokens between bundles count from below.
TEST(PrefixCache, BundlesAreSavedWhereOthersGoOn) {
  Small cache;
  using ::testing::Contains;
  const std::vector<int64_t> chat = cache.PlanSaves(0, 2'030, {2'019});
  EXPECT_THAT(chat, Contains(2'019));
  EXPECT_THAT(chat, Contains(2'029));
  EXPECT_THAT(cache.PlanSaves(0, 2'318, {}), Contains(2'304));
  EXPECT_THAT(cache.PlanSaves(1'792, 2'030, {}, 2'020), Contains(2'020));
  // Too near to what is there already, or to a point just below.
  EXPECT_THAT(cache.PlanSaves(2'000, 2'030, {2'019}, 2'010), ::testing::IsEmpty());
  EXPECT_THAT(cache.PlanSaves(0, 400, {200, 220}), ::testing::Not(Contains(220)));
}

}  // namespace
}  // namespace fathom
