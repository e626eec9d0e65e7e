#include "cache/pool_sizes.h"

#include <gtest/gtest.h>

#include "cache/plan_testing.h"

namespace fathom {
namespace {

using PoolSizesTest = testing::PlanTest;
using testing::kMillion;

Geometry Flash(int block_tokens = 256) {
  return *MakeGeometry(testing::ReleasedConfig("v4-flash"), {.block_tokens = block_tokens});
}

TEST_F(PoolSizesTest, DefaultsHoldOneLongestSequenceAndSomethingForEverySlot) {
  const Geometry geometry = Flash();
  const PoolSizes one_long = DefaultPools(geometry, {.context = kMillion, .slots = 64});
  EXPECT_EQ(one_long, (PoolSizes{.blocks = 4096, .slots = 64, .bundles = 4 * 64 + 4096 / 16}));
  const PoolSizes many = DefaultPools(geometry, {.context = kMillion, .slots = 1024});
  EXPECT_EQ(many.blocks, 16 * 1024);
  const PoolSizes little = DefaultPools(geometry, {.context = 300, .slots = 64});
  EXPECT_EQ(little.blocks, 2 * 64);
  const PoolSizes batch = DefaultPools(geometry, {.context = kMillion, .sequences = 8});
  EXPECT_EQ(batch.blocks, 8 * 4096);
  EXPECT_EQ(DefaultPools(geometry, {.context = kMillion, .bundles = false}).bundles, 0);
  // The share of bundles follows the tokens, not the number of blocks they are cut into.
  EXPECT_EQ(DefaultPools(Flash(1024), {.context = kMillion, .slots = 64}).bundles,
            one_long.bundles);
}

TEST_F(PoolSizesTest, BundlesGiveWayToTheBlocksThatAreNeeded) {
  const Geometry geometry = Flash();
  const PoolDemand demand{.context = kMillion};
  const PoolSizes least = LeastPools(geometry, demand);
  EXPECT_EQ(least.bundles, BundlesKept(kMillion));
  const int64_t unit = BundleUnitBytes(geometry);
  const PoolSizes tight = PoolsWithin(geometry, demand, least.bytes(geometry) + 10 * unit + 1);
  EXPECT_EQ(tight.blocks, least.blocks);
  EXPECT_EQ(tight.bundles, least.bundles + 10);
  const PoolSizes ample = PoolsWithin(geometry, demand, int64_t{64} << 30);
  EXPECT_EQ(ample.bundles, 4 * 64 + ample.blocks / 16);
}

TEST_F(PoolSizesTest, BundlesStayWithinTheirIds) {
  const Geometry geometry = Flash();
  constexpr int64_t kMost = 2'147'483'647;
  // 2^31 slots ask for more; bundles take at most twice the bytes of the blocks.
  EXPECT_EQ(BundlesFor(geometry, {.context = kMillion, .slots = kMost}, kMost),
            2 * kMost * geometry.block_bytes / BundleUnitBytes(geometry));
  Geometry small = geometry;
  small.block_bytes = 0;
  EXPECT_EQ(BundlesFor(small, {.context = kMillion, .slots = kMost}, 1), kMost);
  EXPECT_EQ(BundlesFor(geometry, {.context = kMillion, .slots = 1}, 1), BundlesKept(kMillion));
  EXPECT_EQ(BundlesFor(geometry, {.context = 300, .slots = 64, .bundles = false}, 100), 0);
}

// More memory and more slots make room for more sequences, not for bundles alone.
TEST_F(PoolSizesTest, BundlesLeaveRoomForBlocks) {
  const Geometry geometry = Flash();
  int64_t before = 0;
  for (const int64_t gib : {1, 2, 4, 8, 16}) {
    const PoolDemand demand{.context = 8'192, .slots = 64};
    const PoolSizes pools = PoolsWithin(geometry, demand, gib << 30);
    EXPECT_LE(pools.bundles * BundleUnitBytes(geometry), 2 * pools.blocks * geometry.block_bytes);
    EXPECT_GE(pools.blocks, before + 100) << gib;
    before = pools.blocks;
  }
}

TEST_F(PoolSizesTest, SequencesAreLimitedByBlocksAndSlots) {
  const Geometry geometry = Flash();
  const PoolSizes pools{.blocks = 100, .slots = 8, .bundles = 0};
  EXPECT_EQ(SequencesIn(geometry, pools, 1), 8);
  EXPECT_EQ(SequencesIn(geometry, pools, 256 * 25), 4);
  EXPECT_EQ(SequencesIn(geometry, pools, 256 * 25 + 1), 3);
  EXPECT_EQ(SequencesIn(geometry, pools, 256 * 101), 0);
}

}  // namespace
}  // namespace fathom
