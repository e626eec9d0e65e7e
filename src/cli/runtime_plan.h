// From a command's options to the memory plan and from there to the engine's: `fathom plan` prints
// what these functions make, LoadRuntime reserves it.
#pragma once

#include <cstdint>

#include "cache/planner.h"
#include "cli/runtime.h"
#include "core/status.h"

namespace fathom {

// Of the device a model runs on.
struct DeviceMemory {
  bool gpu = false;
  int64_t total = 0;
  int64_t free = -1;  // -1: not asked for
  int64_t host = -1;  // memory of the machine it is in; -1: another machine's, not known
};

// Of the GPU, or where it is null of the machine.
DeviceMemory MemoryOf(const ops::Backend* gpu);

// Tokens of a step where none are asked for: a GPU's products reach their rate at thousands of
// rows, a CPU's at hundreds.
int DefaultStepTokens(const DeviceMemory& device);

// What the options ask for. gpu_memory_utilization is a share of the device's total; without it
// and kv_cache_memory no size is given.
Expected<PlanRequest> MakePlanRequest(const RuntimeOptions& options, const DeviceMemory& device);

// The plan, made to fit: kResourceExhausted when it does not, with the number of bytes and the
// flags that would make it fit. Pools: pool_sizes.h. What lies in host memory, the tiers below the
// cache included, must fit there together: the operating system promises each part by itself and
// kills the process when they fill up.
Expected<MemoryPlan> PlanRuntime(const RuntimeOptions& options, const ModelConfig& config,
                                 const WeightBudget& weights, const DeviceMemory& device);

// The engine's part of the options, pools as planned.
EngineOptions MakeEngineOptions(const RuntimeOptions& options, const ModelConfig& config,
                                const MemoryPlan& plan);

}  // namespace fathom
