#include "cli/runtime.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <vector>

#include "cache/plan_text.h"
#include "cli/cache_flags.h"
#include "cli/runtime_plan.h"
#include "core/cpu_features.h"
#include "core/log.h"
#include "engine/executor.h"
#include "model/model_path.h"

#if FATHOM_CUDA
#include "engine/cuda_executor.h"
#include "model/cuda_weights.h"
#include "ops/cuda/cuda_backend.h"
#endif

namespace fathom {
namespace {

namespace fs = std::filesystem;

Expected<std::string> TokenizerPath(const RuntimeOptions& options, const std::string& directory) {
  if (options.tokenizer.empty()) return directory + "/tokenizer.json";
  if (fs::path(options.tokenizer).extension() == ".json") return options.tokenizer;
  FATHOM_ASSIGN(std::string resolved, ResolveModel(options.tokenizer));
  return resolved + "/tokenizer.json";
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

Expected<std::string> DemoModelDirectory() {
  std::vector<std::string> tried;
  const auto usable = [&](const fs::path& path) {
    tried.push_back(path.string());
    std::error_code error;
    return fs::exists(path / "config.json", error);
  };
  if (const char* given = std::getenv("FATHOM_DEMO_MODEL"); given != nullptr && *given != 0) {
    if (usable(given)) return std::string(given);
    return Fail(Code::kNotFound, "FATHOM_DEMO_MODEL: {} holds no config.json", given);
  }
  std::error_code error;
  const fs::path executable = fs::read_symlink("/proc/self/exe", error);
  fs::path folder = executable.parent_path();
  for (int depth = 0; depth < 4 && !folder.empty(); ++depth) {
    if (usable(folder / "models/demo")) return (folder / "models/demo").string();
    if (folder == folder.root_path()) break;
    folder = folder.parent_path();
  }
  const fs::path installed = executable.parent_path() / "../share/fathom/demo";
  if (usable(installed)) return installed.lexically_normal().string();
  std::string places;
  for (const std::string& path : tried) places += (places.empty() ? "" : ", ") + path;
  return Fail(Code::kNotFound, "no MODEL given and the demo checkpoint is in none of: {}", places);
}

Expected<std::string> FindModel(const std::string& model) {
  if (model.empty()) return DemoModelDirectory();
  if (model.ends_with(".gguf")) {
    return FailParam(Code::kInvalidArgument, "model",
                     "{}: GGUF is not supported; MODEL is a directory of safetensors files with "
                     "config.json, or org/name",
                     model);
  }
  FATHOM_ASSIGN(std::string directory, ResolveModel(model));
  if (std::error_code error; !fs::exists(directory + "/config.json", error)) {
    return FailParam(Code::kNotFound, "model", "no model in {}: config.json is missing", directory);
  }
  return directory;
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
  FATHOM_ASSIGN(runtime->directory, FindModel(options.model));
  const std::string& directory = runtime->directory;
  FATHOM_ASSIGN(runtime->config, LoadModelConfig(directory));
  FATHOM_ASSIGN(runtime->defaults, LoadGenerationDefaults(directory));
  FATHOM_ASSIGN(CacheOptions cache, MakeCacheOptions(options));
  FATHOM_ASSIGN(runtime->geometry, MakeGeometry(runtime->config, cache));
  FATHOM_ASSIGN(runtime->gpu, OpenDevice(options.device));
  const DeviceMemory memory = MemoryOf(runtime->gpu.get());
  // The checkpoint is not known yet; it may lack drafters and hold its experts in either format.
  // This pass refuses what cannot fit even at the least it may weigh.
  FATHOM_ASSIGN(runtime->plan,
                PlanRuntime(options, runtime->config, BudgetWeights(runtime->config, 0), memory));

  FATHOM_ASSIGN(std::string tokenizer, TokenizerPath(options, directory));
  FATHOM_ASSIGN(runtime->tokenizer, Tokenizer::Load(tokenizer));
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
