#include "engine/step_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fathom {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(StepPlan, LaysSequencesOutFlat) {
  StepPlan plan;
  for (int round = 0; round < 2; ++round) {  // a reused plan equals a fresh one
    plan.Clear();
    plan.AddSequence(RequestId{7}, SlotId{3}, {BlockId{5}});
    plan.AddToken(100, 9, true);
    plan.AddSequence(RequestId{8}, SlotId{0}, {BlockId{2}, BlockId{4}});
    plan.AddToken(101, 255, false);
    plan.AddToken(102, 256, false);
    plan.AddToken(103, 257, true);
    plan.Finish();
    EXPECT_THAT(plan.token, ElementsAre(100, 101, 102, 103));
    EXPECT_THAT(plan.position, ElementsAre(9, 255, 256, 257));
    EXPECT_THAT(plan.sequence, ElementsAre(0, 1, 1, 1));
    EXPECT_THAT(plan.query_start, ElementsAre(0, 1, 4));
    EXPECT_THAT(plan.slot, ElementsAre(3, 0));
    EXPECT_THAT(plan.logit_rows, ElementsAre(0, 3));
    EXPECT_EQ(plan.max_blocks, 2);
    EXPECT_THAT(plan.block_table, ElementsAre(5, 0, 2, 4));
    EXPECT_THAT(plan.requests, ElementsAre(RequestId{7}, RequestId{8}));
    const ops::StepView view = plan.view();
    EXPECT_EQ(view.tokens_of(1), 3);
    EXPECT_EQ(view.first_position(1), 255);
    EXPECT_EQ(view.blocks_of(1)[1], 4);
  }
}

TEST(StepPlan, EmptyPlanHasNoTokens) {
  StepPlan plan;
  plan.Clear();
  plan.Finish();
  EXPECT_EQ(plan.num_tokens(), 0);
  EXPECT_EQ(plan.num_sequences(), 0);
  EXPECT_THAT(plan.query_start, ElementsAre(0));
  EXPECT_THAT(plan.block_table, IsEmpty());
}

}  // namespace
}  // namespace fathom
