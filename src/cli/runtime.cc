#include "cli/runtime.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <new>
#include <vector>

#include "cache/plan_text.h"
#include "cli/cache_flags.h"
#include "cli/model_source.h"
#include "cli/runtime_plan.h"
#include "core/cpu_features.h"
#include "core/log.h"
#include "engine/executor.h"

#if FATHOM_CUDA
#include "engine/cuda_executor.h"
#include "model/cuda_weights.h"
#include "ops/cuda/cuda_backend.h"
#endif

namespace fathom {
namespace {

// The model's own tokenizer or the one that was asked for. Generated weights without any take the
// demo's.
Expected<std::unique_ptr<Tokenizer>> LoadTokenizer(const RuntimeOptions& options,
                                                   const ModelSource& model) {
  FATHOM_ASSIGN(std::string path, TokenizerPath(options.tokenizer, model.directory));
  std::error_code error;
  const bool borrowed = options.load_format == LoadFormat::kDummy && options.tokenizer.empty() &&
                        !std::filesystem::exists(path, error);
  if (borrowed) {
    FATHOM_ASSIGN(const std::string demo, DemoModelDirectory());
    path = demo + "/tokenizer.json";
  }
  FATHOM_ASSIGN(std::unique_ptr<Tokenizer> tokenizer, Tokenizer::Load(path));
  const int64_t ids = tokenizer->vocab_size(), vocabulary = model.config.vocab_size;
  if (ids > vocabulary) {
    return FailParam(Code::kInvalidArgument, "--tokenizer",
                     "{}: ids go up to {}, but the model's vocab_size is {}", path, ids - 1,
                     vocabulary);
  }
  if (borrowed) {
    Log().warn(
        "{} has no tokenizer.json: the demo's is used, which has no text for {} of the model's {} "
        "tokens (--tokenizer)",
        model.directory, vocabulary - ids, vocabulary);
  }
  return tokenizer;
}

Expected<std::unique_ptr<Executor>> MakeExecutor(Runtime& runtime, const ForwardOptions& forward,
                                                 BlockPool& blocks, SlotPool& slots) {
  const ExecutorLimits limits = {forward.max_tokens, forward.max_logit_rows};
#if FATHOM_CUDA
  if (runtime.gpu != nullptr) {
    return MakeCudaExecutor(runtime.config, runtime.weights, runtime.geometry, blocks, slots,
                            static_cast<ops::CudaBackend&>(*runtime.gpu), forward, limits,
                            {.max_graph_sequences = runtime.options.graph_sequences});
  }
#endif
  try {
    return MakeCpuExecutor(runtime.config, runtime.weights, runtime.geometry, blocks, slots,
                           *runtime.threads, forward, limits);
  } catch (const std::bad_alloc&) {
    return FailParam(Code::kResourceExhausted, "--max-num-batched-tokens",
                     "the buffers of a step of {} tokens do not fit into memory; lower "
                     "--max-num-batched-tokens",
                     forward.max_tokens);
  }
}

}  // namespace

bool RunsOnGpu(const std::string& device) {
#if FATHOM_CUDA
  if (device == "auto") return ops::CudaBackend::Available();
#endif
  return device == "cuda";
}

Expected<std::unique_ptr<ops::Backend>> OpenDevice(const std::string& device) {
#if FATHOM_CUDA
  if (RunsOnGpu(device)) return ops::CudaBackend::Make();
#else
  if (device == "cuda") {
    return FailParam(Code::kUnavailable, "--device",
                     "--device cuda: this binary was built without CUDA (FATHOM_CUDA=OFF)");
  }
#endif
  return std::unique_ptr<ops::Backend>();
}

Status PlaceWeights(Weights& weights, const ModelConfig& config, ops::Backend* gpu,
                    ThreadPool& threads) {
#if FATHOM_CUDA
  if (gpu != nullptr) {
    return UploadForCuda(weights, config, static_cast<ops::CudaBackend&>(*gpu));
  }
#endif
  PackForCpu(weights, threads);
  return {};
}

MemorySource CacheMemory(const ops::Backend* gpu) {
#if FATHOM_CUDA
  if (gpu != nullptr) return ReserveCuda;
#endif
  return Reservation::Make;
}

int64_t MachineMemoryBytes() {
  int64_t bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE);
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream file(path);
    if (int64_t limit = 0; file >> limit && limit > 0) bytes = std::min(bytes, limit);
  }
  return bytes;
}

