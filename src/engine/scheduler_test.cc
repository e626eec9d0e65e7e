#include "engine/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>

namespace fathom {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Runs a scheduler without an executor: every chunk counts as computed, and a sequence whose last
// token was computed gains one, until its limit.
class Simulation {
 public:
  Simulation(SchedulerOptions options, int32_t blocks, int32_t slots)
      : blocks_(nullptr, 1, blocks),
        slots_(nullptr, 1, slots),
        scheduler(options, blocks_, slots_, &ops_) {}

  Sequence* Add(int64_t prompt, int64_t max_tokens, int priority = 0, int prompt_logprobs = -1) {
    Request request;
    request.prompt.assign(static_cast<size_t>(prompt), 5);
    request.priority = priority;
    request.prompt_logprobs = prompt_logprobs;
    sequences_.push_back(std::make_unique<Sequence>(RequestId{++last_id_}, std::move(request),
                                                    prompt + max_tokens, Clock::time_point{}));
    scheduler.Add(sequences_.back().get());
    return sequences_.back().get();
  }

  // One step. Removes sequences that reached their limit.
  bool Step() {
    if (!scheduler.Plan(plan, 0)) return false;
    ++steps;
    tokens.clear();
    std::vector<Sequence*> done;
    for (const Chunk& chunk : scheduler.chunks()) {
      Sequence* sequence = chunk.sequence;
      tokens[sequence] = chunk.count;
      scheduler.Advance(chunk);
      for (int64_t i = 0; i < chunk.rows; ++i) {
        const int64_t at = plan.position[plan.logit_rows[chunk.first_row + i]];
        if (sequence->wants_prompt_logprob(at)) ++sequence->prompt_logprobs_done;
      }
      if (sequence->computed < sequence->length()) continue;
      sequence->tokens.push_back(7);
      if (sequence->length() == sequence->limit) done.push_back(sequence);
    }
    for (Sequence* sequence : done) Finish(sequence);
    return true;
  }

  void Finish(Sequence* sequence) {
    scheduler.Remove(sequence, false);
    finished.push_back(sequence);
  }
  bool IsFinished(const Sequence* sequence) const {
    return std::find(finished.begin(), finished.end(), sequence) != finished.end();
  }
  int StepsUntil(const std::function<bool()>& condition) {
    int count = 0;
    while (!condition()) {
      EXPECT_TRUE(Step());
      if (++count > 1'000'000) ADD_FAILURE() << "no end";
    }
    return count;
  }
  bool PoolsAreFull() const { return blocks_.used_count() == 0 && slots_.used_count() == 0; }

 private:
  BlockPool blocks_;
  SlotPool slots_;
  std::vector<CacheOp> ops_;
  uint64_t last_id_ = 0;
  std::vector<std::unique_ptr<Sequence>> sequences_;

