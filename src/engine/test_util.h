// Shared by the engine's tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/testing_executor.h"

namespace fathom {

// Collects everything a request was told; waits for its end.
class Collector : public OutputQueue {
 public:
  struct Answer {
    std::vector<TokenId> tokens;
    std::vector<std::vector<ops::TokenLogprob>> logprobs, prompt_logprobs;
    std::vector<int64_t> prefilled;  // of each Output
    int finishes = 0;
    int after_finish = 0;  // Outputs that came too late
    FinishReason finish{};
    TokenId stop_token = -1;
    Error error;
    std::shared_ptr<const RequestReport> report;
  };

  void Deliver(std::vector<Output> outputs) override {
    const std::lock_guard lock(mutex_);
    ++deliveries_;
    for (Output& output : outputs) {
      Answer& answer = answers_[output.id];
      if (answer.finishes > 0) ++answer.after_finish;
      std::move(output.tokens.begin(), output.tokens.end(), std::back_inserter(answer.tokens));
      std::move(output.logprobs.begin(), output.logprobs.end(),
                std::back_inserter(answer.logprobs));
      std::move(output.prompt_logprobs.begin(), output.prompt_logprobs.end(),
                std::back_inserter(answer.prompt_logprobs));
      answer.prefilled.push_back(output.prefilled);
      if (!output.finish) continue;
      ++answer.finishes;
      answer.finish = *output.finish;
      answer.stop_token = output.stop_token;
      answer.error = output.error;
      answer.report = output.report;
    }
    changed_.notify_all();
  }

  // Blocks until the request has ended; an hour-long limit is left to the test runner.
  Answer Wait(RequestId id) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return answers_[id].finishes > 0; });
    return answers_[id];
  }
  void WaitForTokens(RequestId id, size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock,
                  [&] { return answers_[id].tokens.size() >= count || answers_[id].finishes > 0; });
  }
  Answer Peek(RequestId id) {
    const std::lock_guard lock(mutex_);
    return answers_[id];
  }
  int deliveries() {
    const std::lock_guard lock(mutex_);
    return deliveries_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<RequestId, Answer> answers_;
  int deliveries_ = 0;
};

// The next token as a hash of everything before it: any mistake in batching, chunking or memory
// changes the text. Token 1 ends it about once in `end_every` tokens.
inline TokenId HashToken(std::span<const TokenId> history, int64_t vocab, uint64_t end_every) {
  const uint64_t hash = HistoryHash(history);
  if (hash % end_every == 0) return 1;
  return static_cast<TokenId>(2 + (hash >> 20) % static_cast<uint64_t>(vocab - 2));
}

// What a lone, correct engine answers.
inline std::vector<TokenId> HashText(std::vector<TokenId> prompt, int64_t max_tokens, int64_t vocab,
                                     uint64_t end_every) {
  const size_t start = prompt.size();
  while (static_cast<int64_t>(prompt.size() - start) < max_tokens) {
    const TokenId next = HashToken(prompt, vocab, end_every);
    if (next == 1) break;
    prompt.push_back(next);
  }
  return {prompt.begin() + static_cast<std::ptrdiff_t>(start), prompt.end()};
}

inline constexpr int64_t kVocab = 64;
inline constexpr TokenId kEnd = 1;

// Answers `text` and then the end token, whatever the prompt of length `prompt` was.
inline ScriptedOptions Script(const Geometry& geometry, std::vector<TokenId> text, size_t prompt) {
  ScriptedOptions script{.geometry = geometry, .vocab_size = kVocab};
  script.next_token = [text, prompt](RequestId, std::span<const TokenId> history) {
    const size_t at = history.size() - prompt;
    return at < text.size() ? text[at] : kEnd;
  };
  return script;
}

inline ScriptedOptions Counting(const Geometry& geometry) {  // never ends by itself
  ScriptedOptions script{.geometry = geometry, .vocab_size = kVocab};
  script.next_token = [](RequestId, std::span<const TokenId> history) {
    return static_cast<TokenId>(2 + history.size() % (kVocab - 2));
  };
  return script;
}

inline std::unique_ptr<Engine> StartEngine(EngineOptions options, const ScriptedOptions& script) {
  auto engine = Engine::Start(options, script.geometry, MakeScriptedExecutor(script));
  EXPECT_TRUE(engine.has_value()) << engine.error().message;
  return std::move(*engine);
}

inline Request Ask(const std::shared_ptr<Collector>& queue, std::vector<TokenId> prompt,
                   int64_t max_tokens = 0) {
  Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.temperature = 0;
  request.queue = queue;
  return request;
}

inline void ExpectAllReturned(const Engine& engine) {
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.blocks_used, 0);
  EXPECT_EQ(stats.slots_used, 0);
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
}

}  // namespace fathom
