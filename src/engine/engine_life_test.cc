// Arrival, cancellation, failure and shutdown, with the engine held inside a step where it matters.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <future>
#include <thread>

#include "engine/test_util.h"

namespace fathom {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using namespace std::chrono_literals;

// Holds the engine inside a step until opened.
class Gate {
 public:
  Status Pass() {
    held_ = true;
    opened_.wait();
    return {};
  }
  void WaitUntilHeld() const {
    while (!held_) std::this_thread::sleep_for(1ms);
  }
  void Open() { open_.set_value(); }

 private:
  std::promise<void> open_;
  std::shared_future<void> opened_ = open_.get_future().share();
  std::atomic<bool> held_{false};
};

TEST(EngineLife, CancelEndsWaitingPrefillingAndDecodingRequestsAtTheNextStep) {
  const Geometry geometry = ScriptedGeometry(128, 100'000);
  Gate all_there, gate;
  ScriptedOptions script = Counting(geometry);
  int step = 0;
  script.on_step = [&](const StepPlan&) {
    ++step;
    return step == 1 ? all_there.Pass() : step == 3 ? gate.Pass() : Status();
  };
  auto engine = StartEngine(
      {.max_num_seqs = 2, .max_num_batched_tokens = 16, .max_prefill_with_decode = 8}, script);
  auto queue = std::make_shared<Collector>();
  const RequestId decoding = *engine->Submit(Ask(queue, {5, 6}));
  all_there.WaitUntilHeld();
  const RequestId prefilling = *engine->Submit(Ask(queue, std::vector<TokenId>(50'000, 5)));
  const RequestId waiting = *engine->Submit(Ask(queue, {5, 6}));
  all_there.Open();
  gate.WaitUntilHeld();
  for (const RequestId id : {waiting, prefilling, decoding}) engine->Cancel(id);
  engine->Cancel(decoding);        // twice
  engine->Cancel(RequestId{999});  // never existed
  gate.Open();
  EXPECT_TRUE(engine->WaitIdle(60s));
  for (const RequestId id : {waiting, prefilling, decoding}) {
    const auto answer = queue->Peek(id);
    EXPECT_EQ(answer.finishes, 1);
    EXPECT_EQ(answer.after_finish, 0);
    EXPECT_EQ(answer.finish, FinishReason::kCancelled);
  }
  EXPECT_THAT(queue->Peek(waiting).tokens, IsEmpty());
  EXPECT_GT(queue->Peek(prefilling).prefilled.back(), 0);
  EXPECT_LT(queue->Peek(prefilling).prefilled.back(), 100);
  EXPECT_EQ(engine->stats().steps, 3u);
  EXPECT_EQ(engine->stats().finished_cancelled, 3u);
  ExpectAllReturned(*engine);
}

TEST(EngineLife, AFullQueueRefusesWithItsSizeAndTakesAgainWhenThereIsRoom) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  Gate gate;
  ScriptedOptions script = Counting(geometry);
  script.on_step = [&](const StepPlan&) { return gate.Pass(); };
  auto engine = StartEngine({.max_num_seqs = 1, .max_waiting = 2}, script);
  auto queue = std::make_shared<Collector>();
  const RequestId running = *engine->Submit(Ask(queue, {5}, 2));
  gate.WaitUntilHeld();
  const RequestId first = *engine->Submit(Ask(queue, {5}, 2));
  const RequestId second = *engine->Submit(Ask(queue, {5}, 2));
  const auto refused = engine->Submit(Ask(queue, {5}, 2));
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Code::kResourceExhausted);
  EXPECT_THAT(refused.error().message, HasSubstr("2 requests are waiting"));
  std::this_thread::sleep_for(20ms);
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.waiting, 2);
  EXPECT_GE(stats.oldest_waiting_seconds, 0.02);
  EXPECT_GE(stats.seconds_since_step, 0.02);
  gate.Open();
  for (const RequestId id : {running, first, second}) {
    EXPECT_THAT(queue->Wait(id).tokens, SizeIs(2));
  }
  EXPECT_TRUE(engine->WaitIdle(60s));
  EXPECT_EQ(engine->stats().seconds_since_step, 0);
  EXPECT_EQ(engine->stats().oldest_waiting_seconds, 0);
  EXPECT_TRUE(engine->Submit(Ask(queue, {5}, 2)).has_value());
}

TEST(EngineLife, SeveralRequestsEnterTheQueueTogetherOrNotAtAll) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  Gate gate;
  ScriptedOptions script = Counting(geometry);
  script.on_step = [&](const StepPlan&) { return gate.Pass(); };
  auto engine = StartEngine({.max_num_seqs = 1, .max_waiting = 3}, script);
  auto queue = std::make_shared<Collector>();
  const auto several = [&](size_t count) { return std::vector(count, Ask(queue, {5}, 2)); };
  const RequestId running = *engine->Submit(Ask(queue, {5}, 2));
  gate.WaitUntilHeld();
  const RequestId alone = *engine->Submit(Ask(queue, {5}, 2));

  const auto never = engine->SubmitAll(several(4));
  ASSERT_FALSE(never.has_value());
  EXPECT_EQ(never.error().code, Code::kInvalidArgument);
  EXPECT_THAT(never.error().message, HasSubstr("more than the 3 the queue holds"));
  const auto not_now = engine->SubmitAll(several(3));
  ASSERT_FALSE(not_now.has_value());
  EXPECT_EQ(not_now.error().code, Code::kResourceExhausted);
  EXPECT_THAT(not_now.error().message, HasSubstr("1 requests are waiting and the queue holds 3"));
  std::vector<Request> one_wrong = several(2);
  one_wrong.back().prompt = {999};
  EXPECT_EQ(engine->SubmitAll(one_wrong).error().code, Code::kInvalidArgument);
  EXPECT_EQ(engine->stats().waiting, 1);  // nothing of all that has entered
  EXPECT_THAT(*engine->SubmitAll({}), IsEmpty());

  const auto both = engine->SubmitAll(several(2));
  ASSERT_TRUE(both.has_value());
  ASSERT_THAT(*both, SizeIs(2));
  EXPECT_EQ(engine->stats().waiting, 3);
  gate.Open();
  for (const RequestId id : {running, alone, (*both)[0], (*both)[1]}) {
    EXPECT_THAT(queue->Wait(id).tokens, SizeIs(2));
  }
  EXPECT_TRUE(engine->WaitIdle(60s));
  EXPECT_EQ(engine->stats().finished_length, 4u);
  EXPECT_EQ(engine->stats().finished_cancelled, 0u);
}

TEST(EngineLife, AnExecutorErrorFailsTheStepsRequestsAndNothingElse) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  ScriptedOptions script = Counting(geometry);
  Gate gate;
  int step = 0;
  script.on_step = [&](const StepPlan& plan) -> Status {
    if (++step == 1) return gate.Pass();
    for (const TokenId token : plan.token) {
      if (token == 33) return Fail(Code::kInternal, "unlucky step {}", step);
    }
    return {};
  };
  auto engine = StartEngine({.max_num_seqs = 2}, script);
  auto queue = std::make_shared<Collector>();
  const RequestId first = *engine->Submit(Ask(queue, {5}, 10));
  gate.WaitUntilHeld();
  const RequestId unlucky = *engine->Submit(Ask(queue, {33}, 10));
  const RequestId waiting = *engine->Submit(Ask(queue, {5}, 10));
  gate.Open();
  for (const RequestId id : {first, unlucky}) {
    const auto answer = queue->Wait(id);
    EXPECT_EQ(answer.finish, FinishReason::kError);
    EXPECT_EQ(answer.error.message, "unlucky step 2");
  }
  EXPECT_THAT(queue->Wait(waiting).tokens, SizeIs(10));
  EXPECT_TRUE(engine->WaitIdle(60s));
  EXPECT_EQ(engine->stats().finished_error, 2u);
  ExpectAllReturned(*engine);
}

