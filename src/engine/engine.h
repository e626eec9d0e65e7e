// Engine: one thread owns scheduler, cache and executor and loops: take arrivals and cancellations,
// plan, execute, sample, deliver. Everything public here may be called from any thread.
//
//   auto engine = *Engine::Start(options, geometry, make_executor);
//   RequestId id = *engine->Submit(std::move(request));   // outputs arrive at request.queue
//   engine->Cancel(id);                                   // takes effect at the next step
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "cache/block_pool.h"
#include "cache/geometry.h"
#include "core/status.h"
#include "engine/executor.h"
#include "engine/request.h"

namespace fathom {

struct EngineOptions {
  int64_t max_model_len = 0;         // 0: geometry.max_positions
  int max_num_seqs = 64;             // slots: sequences running at once
  int max_num_batched_tokens = 512;  // T of a step
  // Prefill tokens of a step while other sequences decode, so that decode is never starved.
  int max_prefill_with_decode = 256;
  int max_waiting = 1024;  // beyond it Submit answers kResourceExhausted
  int32_t num_blocks = 0;  // BlockPool size; 0: enough for one sequence of max_model_len
  TokenId eos_token = 1;
};

// A consistent copy, for /metrics and /health.
struct EngineStats {
  int running = 0;
  int waiting = 0;
  int32_t blocks_total = 0, blocks_used = 0;
  int32_t slots_total = 0, slots_used = 0;
  uint64_t steps = 0;
  uint64_t prompt_tokens = 0, generation_tokens = 0;
  uint64_t finished_stop = 0, finished_length = 0, finished_cancelled = 0, finished_error = 0;
  uint64_t preemptions = 0;  // sequences that gave up their blocks and are computed anew
  double last_step_seconds = 0;
  double seconds_since_step = 0;  // grows while work exists and nothing steps: unhealthy
  double oldest_waiting_seconds = 0;
};

class Engine {
 public:
  // Builds pools of the planned size in memory that the executor computes in, calls make_executor
  // with them on the calling thread, then starts the engine thread. Fails with the number of bytes
  // when memory cannot be reserved.
  using ExecutorFactory = std::function<Expected<std::unique_ptr<Executor>>(BlockPool&, SlotPool&)>;
  static Expected<std::unique_ptr<Engine>> Start(const EngineOptions& options,
                                                 const Geometry& geometry,
                                                 const ExecutorFactory& make_executor,
                                                 const MemorySource& memory = Reservation::Make);
  ~Engine();  // cancels what runs and joins

  // Checks at once what can never work: empty prompt (kInvalidArgument), ids outside the
  // vocabulary, prompt + max_tokens beyond max_model_len (kContextLength, both numbers), more
  // blocks than the pool has (kResourceExhausted), queue full (kResourceExhausted), draining
  // (kUnavailable). What does not fit now waits. max_tokens 0 means as many as max_model_len and
  // the pool allow. Exactly one Output with `finish` follows every accepted request.
  Expected<RequestId> Submit(Request request);
  // Takes effect when the running step ends, whether the request waits, prefills or decodes; its
  // last Output then says kCancelled. Unknown and finished ids are ignored.
  void Cancel(RequestId id);

  void BeginDrain();                               // refuse new requests, finish what is there
  bool WaitIdle(std::chrono::milliseconds limit);  // true when nothing runs or waits

  EngineStats stats() const;
  const EngineOptions& options() const;  // zeros replaced by what they stand for
  const Geometry& geometry() const;

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace fathom
