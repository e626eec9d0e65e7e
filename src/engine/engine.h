// Engine: one thread owns scheduler, cache and executor and loops: take arrivals and cancellations,
// plan, execute, sample, deliver. Everything public here may be called from any thread.
//
//   auto engine = *Engine::Start(options, geometry, make_executor);
//   RequestId id = *engine->Submit(std::move(request));   // outputs arrive at request.queue
//   engine->Cancel(id);                                   // takes effect at the next step
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cache/block_pool.h"
#include "cache/cache_event.h"
#include "cache/disk_tier.h"
#include "cache/geometry.h"
#include "cache/prefix_cache.h"
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

  // Prefix reuse.
  bool prefix_caching = true;
  int32_t num_bundles = -1;        // BundlePool size; -1: BundlesFor (cache/pool_sizes.h)
  int64_t bundle_interval = 2048;  // tokens, rounded up to whole blocks
  HashAlgorithm prefix_hash = HashAlgorithm::kXxh3;
  // Units of host memory for what is evicted from the pools; 0: no host tier.
  int32_t host_blocks = 0, host_bundles = 0;
  std::shared_ptr<CacheEventSink> events;  // null: none are collected
  // Where prefixes outlive the process; null: nowhere. What is queued when the engine ends is
  // written within disk_flush.
  std::shared_ptr<DiskStore> disk;
  DiskWindows disk_windows;
  std::chrono::seconds disk_flush{60};
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
  uint64_t preemptions = 0;  // sequences that gave up their blocks for others
  // Prefix cache. blocks_used does not count blocks that only the cache holds.
  int32_t blocks_cached = 0;
  int32_t bundles_total = 0;
  int32_t host_blocks_total = 0, host_bundles_total = 0;
  PrefixStats prefix;
  uint64_t prefix_queries = 0;   // prompt tokens looked up
  uint64_t prompt_computed = 0;  // prompt tokens by source
  uint64_t prompt_from_device = 0, prompt_from_host = 0, prompt_from_disk = 0;
  std::array<uint64_t, kMissReasons> misses{};  // requests by MissReason; kNone are whole hits
  uint64_t recomputed_tokens = 0;               // after preemptions
  int64_t sessions_retained = 0;                // at most 65,536 are known
  DiskTierStats disk;
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
  static Expected<std::unique_ptr<Engine>> Start(
      const EngineOptions& options, const Geometry& geometry, const ExecutorFactory& make_executor,
      const MemorySource& memory = Reservation::Make,
      const MemorySource& host_memory = Reservation::Make);
  ~Engine();  // cancels what runs and joins

  // Checks at once what can never work: empty prompt (kInvalidArgument), ids outside the
  // vocabulary, prompt + max_tokens beyond max_model_len (kContextLength, both numbers), more
  // blocks than the pool has (kResourceExhausted), queue full (kResourceExhausted), draining
  // (kUnavailable). What does not fit now waits. max_tokens 0 means as many as max_model_len and
  // the pool allow. Exactly one Output with `finish` follows every accepted request.
  Expected<RequestId> Submit(Request request);
  // All of them in one step or none, so that what a refusal leaves behind takes no place from
  // others. More than the queue ever holds are kInvalidArgument. The ids are in the requests'
  // order.
  Expected<std::vector<RequestId>> SubmitAll(std::vector<Request> requests);
  // Takes effect when the running step ends, whether the request waits, prefills or decodes; its
  // last Output then says kCancelled. Unknown and finished ids are ignored.
  void Cancel(RequestId id);

  void BeginDrain();                               // refuse new requests, finish what is there
  bool WaitIdle(std::chrono::milliseconds limit);  // true when nothing runs or waits

  // Drops everything from the prefix cache that no running sequence holds, in every tier, at the
  // next step.
  void ResetPrefixCache();

  EngineStats stats() const;
  const EngineOptions& options() const;  // zeros replaced by what they stand for
  const Geometry& geometry() const;

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace fathom