Expected<CacheOptions> MakeCacheOptions(const RuntimeOptions& options) {
  const bool reference = options.numerics == ops::Numerics::kReference;
  CacheOptions cache;
  cache.block_tokens = options.block_size;
  const std::string& kv = options.kv_cache_dtype;
  if (kv == "auto") cache.kv = reference ? KvDType::kF32 : KvDType::kFp8;
  else if (kv == "bf16") cache.kv = KvDType::kBf16;
  else if (kv == "fp8") cache.kv = KvDType::kFp8;
  else
    return FailParam(Code::kInvalidArgument, "--kv-cache-dtype",
                     "--kv-cache-dtype '{}' is not one of auto, bf16, fp8", kv);
  const std::string& index = options.indexer_kv_dtype;
  if (index == "auto") cache.index = reference ? IndexDType::kF32 : IndexDType::kMxfp4;
  else if (index == "bf16") cache.index = IndexDType::kBf16;
  else if (index == "fp8") cache.index = IndexDType::kFp8;
  else if (index == "mxfp4") cache.index = IndexDType::kMxfp4;
  else
    return FailParam(
        Code::kInvalidArgument, "--attention-config.indexer_kv_dtype",
        "--attention-config.indexer_kv_dtype '{}' is not one of auto, bf16, fp8, mxfp4", index);
  if (reference && (kv != "auto" || index != "auto")) {
    return FailParam(Code::kInvalidArgument, "--numerics",
                     "--numerics reference keeps the cache in float32; leave --kv-cache-dtype and "
                     "--attention-config.indexer_kv_dtype out");
  }
  return cache;
}

Expected<std::unique_ptr<Runtime>> LoadRuntime(const RuntimeOptions& options) {
  auto runtime = std::make_unique<Runtime>();
  runtime->options = options;
  FATHOM_ASSIGN(const ModelSource model, OpenModel(options.model, options.hf_overrides));
  const std::string& directory = runtime->directory = model.directory;
  runtime->config = model.config;
  runtime->config_text = model.config_text;
  FATHOM_ASSIGN(runtime->defaults, LoadGenerationDefaults(directory));
  FATHOM_ASSIGN(CacheOptions cache, MakeCacheOptions(options));
  FATHOM_ASSIGN(runtime->geometry, MakeGeometry(runtime->config, cache));
  FATHOM_ASSIGN(runtime->gpu, OpenDevice(options.device));
#if FATHOM_CUDA
  if (runtime->gpu != nullptr) FATHOM_TRY(CheckForCuda(runtime->config));
#endif
  const DeviceMemory memory = MemoryOf(runtime->gpu.get());
  // The checkpoint is not known yet; it may lack drafters and hold its experts in either format.
  // This pass refuses what cannot fit even at the least it may weigh.
  FATHOM_ASSIGN(runtime->plan,
                PlanRuntime(options, runtime->config, BudgetWeights(runtime->config, 0), memory));

  FATHOM_ASSIGN(runtime->tokenizer, LoadTokenizer(options, model));
  FATHOM_ASSIGN(ChatEncoder encoder, ChatEncoder::Make(*runtime->tokenizer));
  runtime->encoder = std::make_unique<ChatEncoder>(std::move(encoder));

  FATHOM_ASSIGN(runtime->weights,
                LoadWeights(directory, runtime->config, {options.load_format, options.seed, true}));
  FATHOM_ASSIGN(runtime->plan,
                PlanRuntime(options, runtime->config,
                            BudgetLoaded(runtime->config, runtime->weights.tensor_count,
                                         runtime->weights.total_bytes),
                            memory));
  EngineOptions planned = MakeEngineOptions(options, runtime->config, runtime->plan);
  FATHOM_TRY(SetUpReuse(*runtime, &planned));
  runtime->engine_options = planned;
  runtime->threads = std::make_unique<ThreadPool>(options.threads);
  FATHOM_TRY(
      PlaceWeights(runtime->weights, runtime->config, runtime->gpu.get(), *runtime->threads));

  ForwardOptions forward;
  forward.numerics = options.numerics;
  forward.max_tokens = planned.max_num_batched_tokens;
  forward.max_logit_rows = PlannedLogitRows(planned.max_num_seqs);
  Runtime* borrowed = runtime.get();
  FATHOM_ASSIGN(runtime->engine, Engine::Start(
                                     planned, runtime->geometry,
                                     [borrowed, forward](BlockPool& blocks, SlotPool& slots) {
                                       return MakeExecutor(*borrowed, forward, blocks, slots);
                                     },
                                     CacheMemory(runtime->gpu.get())));
  return runtime;
}

std::string DescribeRuntime(const Runtime& runtime) {
  const EngineOptions& engine = runtime.engine_options;
  std::string table;
  const auto row = [&table](std::string_view name, const std::string& value) {
    table += fmt::format("  {:<16} {}\n", name, value);
  };
  row("model", runtime.directory);
  const char* numerics =
      runtime.options.numerics == ops::Numerics::kProduct ? "product" : "reference";
  row("backend", runtime.gpu != nullptr
                     ? fmt::format("cuda, numerics {}", numerics)
                     : fmt::format("cpu ({}), {} threads, numerics {}", IsaName(CpuIsa()),
                                   runtime.threads->size(), numerics));
  row("limits",
      fmt::format("context {}, sequences {}, tokens a step {}, waiting {}", engine.max_model_len,
                  engine.max_num_seqs, engine.max_num_batched_tokens, engine.max_waiting));
  return table + PlanTables(runtime.plan) + DescribeReuse(engine, runtime.geometry);
}

}  // namespace fathom