TEST(EngineLife, LogitsThatAreNoNumbersEndTheRequestWithAnError) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  ScriptedOptions script{.geometry = geometry, .vocab_size = kVocab};
  script.fill_logits = [](RequestId, std::span<const TokenId> history, std::span<float> logits) {
    std::fill(logits.begin(), logits.end(), history[0] == 9 ? std::nanf("") : 0.0f);
  };
  auto engine = StartEngine({}, script);
  auto queue = std::make_shared<Collector>();
  const auto bad = queue->Wait(*engine->Submit(Ask(queue, {9}, 3)));
  EXPECT_EQ(bad.finish, FinishReason::kError);
  EXPECT_THAT(bad.error.message, HasSubstr("not finite"));
  EXPECT_EQ(queue->Wait(*engine->Submit(Ask(queue, {8}, 3))).finish, FinishReason::kLength);
}

TEST(EngineLife, OutputsOfAStepComeInOneDeliveryPerQueue) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  Gate gate;
  ScriptedOptions script = Counting(geometry);
  int step = 0;
  script.on_step = [&](const StepPlan&) { return ++step == 1 ? gate.Pass() : Status(); };
  auto engine = StartEngine({}, script);
  auto first = std::make_shared<Collector>();
  auto one = std::make_shared<Collector>(), other = std::make_shared<Collector>();
  ASSERT_TRUE(engine->Submit(Ask(first, {5}, 1)).has_value());
  gate.WaitUntilHeld();
  for (int i = 0; i < 16; ++i) ASSERT_TRUE(engine->Submit(Ask(i % 2 ? one : other, {5}, 7)));
  gate.Open();
  EXPECT_TRUE(engine->WaitIdle(60s));
  EXPECT_EQ(engine->stats().steps, 8u);
  EXPECT_EQ(one->deliveries(), 7);
  EXPECT_EQ(other->deliveries(), 7);
}

