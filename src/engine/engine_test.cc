// The engine's contract, one behaviour a test, with a scripted model. Properties over random loads
// are in engine_property_test.cc.
#include "engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "engine/test_util.h"

namespace fathom {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using namespace std::chrono_literals;

TEST(Engine, AnswersUntilTheEndTokenAndDoesNotDeliverIt) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  auto engine = StartEngine({}, Script(geometry, {10, 11, 12}, 3));
  auto queue = std::make_shared<Collector>();
  const auto answer = queue->Wait(*engine->Submit(Ask(queue, {5, 6, 7})));
  EXPECT_THAT(answer.tokens, ElementsAre(10, 11, 12));
  EXPECT_EQ(answer.finish, FinishReason::kStop);
  EXPECT_EQ(answer.stop_token, kEnd);
  EXPECT_TRUE(engine->WaitIdle(60s));
  ExpectAllReturned(*engine);
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.steps, 4u);
  EXPECT_EQ(stats.prompt_tokens, 3u);
  EXPECT_EQ(stats.generation_tokens, 4u);  // the end token was sampled too
  EXPECT_EQ(stats.finished_stop, 1u);
}

TEST(Engine, MaxTokensAndTheContextLimitEndWithLength) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  auto engine = StartEngine({.max_model_len = 20}, Counting(geometry));
  auto queue = std::make_shared<Collector>();
  const auto few = queue->Wait(*engine->Submit(Ask(queue, {5, 6, 7}, 4)));
  EXPECT_THAT(few.tokens, ElementsAre(5, 6, 7, 8));
  EXPECT_EQ(few.finish, FinishReason::kLength);
  const auto all = queue->Wait(*engine->Submit(Ask(queue, {5, 6, 7})));
  EXPECT_THAT(all.tokens, SizeIs(17));
  EXPECT_EQ(all.finish, FinishReason::kLength);
}

TEST(Engine, StopTokensMinTokensAndIgnoreEos) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  auto engine = StartEngine({}, Script(geometry, {10, 11, kEnd, 12}, 1));
  auto queue = std::make_shared<Collector>();
  Request stop = Ask(queue, {5});
  stop.stop_tokens = {40, 11};
  const auto stopped = queue->Wait(*engine->Submit(stop));
  EXPECT_THAT(stopped.tokens, ElementsAre(10));
  EXPECT_EQ(stopped.finish, FinishReason::kStop);
  EXPECT_EQ(stopped.stop_token, 11);

  Request ignore = Ask(queue, {5}, 4);
  ignore.ignore_eos = true;
  EXPECT_THAT(queue->Wait(*engine->Submit(ignore)).tokens, ElementsAre(10, 11, kEnd, 12));

  // Banned until four tokens are there; the best of what is left is token 0.
  Request at_least = Ask(queue, {5}, 20);
  at_least.min_tokens = 4;
  at_least.stop_tokens = {11};
  const auto longer = queue->Wait(*engine->Submit(at_least));
  EXPECT_THAT(longer.tokens, ElementsAre(10, 0, 0, 12));
  EXPECT_EQ(longer.stop_token, kEnd);
}

TEST(Engine, LogprobsAreOfTheModelsOwnLogits) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  ScriptedOptions script{.geometry = geometry, .vocab_size = kVocab};
  script.fill_logits = [](RequestId, std::span<const TokenId> history, std::span<float> logits) {
    std::fill(logits.begin(), logits.end(), 0.0f);
    logits[(history.back() + 1) % kVocab] = 2.0f;
  };
  auto engine = StartEngine({}, script);
  auto queue = std::make_shared<Collector>();
  Request request = Ask(queue, {5, 6, 20}, 2);
  request.logprobs = 1;
  request.prompt_logprobs = 0;
  request.sampling.logit_bias = {{21, -10.0f}, {30, 1.0f}};  // moves the choice from 21 to 30
  const auto answer = queue->Wait(*engine->Submit(request));
  const float total = std::log(std::exp(2.0f) + (kVocab - 1));
  ASSERT_THAT(answer.tokens, ElementsAre(30, 31));
  ASSERT_THAT(answer.logprobs, SizeIs(2));
  ASSERT_THAT(answer.logprobs[0], SizeIs(2));
  EXPECT_EQ(answer.logprobs[0][0].token, 30);
  EXPECT_NEAR(answer.logprobs[0][0].logprob, -total, 1e-5);
  EXPECT_EQ(answer.logprobs[0][1].token, 21);
  EXPECT_NEAR(answer.logprobs[0][1].logprob, 2 - total, 1e-5);
  ASSERT_THAT(answer.prompt_logprobs, SizeIs(2));  // of tokens 6 and 20
  EXPECT_EQ(answer.prompt_logprobs[0][0].token, 6);
  EXPECT_NEAR(answer.prompt_logprobs[0][0].logprob, 2 - total, 1e-5);
  EXPECT_EQ(answer.prompt_logprobs[1][0].token, 20);
  EXPECT_NEAR(answer.prompt_logprobs[1][0].logprob, -total, 1e-5);
}

