#include "cache/weight_budget.h"

#include <gtest/gtest.h>

#include "cache/plan_testing.h"

namespace fathom {
namespace {

using WeightBudgetTest = testing::PlanTest;

TEST_F(WeightBudgetTest, EveryReleasedCheckpointToTheByte) {
  struct Case {
    const char* model;
    int64_t tensors;
    int64_t bytes;
  };
  for (const Case& c :
       {Case{"v4-flash", 69'187, 159'609'485'896}, Case{"v4-flash-0731", 72'317, 166'878'536'440},
        Case{"v4-pro-0813", 149'782, 892'727'580'904}, Case{"v4-pro", 145'116, 864'704'792'696}}) {
    const WeightBudget budget = BudgetWeights(Config(c.model));
    EXPECT_EQ(budget.tensors, c.tensors) << c.model;
    EXPECT_EQ(budget.bytes, c.bytes) << c.model;
    int64_t tensors = 0, bytes = 0;
    for (const WeightBudget::Kind& kind : budget.kinds) {
      EXPECT_GT(kind.tensors, 0) << c.model;
      tensors += kind.tensors;
      bytes += kind.bytes;
    }
    EXPECT_EQ(tensors, budget.tensors) << c.model;
    EXPECT_EQ(bytes, budget.bytes) << c.model;
  }
}

TEST_F(WeightBudgetTest, KindsOfFlash) {
  const WeightBudget budget = BudgetWeights(Config("v4-flash"));
  // 43 layers x 256 experts x (w1, w2, w3: 4096 x 2048 in halves of bytes and a scale per 32).
  const int64_t expert = int64_t{3} * 4096 * 2048 / 2 * 17 / 16;
  EXPECT_EQ(budget.of(WeightKind::kExperts).tensors, 43 * 256 * 6);
  EXPECT_EQ(budget.of(WeightKind::kExperts).bytes, 43 * 256 * expert);
  EXPECT_EQ(budget.of(WeightKind::kDrafters).expert_bytes, 256 * expert);
  EXPECT_EQ(budget.of(WeightKind::kEmbedding).bytes, int64_t{129'280} * 4096 * 2);
  EXPECT_EQ(budget.of(WeightKind::kHead).bytes, int64_t{129'280} * 4096 * 2);
  EXPECT_TRUE(budget.format_assumed);
  EXPECT_FALSE(BudgetWeights(Config("v4-pro")).format_assumed);
}

TEST_F(WeightBudgetTest, Fp8ExpertsAreOfTheirStoredSize) {
  ModelConfig config = Config("v4-flash");
  config.expert_format = ExpertFormat::kFp8;
  const WeightBudget budget = BudgetWeights(config);
  const int64_t expert = int64_t{3} * (4096 * 2048 + 32 * 16);
  EXPECT_TRUE(budget.experts_fp8);
  EXPECT_EQ(budget.of(WeightKind::kExperts).bytes, 43 * 256 * expert);
}

TEST_F(WeightBudgetTest, ExpertsAreDividedAndTheRestIsReplicated) {
  const WeightBudget budget = BudgetWeights(Config("v4-flash"));
  // Drafters stay in the checkpoint.
  EXPECT_EQ(budget.per_gpu(WeightKind::kDrafters, 1), 0);
  const int64_t loaded = budget.bytes - budget.of(WeightKind::kDrafters).bytes;
  EXPECT_EQ(budget.per_gpu(1), loaded);
  const int64_t experts = budget.of(WeightKind::kExperts).bytes;
  EXPECT_EQ(budget.per_gpu(8), loaded - experts + experts / 8);
  EXPECT_EQ(budget.per_gpu(WeightKind::kAttention, 8), budget.of(WeightKind::kAttention).bytes);
  // 256 experts on 3 devices: 86, 85, 85; the fullest counts.
  EXPECT_EQ(budget.per_gpu(3), loaded - experts + experts / 256 * 86);
}

TEST_F(WeightBudgetTest, OfACheckpointThatDiffersFromItsConfig) {
  const ModelConfig config = Config("v4-flash-0731");
  const WeightBudget all = BudgetWeights(config);
  EXPECT_EQ(BudgetLoaded(config, all.tensors, all.bytes).kinds[0].bytes, all.kinds[0].bytes);
  const WeightBudget none = BudgetWeights(config, 0);
  EXPECT_EQ(none.of(WeightKind::kDrafters).bytes, 0);
  EXPECT_EQ(BudgetLoaded(config, none.tensors, none.bytes).of(WeightKind::kDrafters).tensors, 0);
  // Output projections stored in BF16.
  const WeightBudget wide = BudgetLoaded(config, all.tensors - 46, all.bytes + 1'000'000);
  EXPECT_EQ(wide.of(WeightKind::kAttention).bytes,
            all.of(WeightKind::kAttention).bytes + 1'000'000);
  EXPECT_EQ(wide.per_gpu(1), all.per_gpu(1) + 1'000'000);
}

}  // namespace
}  // namespace fathom
