// ScriptedExecutor: an Executor without weights, for tests of everything above it. The next-token
// logits of a sequence are a function of its token history.
//
// It keeps no memory of its own. Like a real model it writes the step's tokens into the blocks of
// the block table and a running hash into the slot, and reads the history back from there, so a
// wrong block table, slot, position or batch gives a wrong answer; most of them are detected and
// fail the step with a sentence.
//
//   auto geometry = ScriptedGeometry();
//   ScriptedOptions script{.geometry = geometry, .vocab_size = 300};
//   script.next_token = [](RequestId, std::span<const TokenId> history) {
//     return history.size() < 20 ? TokenId{'a'} : TokenId{1};           // then end of text
//   };
//   auto engine = Engine::Start({.eos_token = 1}, geometry, MakeScriptedExecutor(script));
#pragma once

#include <functional>
#include <span>

#include "engine/engine.h"
#include "engine/executor.h"

namespace fathom {

struct ScriptedOptions {
  Geometry geometry;
  int64_t vocab_size = 0;
  ExecutorLimits limits{};
  // One-hot logits: the answer gets 100, every other token 0. `history` holds the sequence's tokens
  // from position 0, the last one being the token whose logits are asked for. Called on the engine
  // thread; so are the two below.
  std::function<TokenId(RequestId, std::span<const TokenId> history)> next_token = nullptr;
  // Instead of next_token: fills the row itself.
  std::function<void(RequestId, std::span<const TokenId> history, std::span<float> logits)>
      fill_logits = nullptr;
  // Called before each step; may sleep, block, record the plan, or fail the step.
  std::function<Status(const StepPlan&)> on_step = nullptr;
};

// A one-layer geometry whose blocks and slots are large enough for ScriptedExecutor.
Geometry ScriptedGeometry(int block_tokens = 256, int64_t max_positions = 1'048'576);

// Hash of a token history; equal histories only (as good as never otherwise) have equal hashes.
uint64_t HistoryHash(std::span<const TokenId> history);

// For Engine::Start. Fails when the geometry's units are too small or the script is incomplete.
Engine::ExecutorFactory MakeScriptedExecutor(ScriptedOptions options);

}  // namespace fathom