 public:
  Scheduler scheduler;
  StepPlan plan;
  int steps = 0;
  std::map<Sequence*, int64_t> tokens;  // of the last step
  std::vector<Sequence*> finished;
};

// `count` sequences in the middle of decoding.
std::vector<Sequence*> AddDecoding(Simulation& run, int count) {
  std::vector<Sequence*> all;
  for (int i = 0; i < count; ++i) all.push_back(run.Add(4, 100'000));
  run.StepsUntil([&] {
    return std::all_of(all.begin(), all.end(), [](Sequence* s) { return s->decoding(); });
  });
  return all;
}

TEST(Scheduler, EverySequenceDecodesInEveryStepWhileALongPromptPrefills) {
  Simulation run({.max_step_tokens = 512, .max_prefill_with_decode = 256}, 20'000, 64);
  const auto decoding = AddDecoding(run, 32);
  Sequence* longest = run.Add(100'000, 10);
  const int steps = run.StepsUntil([&] {
    if (longest->computed > 0) {
      for (Sequence* sequence : decoding) EXPECT_EQ(run.tokens[sequence], 1);
      EXPECT_LE(run.plan.num_tokens(), 32 + 256);
    }
    return longest->decoding();
  });
  EXPECT_EQ(steps, (100'000 + 255) / 256);  // and the prompt used all it was allowed
}

// A document of 458,000 tokens among short requests that keep coming: they do not wait for it, and
// it gets its share of every step whatever comes.
TEST(Scheduler, AVeryLongPromptNeitherStallsNorIsStalled) {
  Simulation run({.max_step_tokens = 512, .max_prefill_with_decode = 256}, 6'000, 16);
  Sequence* longest = run.Add(458'000, 4);
  std::vector<std::pair<Sequence*, int>> shorts;  // and the step they came
  int steps = 0, slowest = 0;
  std::mt19937 random(7);
  while (!longest->decoding()) {
    if (steps % 6 == 0) {
      shorts.emplace_back(run.Add(20 + static_cast<int64_t>(random() % 300), 20), steps);
    }
    ASSERT_TRUE(run.Step());
    ++steps;
    for (auto& [sequence, came] : shorts) {
      if (came < 0 || sequence->generated() == 0) continue;
      slowest = std::max(slowest, steps - came);
      came = -1;
    }
    ASSERT_LT(steps, 458'000 / 128 + 100);  // half of what is left to prefill is always the first's
  }
  EXPECT_LE(slowest, 8);
}

TEST(Scheduler, PrefillMovesAndDecodeTakesTurnsWhenTheStepIsTooSmallForBoth) {
  // 32 decoding sequences fill the step; an eighth of it, 4 tokens, is left to prefill.
  Simulation run({.max_step_tokens = 32, .max_prefill_with_decode = 256}, 20'000, 64);
  const auto decoding = AddDecoding(run, 32);
  Sequence* prompt = run.Add(1'000, 10);
  std::map<Sequence*, int> gap;
  const int steps = run.StepsUntil([&] {
    if (prompt->computed > 0) {
      for (Sequence* sequence : decoding) {
        gap[sequence] = run.tokens.count(sequence) ? 0 : gap[sequence] + 1;
        EXPECT_LE(gap[sequence], 1);  // at least every second step
      }
    }
    return prompt->decoding();
  });
  EXPECT_EQ(steps, 1'000 / 4);
}

TEST(Scheduler, ShortPromptsPassALongOneAndDoNotStarveIt) {
  Simulation run({.max_step_tokens = 512, .max_prefill_with_decode = 256}, 20'000, 64);
  Sequence* longest = run.Add(100'000, 10);
  run.Step();
  // 100 tokens fit into the half that is not the long prompt's: one step.
  Sequence* brief = run.Add(100, 10);
  EXPECT_EQ(run.StepsUntil([&] { return brief->generated() > 0; }), 1);
  // A new short prompt in every step: the long one still gets half of the prefill tokens.
  const int64_t left = longest->remaining();
  const int steps = run.StepsUntil([&] {
    if (run.scheduler.waiting().empty()) run.Add(300, 2);
    return longest->generated() > 0;
  });
  EXPECT_LE(steps, left / 128 + 2);
}

TEST(Scheduler, AStepOfOneTokenIsSharedInTurns) {
  for (const SchedulerOptions options :
       {SchedulerOptions{.max_step_tokens = 1}, SchedulerOptions{.max_logit_rows = 1}}) {
    Simulation run(options, 1'000, 4);
    const auto decoding = AddDecoding(run, 2);
    Sequence* prompt = run.Add(20, 1);
    const int64_t before = decoding[0]->generated() + decoding[1]->generated();
    const int64_t ahead = decoding[0]->generated() - decoding[1]->generated();
    const int steps = run.StepsUntil([&] { return run.IsFinished(prompt); });
    EXPECT_LE(steps, 41);
    EXPECT_GE(decoding[0]->generated() + decoding[1]->generated() - before, (steps - 1) / 2);
    EXPECT_LE(std::abs(decoding[0]->generated() - decoding[1]->generated() - ahead), 1);
  }
}

TEST(Scheduler, LowerPriorityValueRunsFirstAndNobodyOvertakes) {
  Simulation run({}, 1'000, 1);
  Sequence* first = run.Add(4, 1);
  run.Step();
  EXPECT_TRUE(run.IsFinished(first));
  Sequence* late = run.Add(4, 1, 5);
  Sequence* early = run.Add(4, 1, 5);
  Sequence* urgent = run.Add(4, 1, -1);
  while (run.Step()) {
  }
  EXPECT_THAT(run.finished, ElementsAre(first, urgent, late, early));
}

TEST(Scheduler, WhatDoesNotFitNowWaitsAndKeepsItsPlace) {
  Simulation run({.block_tokens = 128}, 10, 8);
  Sequence* large = run.Add(800, 100);  // 7 blocks and one of head room
  run.Step();
  Sequence* next = run.Add(500, 1);
  Sequence* small = run.Add(4, 1);  // would fit, but is behind `next`
  run.Step();
  EXPECT_FALSE(next->slot || small->slot);
  run.StepsUntil([&] { return run.IsFinished(large); });
  run.Step();
  EXPECT_TRUE(next->slot || run.IsFinished(next));
  while (run.Step()) {
  }
  EXPECT_TRUE(run.PoolsAreFull());
}

TEST(Scheduler, TheYoungestGivesUpItsBlocksAndStartsAnew) {
  Simulation run({.block_tokens = 128}, 6, 8);
  Sequence* old = run.Add(100, 600);
  Sequence* young = run.Add(100, 600);
  run.StepsUntil([&] { return run.scheduler.preemptions() > 0; });
  EXPECT_EQ(young->preemptions, 1);
  EXPECT_EQ(old->preemptions, 0);
  EXPECT_EQ(young->computed, 0);
  EXPECT_GT(young->generated(), 0);  // what was generated stays
  EXPECT_FALSE(young->slot);
  while (run.Step()) {
  }
  EXPECT_THAT(run.finished, ElementsAre(old, young));
  EXPECT_EQ(run.scheduler.preemptions(), 1u);  // no thrashing
  EXPECT_TRUE(run.PoolsAreFull());
}

TEST(Scheduler, PromptLogprobsShortenChunksToTheLogitRows) {
  Simulation run({.max_step_tokens = 512, .max_logit_rows = 10}, 100, 8);
  Sequence* sequence = run.Add(95, 1, 0, 0);
  while (run.Step()) EXPECT_LE(run.plan.logit_rows.size(), 10u);
  EXPECT_EQ(sequence->prompt_logprobs_done, 94);
  EXPECT_EQ(run.steps, 10);
}

TEST(Scheduler, RemoveWorksInEveryState) {
  Simulation run({.max_step_tokens = 8}, 100, 2);
  Sequence* decoding = run.Add(4, 50);
  Sequence* prefilling = run.Add(400, 50);
  Sequence* waiting = run.Add(4, 50);
  run.Step();
  run.Step();
  ASSERT_TRUE(decoding->decoding() && prefilling->computed > 0 && !waiting->slot);
  for (Sequence* sequence : {waiting, prefilling, decoding}) run.scheduler.Remove(sequence, false);
  EXPECT_FALSE(run.Step());
  EXPECT_TRUE(run.PoolsAreFull());
}

// Under any load and limits: budgets hold, no live sequence shares a slot or block, tables reach
// as far as the step writes, the plan is never empty while work exists, and all of it ends.
RC_GTEST_PROP(Scheduler, KeepsItsBoundsAndFinishesEverything, ()) {
  const SchedulerOptions options{.max_step_tokens = *rc::gen::inRange(1, 300),
                                 .max_logit_rows = *rc::gen::inRange(1, 20),
                                 .max_prefill_with_decode = *rc::gen::inRange(1, 300),
                                 .block_tokens = 128};
  const int32_t blocks = *rc::gen::inRange(4, 30);
  Simulation run(options, blocks, *rc::gen::inRange(1, 9));
  size_t to_come = static_cast<size_t>(*rc::gen::inRange(1, 25));
  const size_t all = to_come;
  int64_t work = 0;
  std::mt19937 random(*rc::gen::arbitrary<uint32_t>());
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  while (true) {
    if (to_come > 0 && draw(0, 3) != 0) {
      const int64_t prompt = draw(1, 400);
      const int64_t generate = draw(1, std::min<int64_t>(300, blocks * 128 - 400));
      run.Add(prompt, generate, static_cast<int>(draw(0, 2)), draw(0, 2) == 0 ? 0 : -1);
      work += prompt + generate;
      --to_come;
    }
    if (!run.Step()) {
      RC_ASSERT(run.scheduler.waiting().empty() && run.scheduler.running().empty());
      if (to_come == 0) break;
      continue;
    }
    RC_ASSERT(run.plan.num_tokens() <= options.max_step_tokens);
    RC_ASSERT(run.plan.logit_rows.size() <= static_cast<size_t>(options.max_logit_rows));
    std::set<int32_t> used_slots, used_blocks;
    for (const Sequence* sequence : run.scheduler.running()) {
      RC_ASSERT(used_slots.insert(sequence->slot->value).second);
      for (const BlockId block : sequence->blocks) {
        RC_ASSERT(used_blocks.insert(block.value).second);
      }
      RC_ASSERT(static_cast<int64_t>(sequence->blocks.size()) * 128 >= sequence->computed);
    }
    // Far more steps than a token each, with every preemption a fresh start.
    RC_ASSERT(run.steps <=
              4 * (work + 1) * (static_cast<int64_t>(run.scheduler.preemptions()) + 1));
  }
  RC_ASSERT(run.finished.size() == all);
  RC_ASSERT(run.PoolsAreFull());
}

}  // namespace
}  // namespace fathom
