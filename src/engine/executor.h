// Executor: runs a StepPlan on a backend. The engine owns one and calls it from its own thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

#include "cache/block_pool.h"
#include "cache/geometry.h"
#include "core/status.h"
#include "engine/step_plan.h"
#include "model/forward.h"
#include "model/weights.h"
#include "ops/sampling/sampling.h"

namespace fathom {

struct ExecutorLimits {
  int max_step_tokens = 512;
  int max_logit_rows = 64;
};

// `bytes` bytes at offset `from` of the source, to offset `to` of the destination.
struct CopyRun {
  int64_t to = 0;
  int64_t from = 0;
  int64_t bytes = 0;
};

class Executor {
 public:
  virtual ~Executor() = default;
  // Runs a plan. Its logits [plan.logit_rows.size(), vocab] stay where the model computes until the
  // next one. An error fails the step's requests, not the engine.
  virtual Status Execute(const StepPlan& plan) = 0;
  // Row `row` of the logits, which no sampling has touched yet. `to` [vocab] in host memory.
  virtual void CopyLogits(int64_t row, std::span<float> to) = 0;
  // Samples from rows of the logits, each at most once; they hold anything afterwards. out
  // [rows.size()].
  virtual void Sample(std::span<const ops::SamplingRow> rows, std::span<ops::SampledToken> out) = 0;
  // Movements of cache bytes, in order with Execute. Pools' memory is where the executor computes;
  // `host` is host memory, which may change once the call returns.
  virtual void ClearSlot(std::span<std::byte> slot) {
    std::fill(slot.begin(), slot.end(), std::byte{0});
  }
  virtual void CopyRuns(std::byte* to, const std::byte* from, std::span<const CopyRun> runs) {
    for (const CopyRun& run : runs) {
      std::memcpy(to + run.to, from + run.from, static_cast<size_t>(run.bytes));
    }
  }
  virtual void ToHost(std::byte* host, const std::byte* from, int64_t bytes) {
    std::memcpy(host, from, static_cast<size_t>(bytes));
  }
  virtual void FromHost(std::byte* to, const std::byte* host, int64_t bytes) {
    std::memcpy(to, host, static_cast<size_t>(bytes));
  }
  virtual int64_t vocab_size() const = 0;
  virtual ExecutorLimits limits() const = 0;
};

// Borrows config, weights, pools and thread pool; all must outlive it. Block and slot memory are
// the pools' own.
std::unique_ptr<Executor> MakeCpuExecutor(const ModelConfig& config, const Weights& weights,
                                          const Geometry& geometry, BlockPool& blocks,
                                          SlotPool& slots, ThreadPool& threads,
                                          const ForwardOptions& options, ExecutorLimits limits);

}  // namespace fathom
