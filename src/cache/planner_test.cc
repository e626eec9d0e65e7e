#include "cache/planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <set>

#include "cache/plan_compare.h"
#include "cache/plan_testing.h"

namespace fathom {
namespace {

using ::testing::HasSubstr;
using testing::kMillion;
using testing::PlanTest;

double InGib(int64_t bytes) {
  return static_cast<double>(bytes) / (1 << 30);
}

CacheOptions Bf16() {
  return {.kv = KvDType::kBf16, .index = IndexDType::kBf16};
}

TEST_F(PlanTest, ProInBf16IsThePublishedSize) {
  const MemoryPlan pro = Plan("v4-pro", {.cache = Bf16(), .context = kMillion});
  EXPECT_EQ(pro.sequence.bytes_per_token, 9'848);
  EXPECT_EQ(pro.sequence.rows, 10'326'376'448);
  EXPECT_NEAR(InGib(pro.sequence.rows), 9.617, 5e-4);
  EXPECT_EQ(pro.sequence.window, 61 * 128 * 1024);
  EXPECT_NEAR(InGib(pro.sequence.total()), 9.62463, 5e-6);  // published: 9.62
}

TEST_F(PlanTest, FlashInBf16) {
  const MemoryPlan flash = Plan("v4-flash", {.cache = Bf16(), .context = kMillion});
  EXPECT_EQ(flash.sequence.bytes_per_token, 6'880);
  EXPECT_EQ(flash.sequence.rows, 7'214'202'880);
  EXPECT_NEAR(InGib(flash.sequence.rows), 6.719, 5e-4);
}

TEST_F(PlanTest, QuantisedFormatsOfBothModels) {
  struct Case {
    const char* model;
    IndexDType index;
    double per_token;
    double gib;
  };
  for (const Case& c : {Case{"v4-flash", IndexDType::kFp8, 3850.25, 3.760},
                        Case{"v4-flash", IndexDType::kMxfp4, 3514.25, 3.432},
                        Case{"v4-pro", IndexDType::kFp8, 5511.4375, 5.382},
                        Case{"v4-pro", IndexDType::kMxfp4, 5031.4375, 4.914}}) {
    const MemoryPlan plan =
        Plan(c.model, {.cache = {.kv = KvDType::kFp8, .index = c.index}, .context = kMillion});
    EXPECT_EQ(plan.sequence.bytes_per_token, c.per_token) << c.model;
    EXPECT_NEAR(InGib(plan.sequence.rows), c.gib, 5e-4) << c.model;
  }
  const MemoryPlan pro = Plan("v4-pro", {.context = kMillion});
  EXPECT_NEAR(InGib(pro.sequence.total()), 4.9178, 5e-5);
  const MemoryPlan bf16 = Plan("v4-pro", {.cache = Bf16(), .context = kMillion});
  EXPECT_NEAR(InGib(bf16.sequence.total()) / InGib(pro.sequence.total()), 1.957, 5e-4);
}

TEST_F(PlanTest, ComparedWithOlderAttention) {
  const MemoryPlan pro = Plan("v4-pro", {.cache = Bf16(), .context = kMillion});
  const Comparison v32 = *Compare("v3.2", Config("v4-pro"), pro.sequence, kMillion);
  EXPECT_EQ(v32.bytes_per_token, 85'888);
  EXPECT_EQ(v32.bytes, 90'060'095'488);
  EXPECT_EQ(InGib(v32.bytes), 83.875);
  EXPECT_NEAR(v32.ratio, 8.7146, 1e-4);
  EXPECT_NEAR(v32.ratio_rows, 8.72, 5e-3);
  const Comparison mha = *Compare("mha", Config("v4-pro"), pro.sequence, kMillion);
  EXPECT_EQ(mha.bytes_per_token, int64_t{61} * 128 * 512 * 2 * 2);
  const auto unknown = Compare("v3", Config("v4-pro"), pro.sequence, kMillion);
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().param, "--compare");
  EXPECT_THAT(unknown.error().message, HasSubstr("'v3' is not one of v3.2, mha"));
}

TEST_F(PlanTest, RowsOfAContext) {
  EXPECT_EQ(Plan("v4-pro", {.context = kMillion}).sequence.csa_rows, 262'144);
  EXPECT_EQ(Plan("v4-pro", {.context = kMillion}).sequence.hca_rows, 8'192);
  EXPECT_EQ(Plan("v4-pro", {.context = 1'000'000}).sequence.hca_rows, 7'812);
}

// A row is emitted by the token that completes it: 13 tokens have three c4 rows, from tokens 3, 7
// and 11, and none of c128.
TEST_F(PlanTest, ThirteenTokens) {
  const Geometry geometry = Plan("v4-flash", {}).geometry;
  std::vector<int> csa, hca;
  for (int token = 0; token < 13; ++token) {
    const SequenceBytes before = PlanSequence(geometry, token);
    const SequenceBytes after = PlanSequence(geometry, token + 1);
    if (after.csa_rows > before.csa_rows) csa.push_back(token);
    if (after.hca_rows > before.hca_rows) hca.push_back(token);
  }
  EXPECT_THAT(csa, ::testing::ElementsAre(3, 7, 11));
  EXPECT_THAT(hca, ::testing::IsEmpty());
  EXPECT_EQ(PlanSequence(geometry, 13).csa_rows, 3);
  EXPECT_EQ(PlanSequence(geometry, 13).rows, 21 * 3 * (584 + 68));
}

TEST_F(PlanTest, SlabsAndBundles) {
  const MemoryPlan flash = Plan("v4-flash", {});
  EXPECT_EQ(flash.geometry.block_bytes, 917'568);
  EXPECT_EQ(flash.bundle_bytes, 43 * 128 * 584 + 21 * 4 * 2 * (512 + 128) * 4);  // 3.5 MiB
  EXPECT_EQ(flash.bundle_unit,
            flash.bundle_bytes + 21 * 4 * 2 * 2 * (512 + 128) * 4 + 20 * 3 * 512 * 4);
  const MemoryPlan pro = Plan("v4-pro", {});
  EXPECT_EQ(pro.geometry.block_bytes, 1'315'008);
  EXPECT_EQ(pro.bundle_bytes, 61 * 128 * 584 + 30 * 4 * 2 * (512 + 128) * 4);  // 4.9 MiB
  // kv-cache.md 1: about 4.9 MiB of slot for Flash.
  EXPECT_NEAR(static_cast<double>(flash.sequence.slot_bytes) / (1 << 20), 4.9, 0.1);
}

TEST_F(PlanTest, WorkspacesDependOnTheStepAlone) {
  const MemoryPlan small = Plan("v4-flash", {.context = 8'192});
  const MemoryPlan large = Plan("v4-flash", {.context = kMillion});
  EXPECT_EQ(small.workspaces.bytes(), large.workspaces.bytes());
  EXPECT_EQ(small.workspaces.logits, int64_t{64} * 129'280 * 4);
  const MemoryPlan wide = Plan("v4-flash", {.slots = 128, .step_tokens = 1'024});
  EXPECT_GT(wide.workspaces.activations, large.workspaces.activations);
  EXPECT_EQ(wide.workspaces.logits, 2 * large.workspaces.logits);
  const MemoryPlan cpu = Plan("v4-flash", {.on_gpu = false});
  EXPECT_GT(cpu.workspaces.activations, large.workspaces.activations);  // float32, not bf16
}

TEST_F(PlanTest, WhatDoesNotFitIsShortToTheByte) {
  const MemoryPlan wish = Plan("v4-flash", {.context = kMillion});
  const int64_t needed =
      wish.weight_bytes + wish.workspaces.bytes() + wish.least.bytes(wish.geometry);
  const MemoryPlan exact = Plan("v4-flash", {.context = kMillion, .memory = needed});
  EXPECT_TRUE(exact.fits());
  EXPECT_EQ(exact.pools, exact.least);
  EXPECT_EQ(exact.total_bytes(), needed);
  const MemoryPlan below = Plan("v4-flash", {.context = kMillion, .memory = needed - 1});
  EXPECT_FALSE(below.fits());
  EXPECT_EQ(below.shortfall, 1);
  const MemoryPlan card = Plan("v4-flash", {.context = kMillion, .memory = int64_t{24} << 30});
  EXPECT_EQ(card.shortfall, needed - (int64_t{24} << 30));
  const MemoryPlan nothing = Plan("v4-flash", {.context = kMillion, .memory = 0});
  EXPECT_EQ(nothing.shortfall, needed);
  const MemoryPlan cache =
      Plan("v4-flash", {.context = kMillion, .cache_memory = wish.least.bytes(wish.geometry) - 7});
  EXPECT_EQ(cache.shortfall, 7);
}

TEST_F(PlanTest, WhatFitsIsUsedButNeverExceeded) {
  const ModelConfig config = Config("v4-flash");
  const WeightBudget weights = BudgetWeights(config);
  EXPECT_TRUE(rc::check("pools fill the memory up to less than a block and its bundles", [&] {
    PlanRequest request;
    request.context = *rc::gen::inRange<int64_t>(1, kMillion + 1);
    request.slots = *rc::gen::inRange(1, 200);
    request.sequences = *rc::gen::inRange(1, request.slots + 1);
    request.cache.block_tokens = 128 * *rc::gen::inRange(1, 9);
    request.memory = *rc::gen::inRange<int64_t>(0, int64_t{400} << 30);
    request.bundles = *rc::gen::arbitrary<bool>();
    const MemoryPlan plan = *PlanMemory(config, request, weights);
    if (!plan.fits()) {
      request.memory += plan.shortfall;
      const MemoryPlan enough = *PlanMemory(config, request, weights);
      RC_ASSERT(enough.fits());
      RC_ASSERT(enough.total_bytes() == request.memory);
      return;
    }
    RC_ASSERT(plan.total_bytes() <= request.memory);
    RC_ASSERT(plan.pools.blocks >= plan.least.blocks);
    RC_ASSERT(plan.pools.bundles >= plan.least.bundles);
    if (plan.pools != plan.least) {
      RC_ASSERT(plan.total_bytes() + plan.geometry.block_bytes + 2 * plan.bundle_unit >
                request.memory);
    }
    // What the table proposes fits when it is asked for, workspaces of so many sequences included.
    const Concurrency& line = plan.concurrency.back();
    PlanRequest most = request;
    most.context = line.tokens;
    const auto fits = [&](int64_t n) {
      most.slots = most.sequences = static_cast<int>(n);
      most.step_tokens = std::max(request.step_tokens, most.slots);
      return PlanMemory(config, most, weights)->fits();
    };
    RC_ASSERT(line.most == 0 || fits(line.most));
    RC_ASSERT(line.most == 65'536 || !fits(line.most + 1));
  }));
}

TEST_F(PlanTest, LongestContextThatFits) {
  const MemoryPlan plan = Plan("v4-flash", {.context = kMillion, .cache_memory = int64_t{2} << 30});
  ASSERT_FALSE(plan.fits());
  PoolDemand demand = plan.demand();
  const int64_t longest = LongestContext(plan.geometry, demand, plan.cache_memory);
  EXPECT_TRUE(Plan("v4-flash", {.context = longest, .cache_memory = plan.cache_memory}).fits());
  EXPECT_FALSE(
      Plan("v4-flash", {.context = longest + 1, .cache_memory = plan.cache_memory}).fits());
}

TEST(BundlesKept, GrowWithTheLogarithmOfTheContext) {
  EXPECT_EQ(BundlesKept(1), 2);
  EXPECT_EQ(BundlesKept(4'096), 4);
  EXPECT_EQ(BundlesKept(131'072), 14);
  EXPECT_EQ(BundlesKept(kMillion), 20);  // kv-cache.md 3: about twenty
}

TEST_F(PlanTest, EveryPageSizeAndItsPadding) {
  for (const char* model : {"v4-flash", "v4-pro"}) {
    for (const int tokens : {128, 256, 512, 1'024}) {
      for (const KvDType kv : {KvDType::kBf16, KvDType::kFp8}) {
        for (const IndexDType index : {IndexDType::kBf16, IndexDType::kFp8, IndexDType::kMxfp4}) {
          const Geometry geometry =
              Plan(model, {.cache = {.kv = kv, .index = index, .block_tokens = tokens}}).geometry;
          std::set<int64_t> sizes;
          for (const KindGeometry& kind : geometry.kinds) {
            if (!kind.block_kind) continue;
            sizes.insert(kind.page_bytes);
            EXPECT_EQ(kind.page_bytes % 576, 0);
            EXPECT_LT(kind.padding_bytes, 576);
            EXPECT_EQ(kind.page_bytes - kind.padding_bytes, kind.rows_per_page * kind.row_bytes);
          }
          EXPECT_LE(sizes.size(), 3u);
        }
      }
    }
  }
}

TEST_F(PlanTest, ImpossibleRequestsNameTheFlag) {
  const ModelConfig config = Config("v4-flash");
  const auto param = [&](const PlanRequest& request) {
    const auto plan = PlanMemory(config, request);
    EXPECT_FALSE(plan);
    return plan ? "" : plan.error().param;
  };
  EXPECT_EQ(param({.context = -1}), "--context");
  EXPECT_EQ(param({.context = kMillion + 1}), "--context");
  EXPECT_EQ(param({.slots = 0}), "--max-num-seqs");
  EXPECT_EQ(param({.sequences = 0}), "--batch");
  EXPECT_EQ(param({.sequences = 65}), "--batch");
  EXPECT_EQ(param({.step_tokens = 63}), "--max-num-batched-tokens");
  EXPECT_EQ(param({.step_tokens = 0}), "--max-num-batched-tokens");
  EXPECT_EQ(param({.gpus = 0}), "--gpus");
  EXPECT_EQ(param({.gpus = 257}), "--gpus");
  EXPECT_EQ(param({.cache = {.block_tokens = 100}}), "block-size");
}

}  // namespace
}  // namespace fathom