TEST(EngineLife, ProgressIsToldWhileAPromptPrefills) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  // Without prefix caching, which ends chunks where a sequence is saved.
  auto engine =
      StartEngine({.max_num_batched_tokens = 100, .prefix_caching = false}, Counting(geometry));
  auto queue = std::make_shared<Collector>();
  Request request = Ask(queue, std::vector<TokenId>(350, 5), 2);
  request.progress = true;
  EXPECT_THAT(queue->Wait(*engine->Submit(request)).prefilled,
              ElementsAre(100, 200, 300, 350, 350));
  request.progress = false;
  EXPECT_THAT(queue->Wait(*engine->Submit(request)).prefilled, ElementsAre(350, 350));
}

TEST(EngineLife, ASessionIsRetainedWhileSomethingOfItMayBeCached) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  Gate gate;
  ScriptedOptions script = Counting(geometry);
  int step = 0;
  script.on_step = [&](const StepPlan&) { return ++step == 1 ? gate.Pass() : Status(); };
  auto engine = StartEngine({.max_num_seqs = 1}, script);
  auto queue = std::make_shared<Collector>();
  const auto submit = [&](const char* session, double seconds) {
    Request request = Ask(queue, {5, 6}, 2);
    request.session = session;
    request.retain_seconds = seconds;
    return *engine->Submit(std::move(request));
  };
  const RequestId first = submit("first", 1'000);
  gate.WaitUntilHeld();
  const RequestId never_computed = submit("second", 1'000);
  engine->Cancel(never_computed);
  gate.Open();
  EXPECT_EQ(queue->Wait(never_computed).finish, FinishReason::kCancelled);
  queue->Wait(first);
  EXPECT_EQ(engine->stats().sessions_retained, 1);

  queue->Wait(submit("brief", 0.02));
  queue->Wait(submit("third", 1'000));
  std::this_thread::sleep_for(30ms);
  queue->Wait(submit("third", 1'000));
  EXPECT_EQ(engine->stats().sessions_retained, 2);

  engine->ResetPrefixCache();
  const auto end = std::chrono::steady_clock::now() + 60s;
  while (engine->stats().sessions_retained > 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(10ms);
  }
  EXPECT_EQ(engine->stats().sessions_retained, 0);
}

TEST(EngineLife, DestructionCancelsWhatRunsAndWaits) {
  // Long enough that nothing ends by itself between the gate and the destructor.
  const Geometry geometry = ScriptedGeometry(128, 100'000);
  auto queue = std::make_shared<Collector>();
  std::vector<RequestId> ids;
  Gate gate;
  ScriptedOptions script = Counting(geometry);
  script.on_step = [&](const StepPlan&) { return gate.Pass(); };
  {
    auto engine = StartEngine({.max_num_seqs = 2}, script);
    for (int i = 0; i < 8; ++i) ids.push_back(*engine->Submit(Ask(queue, {5})));
    gate.Open();
  }
  for (const RequestId id : ids) {
    EXPECT_EQ(queue->Peek(id).finishes, 1);
    EXPECT_EQ(queue->Peek(id).finish, FinishReason::kCancelled);
  }
}

TEST(EngineLife, DrainFinishesWhatIsThere) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  auto engine = StartEngine({.max_num_seqs = 2}, Counting(geometry));
  auto queue = std::make_shared<Collector>();
  std::vector<RequestId> ids;
  for (int i = 0; i < 8; ++i) ids.push_back(*engine->Submit(Ask(queue, {5}, 50)));
  engine->BeginDrain();
  EXPECT_FALSE(engine->Submit(Ask(queue, {5}, 1)).has_value());
  EXPECT_TRUE(engine->WaitIdle(60s));
  for (const RequestId id : ids) EXPECT_THAT(queue->Peek(id).tokens, SizeIs(50));
}

TEST(EngineLife, AnIdleEngineSleepsAndADeliveryMaySubmitAgain) {
  const Geometry geometry = ScriptedGeometry(128, 4096);
  auto engine = StartEngine({}, Counting(geometry));
  // Submits and cancels from the engine thread, which must not deadlock.
  class Chain : public OutputQueue {
   public:
    void Deliver(std::vector<Output> outputs) override {
      for (const Output& output : outputs) {
        if (!output.finish || left == 0) continue;
        --left;
        engine->Cancel(output.id);
        ASSERT_TRUE(engine->Submit(next).has_value());
      }
    }
    Engine* engine = nullptr;
    Request next;
    int left = 5;
  };
  auto chain = std::make_shared<Chain>();
  chain->engine = engine.get();
  chain->next.prompt = {5};
  chain->next.max_tokens = 2;
  chain->next.queue = chain;
  ASSERT_TRUE(engine->Submit(chain->next).has_value());
  EXPECT_TRUE(engine->WaitIdle(60s));
  EXPECT_EQ(engine->stats().finished_length, 6u);
  const uint64_t steps = engine->stats().steps;
  std::this_thread::sleep_for(30ms);
  EXPECT_EQ(engine->stats().steps, steps);
  chain->next.queue = nullptr;  // the cycle of owners
}

}  // namespace
}  // namespace fathom
