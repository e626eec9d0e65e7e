// Random loads against the one right answer. The scripted model's tokens are a hash of the whole
// history, read back from the pools, so the text is right only if every token of every step was in
// its place.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <random>
#include <thread>

#include "engine/test_util.h"

namespace fathom {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kWords = 1'000;
constexpr uint64_t kEndEvery = 150;

struct Asked {
  RequestId id;
  std::vector<TokenId> prompt;
  int64_t max_tokens = 0;
  bool cancelled = false;
};

ScriptedOptions HashScript(const Geometry& geometry, ExecutorLimits limits) {
  ScriptedOptions script{.geometry = geometry, .vocab_size = kWords, .limits = limits};
  script.next_token = [](RequestId, std::span<const TokenId> history) {
    return HashToken(history, kWords, kEndEvery);
  };
  return script;
}

void CheckAnswer(const Asked& asked, const Collector::Answer& answer) {
  const std::vector<TokenId> right = HashText(asked.prompt, asked.max_tokens, kWords, kEndEvery);
  RC_ASSERT(answer.finishes == 1);
  RC_ASSERT(answer.after_finish == 0);
  RC_ASSERT(answer.error.message == "");
  RC_ASSERT(answer.tokens.size() <= right.size());
  RC_ASSERT(std::equal(answer.tokens.begin(), answer.tokens.end(), right.begin()));
  if (answer.finish == FinishReason::kCancelled) {
    RC_ASSERT(asked.cancelled);
    return;
  }
  RC_ASSERT(answer.tokens.size() == right.size());
  const bool full = static_cast<int64_t>(right.size()) == asked.max_tokens;
  RC_ASSERT(answer.finish == (full ? FinishReason::kLength : FinishReason::kStop));
}

// Any batch limit, chunk size, concurrency, pool size, arrival pattern and cancellations.
RC_GTEST_PROP(EngineProperty, TextDependsOnThePromptAlone, ()) {
  const Geometry geometry = ScriptedGeometry(128, 1'024);
  const EngineOptions options{.max_num_seqs = *rc::gen::inRange(1, 10),
                              .max_num_batched_tokens = *rc::gen::inRange(1, 200),
                              .max_prefill_with_decode = *rc::gen::inRange(1, 100),
                              .num_blocks = *rc::gen::inRange(4, 20)};
  const ExecutorLimits limits{.max_step_tokens = *rc::gen::inRange(1, 200),
                              .max_logit_rows = *rc::gen::inRange(1, 20)};
  auto engine =
      *Engine::Start(options, geometry, MakeScriptedExecutor(HashScript(geometry, limits)));
  auto queue = std::make_shared<Collector>();
  std::mt19937 random(*rc::gen::arbitrary<uint32_t>());
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  std::vector<Asked> all;
  const int64_t count = draw(1, 24);
  for (int64_t i = 0; i < count; ++i) {
    Asked asked;
    asked.prompt.resize(static_cast<size_t>(draw(1, 300)));
    for (TokenId& token : asked.prompt) token = static_cast<TokenId>(draw(0, kWords - 1));
    asked.max_tokens = draw(1, 200);
    Request request;
    request.prompt = asked.prompt;
    request.max_tokens = asked.max_tokens;
    request.priority = static_cast<int>(draw(-1, 1));
    request.sampling.temperature = 0;
    request.prompt_logprobs = draw(0, 7) == 0 ? 0 : -1;
    request.queue = queue;
    asked.id = *engine->Submit(std::move(request));
    all.push_back(std::move(asked));
    if (draw(0, 3) == 0) {
      Asked& victim = all[static_cast<size_t>(draw(0, i))];
      engine->Cancel(victim.id);
      victim.cancelled = true;
    }
    if (draw(0, 3) == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw(0, 500)));
  }
  RC_ASSERT(engine->WaitIdle(120s));
  for (const Asked& asked : all) CheckAnswer(asked, queue->Peek(asked.id));
  const EngineStats stats = engine->stats();
  RC_ASSERT(stats.blocks_used == 0 && stats.slots_used == 0);
  RC_ASSERT(stats.running == 0 && stats.waiting == 0);
  RC_ASSERT(stats.finished_stop + stats.finished_length + stats.finished_cancelled ==
            static_cast<uint64_t>(count));
}

// Many threads submit, cancel and read statistics at once (the interesting run is under TSan).
TEST(EngineProperty, EveryPublicFunctionIsSafeFromAnyThread) {
  const Geometry geometry = ScriptedGeometry(128, 1'024);
  auto engine = *Engine::Start({.max_num_seqs = 8, .max_num_batched_tokens = 64, .num_blocks = 12},
                               geometry, MakeScriptedExecutor(HashScript(geometry, {})));
  std::vector<std::thread> threads;
  std::vector<std::vector<Asked>> asked(4);
  std::vector<std::shared_ptr<Collector>> queues;
  for (size_t t = 0; t < asked.size(); ++t) queues.push_back(std::make_shared<Collector>());
  for (size_t t = 0; t < asked.size(); ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < 30; ++i) {
        Asked one{.id = {}, .prompt = std::vector<TokenId>(1 + random() % 200, 3)};
        one.max_tokens = 1 + static_cast<int64_t>(random() % 60);
        one.prompt[0] = static_cast<TokenId>(random() % kWords);
        Request request;
        request.prompt = one.prompt;
        request.max_tokens = one.max_tokens;
        request.sampling.temperature = 0;
        request.queue = queues[t];
        one.id = *engine->Submit(std::move(request));
        if (random() % 4 == 0) {
          queues[t]->WaitForTokens(one.id, random() % 10);
          engine->Cancel(one.id);
          one.cancelled = true;
        }
        const EngineStats stats = engine->stats();
        EXPECT_LE(stats.slots_used, 8);
        EXPECT_EQ(stats.running, stats.slots_used);
        EXPECT_LE(stats.blocks_used, 12);
        asked[t].push_back(std::move(one));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(engine->WaitIdle(120s));
  for (size_t t = 0; t < asked.size(); ++t) {
    for (const Asked& one : asked[t]) {
      const auto answer = queues[t]->Peek(one.id);
      const auto right = HashText(one.prompt, one.max_tokens, kWords, kEndEvery);
      EXPECT_EQ(answer.finishes, 1);
      if (answer.finish != FinishReason::kCancelled) {
        EXPECT_EQ(answer.tokens, right);
      }
    }
  }
  ExpectAllReturned(*engine);
}

}  // namespace
}  // namespace fathom
