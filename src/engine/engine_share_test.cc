// Requests that arrive together compute what they share once: those behind wait for the first to
// get there, and go on from its cache.
#include <gmock/gmock.h>

#include <functional>
#include <future>

#include "engine/test_util.h"

namespace fathom {
namespace {

constexpr int64_t kTokens = 128;  // of a block

// An engine whose first step waits until everything has been submitted.
class Together {
 public:
  explicit Together(EngineOptions options) {
    const Geometry geometry = ScriptedGeometry(kTokens, 8192);
    ScriptedOptions script{.geometry = geometry, .vocab_size = kVocab};
    script.next_token = [](RequestId, std::span<const TokenId> history) {
      return HashToken(history, kVocab, 1'000'000);
    };
    script.on_step = [go = go_.get_future().share(), this](const StepPlan& plan) -> Status {
      if (++steps_ == 1) held_.set_value();
      go.wait();
      if (before_step) before_step(steps_);
      for (const int32_t row : plan.logit_rows) order_.push_back(plan.requests[Owner(plan, row)]);
      return {};
    };
    // The first step is this request's alone: nothing else is submitted before it has begun, and
    // all the others are taken together after it.
    engine = StartEngine(options, script);
    first_ = *engine->Submit(Ask(queue, {9, 9, 9}, 1));
    held_.get_future().wait();
  }
  ~Together() { engine.reset(); }

  RequestId Add(std::vector<TokenId> prompt, int priority = 0, std::string salt = "",
                int prompt_logprobs = -1) {
    Request request = Ask(queue, std::move(prompt), 3);
    request.priority = priority;
    request.cache_salt = std::move(salt);
    request.prompt_logprobs = prompt_logprobs;
    return *engine->Submit(std::move(request));
  }
  void Go() {
    go_.set_value();
    queue->Wait(first_);
  }
  Collector::Answer Wait(RequestId id) { return queue->Wait(id); }
  int64_t Reused(RequestId id) { return Wait(id).report->prefix.boundary; }
  // Position at which a request's first token was sampled, among all sampled tokens.
  int64_t FirstToken(RequestId id) const {
    return std::find(order_.begin(), order_.end(), id) - order_.begin();
  }

  std::shared_ptr<Collector> queue = std::make_shared<Collector>();
  std::unique_ptr<Engine> engine;
  std::function<void(int)> before_step;  // gets its number, on the engine's thread; set before Go

 private:
  static size_t Owner(const StepPlan& plan, int32_t row) {
    return static_cast<size_t>(plan.sequence[static_cast<size_t>(row)]);
  }