TEST(Engine, PromptLogprobsDoNotDependOnChunksOrLogitRows) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  std::vector<TokenId> prompt(200);
  std::iota(prompt.begin(), prompt.end(), 0);
  for (TokenId& token : prompt) token = token * 7 % kVocab;
  std::vector<std::vector<ops::TokenLogprob>> first;
  for (const auto& [tokens, rows] : {std::pair{512, 256}, {17, 3}, {1, 1}, {128, 5}}) {
    ScriptedOptions script{.geometry = geometry, .vocab_size = kVocab};
    script.limits = {.max_step_tokens = tokens, .max_logit_rows = rows};
    script.fill_logits = [](RequestId, std::span<const TokenId> history, std::span<float> logits) {
      for (size_t i = 0; i < logits.size(); ++i) {
        logits[i] = static_cast<float>((HistoryHash(history) >> (i % 50)) % 100) / 10;
      }
    };
    auto engine = StartEngine({}, script);
    auto queue = std::make_shared<Collector>();
    Request request = Ask(queue, prompt, 3);
    request.prompt_logprobs = 2;
    const auto answer = queue->Wait(*engine->Submit(request));
    ASSERT_THAT(answer.prompt_logprobs, SizeIs(199));
    if (first.empty()) first = answer.prompt_logprobs;
    for (size_t i = 0; i < first.size(); ++i) {
      EXPECT_EQ(answer.prompt_logprobs[i][0].token, prompt[i + 1]);
      for (size_t k = 0; k < first[i].size(); ++k) {
        EXPECT_EQ(answer.prompt_logprobs[i][k].token, first[i][k].token);
        EXPECT_EQ(answer.prompt_logprobs[i][k].logprob, first[i][k].logprob);
      }
    }
  }
}

TEST(Engine, PenaltiesSeeThePromptAndWhatWasGenerated) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  ScriptedOptions script{.geometry = geometry, .vocab_size = 8};
  script.fill_logits = [](RequestId, std::span<const TokenId>, std::span<float> logits) {
    std::fill(logits.begin(), logits.end(), 1.0f);
  };
  auto engine = StartEngine({.eos_token = 7}, script);
  auto queue = std::make_shared<Collector>();
  EXPECT_THAT(queue->Wait(*engine->Submit(Ask(queue, {0}, 3))).tokens, ElementsAre(0, 0, 0));
  Request repetition = Ask(queue, {0, 2}, 3);
  repetition.sampling.repetition_penalty = 2.0f;
  EXPECT_THAT(queue->Wait(*engine->Submit(repetition)).tokens, ElementsAre(1, 3, 4));
  Request frequency = Ask(queue, {0, 2}, 4);
  frequency.sampling.frequency_penalty = 0.5f;
  frequency.stop_tokens = {3};
  EXPECT_THAT(queue->Wait(*engine->Submit(frequency)).tokens, ElementsAre(0, 1, 2));
}

