#include "cli/runtime_plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "cache/plan_advice.h"
#include "core/amounts.h"
#include "core/thread_pool.h"

#if FATHOM_CUDA
#include "ops/cuda/cuda_backend.h"
#endif

namespace fathom {
namespace {

// What is on its way to and from the disk, at most (docs/prefix-cache.md).
constexpr int64_t kDiskBuffers = int64_t{128} << 20;

Status CheckPositive(const char* flag, int64_t value) {
  if (value > 0) return {};
  return FailParam(Code::kInvalidArgument, flag, "{} must be at least 1, not {}", flag, value);
}

Status CheckOptions(const RuntimeOptions& options, const ModelConfig& config) {
  FATHOM_TRY(CheckPositive("--max-num-seqs", options.max_num_seqs));
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

// What the tiers below the cache keep in host memory.
int64_t HostTierBytes(const CacheReuseOptions& reuse) {
  return reuse.prefix_caching ? reuse.kv_host_size : 0;
}
int64_t DiskBufferBytes(const CacheReuseOptions& reuse) {
  return reuse.prefix_caching && !reuse.kv_disk_path.empty() ? kDiskBuffers : 0;
}

Status CheckHostMemory(const RuntimeOptions& options, const MemoryPlan& plan,
                       const DeviceMemory& device) {
  if (device.host < 0) return {};
  int64_t sum = 0;
  std::string parts;
  const auto add = [&](const char* name, int64_t bytes) {
    if (bytes == 0) return;
    sum += bytes;
    parts += fmt::format("{}{} {}", parts.empty() ? "" : ", ", name, Amount(bytes));
  };
  std::vector<const char*> flags;
  if (!device.gpu) {
    add("weights", plan.weight_bytes);
    add("workspaces", plan.workspaces.bytes());
    add("cache", plan.pool_bytes());
    if (options.kv_cache_memory > 0) flags = {"--kv-cache-memory"};
    else if (options.gpu_memory_utilization > 0) flags = {"--gpu-memory-utilization"};
    else flags = {"--max-model-len", "--max-num-seqs"};
  }
  const int64_t tier = HostTierBytes(options.reuse);
  add("host tier", tier);
  add("disk buffers", DiskBufferBytes(options.reuse));
  if (sum <= device.host) return {};
  if (tier > 0) flags.insert(flags.begin(), "--kv-host-size");
  const char* remedy = flags.empty() ? "leave out" : "lower";
  if (flags.empty()) flags = {"--kv-disk-path"};
  return FailParam(Code::kResourceExhausted, flags.front(),
                   "{} bytes of host memory are needed ({}), but this machine has {}: {} too many; "
                   "{} {}",
                   sum, parts, device.host, BytesAndAmount(sum - device.host), remedy,
                   fmt::join(flags, " or "));
}

}  // namespace

DeviceMemory MemoryOf(const ops::Backend* gpu) {
#if FATHOM_CUDA
  if (gpu != nullptr) {
    const ops::CudaMemory memory = ops::CudaBackend::Memory();
    return {true, memory.total, memory.free, MachineMemoryBytes()};
  }
#endif
  const int64_t machine = MachineMemoryBytes();
  return {false, machine, -1, machine};
}

int DefaultStepTokens(const DeviceMemory& device) {
  return device.gpu ? 4096 : 512;
}

Expected<PlanRequest> MakePlanRequest(const RuntimeOptions& options, const DeviceMemory& device) {
  PlanRequest request;
  FATHOM_ASSIGN(request.cache, MakeCacheOptions(options));
  request.numerics = options.numerics;
  request.context = options.max_model_len;
  request.slots = options.max_num_seqs;
  request.step_tokens = options.max_num_batched_tokens > 0 ? options.max_num_batched_tokens
                                                           : DefaultStepTokens(device);
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
  FATHOM_TRY(CheckHostMemory(options, plan, device));
  return plan;
}

EngineOptions MakeEngineOptions(const RuntimeOptions& options, const ModelConfig& config,
                                const MemoryPlan& plan) {
  EngineOptions engine;
  engine.max_model_len = plan.request.context;
  engine.max_num_seqs = options.max_num_seqs;
  engine.max_num_batched_tokens = static_cast<int>(plan.request.step_tokens);
  engine.max_prefill_with_decode = std::max(1, engine.max_num_batched_tokens / 2);
  engine.max_waiting = options.max_waiting;
  engine.eos_token = config.eos_token;
  engine.num_blocks = static_cast<int32_t>(plan.pools.blocks);
  engine.num_bundles = static_cast<int32_t>(plan.pools.bundles);
  return engine;
}

}  // namespace fathom
