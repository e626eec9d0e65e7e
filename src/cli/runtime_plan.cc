#include "cli/runtime_plan.h"

#include <algorithm>

#include "cache/plan_advice.h"
#include "core/amounts.h"
#include "core/thread_pool.h"

#if FATHOM_CUDA
#include "ops/cuda/cuda_backend.h"
#endif

namespace fathom {
namespace {

Status CheckPositive(const char* flag, int64_t value) {
  if (value > 0) return {};
  return FailParam(Code::kInvalidArgument, flag, "{} must be at least 1, not {}", flag, value);
}

Status CheckOptions(const RuntimeOptions& options, const ModelConfig& config) {
  FATHOM_TRY(CheckPositive("--max-num-seqs", options.max_num_seqs));
  FATHOM_TRY(CheckPositive("--max-num-batched-tokens", options.max_num_batched_tokens));
  if (options.max_model_len < 0 || options.max_model_len > config.max_position_embeddings) {
    return FailParam(Code::kInvalidArgument, "--max-model-len",
                     "--max-model-len {} is not within 1 .. {} (max_position_embeddings)",
                     options.max_model_len, config.max_position_embeddings);
  }
  return {};
}

// Which limit the plan does not keep, for the message.
tl::unexpected<Error> DoesNotFit(const ModelConfig& config, const MemoryPlan& plan,
                                 const char* flag, int64_t left) {
  const std::string would = RemedyText(Remedies(config, plan));
  return FailParam(Code::kResourceExhausted, flag,
                   "{} slots and the blocks of one sequence of {} tokens need {} bytes, but {} "
                   "leaves {}: {} more are needed{}",
                   plan.request.slots, plan.request.context, plan.least.bytes(plan.geometry), flag,
                   left, BytesAndAmount(plan.shortfall),
                   would.empty() ? "" : "; would fit with " + would);
}

}  // namespace

DeviceMemory MemoryOf(const ops::Backend* gpu) {
#if FATHOM_CUDA
  if (gpu != nullptr) {
    const ops::CudaMemory memory = ops::CudaBackend::Memory();
    return {true, memory.total, memory.free};
  }
#endif
  return {false, MachineMemoryBytes(), -1};
}

Expected<PlanRequest> MakePlanRequest(const RuntimeOptions& options, const DeviceMemory& device) {
  PlanRequest request;
  FATHOM_ASSIGN(request.cache, MakeCacheOptions(options));
  request.numerics = options.numerics;
  request.context = options.max_model_len;
  request.slots = options.max_num_seqs;
  request.step_tokens = options.max_num_batched_tokens;
  request.bundles = options.reuse.prefix_caching;
  request.on_gpu = device.gpu;
  if (!device.gpu) {
    request.threads = options.threads > 0 ? options.threads : ThreadPool().size();
  }
  if (options.kv_cache_memory < 0) {
    return FailParam(Code::kInvalidArgument, "--kv-cache-memory",
                     "--kv-cache-memory must be a number of bytes, not {}",
                     options.kv_cache_memory);
  }
  const double share = options.gpu_memory_utilization;
  if (!(share >= 0 && share <= 1)) {
    return FailParam(Code::kInvalidArgument, "--gpu-memory-utilization",
                     "--gpu-memory-utilization must lie in (0, 1], not {}", share);
  }
  if (options.kv_cache_memory > 0) {
    request.cache_memory = options.kv_cache_memory;
  } else if (share > 0) {
    request.memory = static_cast<int64_t>(share * static_cast<double>(device.total));
  }
  return request;
}

Expected<MemoryPlan> PlanRuntime(const RuntimeOptions& options, const ModelConfig& config,
                                 const WeightBudget& weights, const DeviceMemory& device) {
  FATHOM_TRY(CheckOptions(options, config));
  FATHOM_ASSIGN(PlanRequest request, MakePlanRequest(options, device));
  FATHOM_ASSIGN(MemoryPlan plan, PlanMemory(config, request, weights));
  if (!plan.fits()) {
    const char* flag = request.cache_memory >= 0 ? "--kv-cache-memory" : "--gpu-memory-utilization";
    return DoesNotFit(config, plan, flag, plan.cache_memory);
  }
  // Whatever the flags allow, others may be using the device.
  if (device.free >= 0 && plan.total_bytes() > device.free) {
    request.memory = device.free;
    FATHOM_ASSIGN(const MemoryPlan real, PlanMemory(config, request, weights));
    if (!real.fits()) return DoesNotFit(config, real, "free device memory", real.cache_memory);
    plan = real;
  }
  return plan;
}

EngineOptions MakeEngineOptions(const RuntimeOptions& options, const ModelConfig& config,
                                const MemoryPlan& plan) {
  EngineOptions engine;
  engine.max_model_len = plan.request.context;
  engine.max_num_seqs = options.max_num_seqs;
  engine.max_num_batched_tokens = options.max_num_batched_tokens;
  engine.max_prefill_with_decode = std::max(1, options.max_num_batched_tokens / 2);
  engine.max_waiting = options.max_waiting;
  engine.eos_token = config.eos_token;
  engine.num_blocks = static_cast<int32_t>(plan.pools.blocks);
  engine.num_bundles = static_cast<int32_t>(plan.pools.bundles);
  return engine;
}

}  // namespace fathom