  std::promise<void> go_, held_;
  int steps_ = 0;  // the engine thread's
  RequestId first_{};
  std::vector<RequestId> order_;  // the engine thread's until the engine is gone
};

std::vector<TokenId> Prompt(int64_t length, uint64_t seed) {
  std::vector<TokenId> prompt;
  for (int64_t i = 0; i < length; ++i) {
    prompt.push_back(static_cast<TokenId>(2 + (seed * 7919 + static_cast<uint64_t>(i) * i) % 61));
  }
  return prompt;
}

std::vector<TokenId> Joined(std::vector<TokenId> a, const std::vector<TokenId>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(EngineShare, EqualPromptsAreComputedOnce) {
  Together run({.max_model_len = 4096, .max_num_seqs = 8, .max_num_batched_tokens = 256});
  const std::vector<TokenId> prompt = Prompt(1'399, 1);
  std::vector<RequestId> ids;
  for (int i = 0; i < 8; ++i) ids.push_back(run.Add(prompt));
  run.Go();
  EXPECT_EQ(run.Reused(ids[0]), 0);
  for (int i = 1; i < 8; ++i) EXPECT_EQ(run.Reused(ids[i]), 1'398) << i;
  for (const RequestId id : ids) {
    EXPECT_EQ(run.Wait(id).tokens, HashText(prompt, 3, kVocab, 1'000'000));
  }
  EXPECT_EQ(run.engine->stats().prompt_computed, 3u + 1'399 + 7);
}

TEST(EngineShare, ACommonStartIsComputedOnceWhereverThePromptsPart) {
  for (const int64_t shared : {127, 128, 700, 1'001}) {
    Together run({.max_model_len = 4096, .max_num_seqs = 8, .max_num_batched_tokens = 256});
    std::vector<RequestId> ids;
    for (uint64_t i = 0; i < 4; ++i) {
      ids.push_back(run.Add(
          Joined(Prompt(shared, 1), Joined({static_cast<TokenId>(2 + i)}, Prompt(40, 10 + i)))));
    }
    run.Go();
    EXPECT_EQ(run.Reused(ids[0]), 0);
    for (size_t i = 1; i < ids.size(); ++i) EXPECT_EQ(run.Reused(ids[i]), shared) << i;
    EXPECT_EQ(run.engine->stats().prompt_computed, static_cast<uint64_t>(3 + shared + 4 * 41));
  }
}

TEST(EngineShare, NobodyWaitsForLittleOrForOthersSecrets) {
  Together run({.max_model_len = 4096, .max_num_seqs = 8, .max_num_batched_tokens = 256});
  const std::vector<TokenId> prompt = Prompt(900, 1);
  const RequestId leader = run.Add(prompt);
  const RequestId salted = run.Add(prompt, 0, "secret");
  const RequestId scored = run.Add(prompt, 0, "", 0);  // wants all of its prompt's logits
  const RequestId little = run.Add(Joined(Prompt(40, 1), Prompt(300, 5)));
  run.Go();
  EXPECT_EQ(run.Reused(leader), 0);
  EXPECT_EQ(run.Reused(salted), 0);
  EXPECT_EQ(run.Reused(scored), 0);
  EXPECT_EQ(run.Reused(little), 0);
  for (const RequestId id : {leader, salted, scored}) {
    EXPECT_EQ(run.Wait(id).tokens, HashText(prompt, 3, kVocab, 1'000'000));
  }
}

TEST(EngineShare, OthersPassThoseThatWait) {
  Together run({.max_model_len = 8192, .max_num_seqs = 8, .max_num_batched_tokens = 128});
  const std::vector<TokenId> prompt = Prompt(6'000, 1);
  run.Add(prompt);
  const RequestId behind = run.Add(prompt);
  const RequestId other = run.Add(Prompt(100, 3));
  run.Go();
  run.Wait(behind);
  const Collector::Answer passed = run.Wait(other);
  EXPECT_EQ(passed.tokens, HashText(Prompt(100, 3), 3, kVocab, 1'000'000));
  EXPECT_EQ(run.Reused(behind), 5'999);
  run.engine.reset();
  EXPECT_LT(run.FirstToken(other), run.FirstToken(behind));
}

TEST(EngineShare, WhenTheOneInFrontIsCancelledTheNextGoesOnFromThere) {
  const auto prompt = Prompt(6'000, 1);
  Together run({.max_model_len = 8192, .max_num_seqs = 4, .max_num_batched_tokens = 64});
  const RequestId leader = run.Add(prompt);
  const RequestId second = run.Add(prompt);
  const RequestId third = run.Add(prompt);
  // In the middle of the leader's prompt.
  run.before_step = [&](int step) {
    if (step == 20) run.engine->Cancel(leader);
  };
  run.Go();
  EXPECT_EQ(run.Wait(leader).finish, FinishReason::kCancelled);
  for (const RequestId id : {second, third}) {
    EXPECT_EQ(run.Wait(id).tokens, HashText(prompt, 3, kVocab, 1'000'000));
  }
  EXPECT_GT(run.Reused(second), 0);
  EXPECT_EQ(run.Reused(third), 5'999);
  EXPECT_LE(run.engine->stats().prompt_computed, 3u + 2 * 6'000 + 1);
  ExpectAllReturned(*run.engine);
}

TEST(EngineShare, WorksInAPoolThatHoldsOneAtATime) {
  const auto prompt = Prompt(900, 1);
  Together run(
      {.max_model_len = 1'024, .max_num_seqs = 4, .max_num_batched_tokens = 64, .num_blocks = 8});
  std::vector<RequestId> ids;
  for (int i = 0; i < 4; ++i) ids.push_back(run.Add(prompt));
  run.Go();
  for (const RequestId id : ids) {
    EXPECT_EQ(run.Wait(id).tokens, HashText(prompt, 3, kVocab, 1'000'000));
  }
}

}  // namespace
}  // namespace fathom
