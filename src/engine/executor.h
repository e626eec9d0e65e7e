// Executor: runs a StepPlan on a backend. The engine owns one and calls it from its own thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>

#include "cache/block_pool.h"
#include "cache/geometry.h"
#include "core/status.h"
#include "engine/step_plan.h"
#include "model/forward.h"
#include "model/weights.h"

namespace fathom {

struct ExecutorLimits {
  int max_step_tokens = 512;
  int max_logit_rows = 64;
};

class Executor {
 public:
  virtual ~Executor() = default;
  // Logits [plan.logit_rows.size(), vocab] float32 in host memory, valid until the next call; the
  // sampler may change them in place. An error fails the step's requests, not the engine.
  virtual Expected<std::span<float>> Execute(const StepPlan& plan) = 0;
  // Zeroes a slot before a new sequence uses it, in order with Execute.
  virtual void ClearSlot(std::span<std::byte> slot) {
    std::fill(slot.begin(), slot.end(), std::byte{0});
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