TEST(Engine, TheSameSeedGivesTheSameTokensWhateverRunsBeside) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  ScriptedOptions script{.geometry = geometry, .vocab_size = kVocab};
  script.fill_logits = [](RequestId, std::span<const TokenId>, std::span<float> logits) {
    std::fill(logits.begin(), logits.end(), 0.0f);
  };
  auto engine = StartEngine({}, script);
  auto queue = std::make_shared<Collector>();
  const auto ask = [&](uint64_t seed) {
    Request request = Ask(queue, {5}, 30);
    request.ignore_eos = true;
    request.sampling.temperature = 1;
    request.sampling.seed = seed;
    return *engine->Submit(request);
  };
  const auto alone = queue->Wait(ask(42)).tokens;
  std::vector<RequestId> noise;
  for (uint64_t i = 0; i < 5; ++i) noise.push_back(ask(i));
  EXPECT_EQ(queue->Wait(ask(42)).tokens, alone);
  EXPECT_NE(queue->Wait(noise[0]).tokens, alone);
}

TEST(Engine, RefusalsNameTheNumbers) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  auto engine = StartEngine({.max_model_len = 1000, .num_blocks = 4}, Counting(geometry));
  auto queue = std::make_shared<Collector>();
  const auto refused = [&](Request request, Code code, const std::string& a, const std::string& b,
                           const std::string& param) {
    const auto id = engine->Submit(std::move(request));
    ASSERT_FALSE(id.has_value());
    EXPECT_EQ(id.error().code, code);
    EXPECT_THAT(id.error().message, HasSubstr(a));
    EXPECT_THAT(id.error().message, HasSubstr(b));
    EXPECT_EQ(id.error().param, param);
  };
  const std::vector<TokenId> prompt(600, 5);
  refused(Ask(queue, {}), Code::kInvalidArgument, "empty", "prompt", "prompt");
  refused(Ask(queue, {5, 64}), Code::kInvalidArgument, "64", "position 1", "prompt");
  refused(Ask(queue, {-1}), Code::kInvalidArgument, "-1", "64", "prompt");
  refused(Ask(queue, prompt, 401), Code::kContextLength, "401", "1000", "max_tokens");
  refused(Ask(queue, prompt, int64_t{1} << 62), Code::kContextLength, "600", "1000", "max_tokens");
  refused(Ask(queue, std::vector<TokenId>(1000, 5)), Code::kContextLength, "1000", "1 more",
          "prompt");
  refused(Ask(queue, prompt, 100), Code::kResourceExhausted, "6 cache blocks", "4", "max_tokens");
  refused(Ask(queue, prompt), Code::kResourceExhausted, "600", "512 tokens", "prompt");
  refused(Ask(queue, {5}, -1), Code::kInvalidArgument, "max_tokens", "-1", "max_tokens");
  Request request = Ask(queue, {5}, 3);
  request.min_tokens = 4;
  refused(request, Code::kInvalidArgument, "4", "3", "min_tokens");
  request = Ask(queue, {5}, 3);
  request.stop_tokens = {99};
  refused(request, Code::kInvalidArgument, "99", "64", "stop_token_ids");
  request = Ask(queue, {5}, 3);
  request.sampling.logit_bias = {{99, 1.0f}};
  refused(request, Code::kInvalidArgument, "99", "64", "logit_bias");
  request = Ask(queue, {5}, 3);
  request.logprobs = 65;
  refused(request, Code::kInvalidArgument, "65", "64", "logprobs");

  EXPECT_THAT(queue->Wait(*engine->Submit(Ask(queue, std::vector<TokenId>(500, 5)))).tokens,
              SizeIs(12));  // as many as the pool holds
  engine->BeginDrain();
  refused(Ask(queue, {5}), Code::kUnavailable, "draining", "", "");
}

TEST(Engine, StartRefusesWhatCannotWork) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  const auto fails = [&](const EngineOptions& options, const std::string& what) {
    const auto engine = Engine::Start(options, geometry, MakeScriptedExecutor(Counting(geometry)));
    ASSERT_FALSE(engine.has_value()) << what;
    EXPECT_THAT(engine.error().message, HasSubstr(what));
  };
  fails({.max_num_seqs = 0}, "max_num_seqs is 0");
  fails({.max_num_batched_tokens = -1}, "max_num_batched_tokens is -1");
  fails({.max_prefill_with_decode = 0}, "max_prefill_with_decode is 0");
  fails({.num_blocks = -5}, "num_blocks is -5");
  fails({.eos_token = 64}, "64");
  fails({.max_num_seqs = 2'147'483'647}, std::to_string(2'147'483'647 * geometry.slot_bytes));
}

}  // namespace
}  // namespace fathom
