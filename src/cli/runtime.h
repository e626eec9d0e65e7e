// Runtime: a model made ready to generate, for every command that runs one (serve, chat, complete).
//
//   FATHOM_ASSIGN(auto runtime, LoadRuntime({.model = "models/demo", .max_model_len = 8192}));
//   runtime->engine->Submit(...);
//
// Owns everything below HTTP: configuration, weights, tokenizer, chat encoder, compute threads and
// engine. Members are destroyed in reverse order, the engine first.
#pragma once

#include <memory>
#include <string>

#include "api/generation_config.h"
#include "cache/geometry.h"
#include "cache/planner.h"
#include "core/status.h"
#include "core/thread_pool.h"
#include "engine/engine.h"
#include "model/config.h"
#include "model/weights.h"
#include "ops/numerics.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace fathom {

// Prefix reuse and its tiers (cache_flags.h).
struct CacheReuseOptions {
  bool prefix_caching = true;
  int64_t bundle_interval = 2048;     // tokens
  std::string prefix_hash = "xxh3";   // xxh3 | sha256
  int64_t kv_host_size = 0;           // bytes of host memory; 0: no host tier
  std::string kv_disk_path;           // empty: no disk tier
  int64_t kv_disk_size = 0;           // bytes; 0: no limit
  std::string disk_windows = "full";  // full | checkpoint:N | none
  std::shared_ptr<CacheEventSink> events;
};

struct RuntimeOptions {
  std::string model;            // directory, config.json or org/name; empty: the demo checkpoint
  std::string hf_overrides;     // JSON merged into config.json; empty: none
  std::string tokenizer;        // directory or tokenizer.json; empty: the model's own
  std::string device = "auto";  // auto | cpu | cuda
  LoadFormat load_format = LoadFormat::kAuto;
  uint64_t seed = 0;  // of --load-format dummy
  ops::Numerics numerics = ops::Numerics::kProduct;
  // auto | bf16 | fp8. auto is fp8 (float32 with Numerics::kReference, which rounds nothing).
  std::string kv_cache_dtype = "auto";
  // auto | bf16 | fp8 | mxfp4. auto is mxfp4 (float32 with Numerics::kReference).
  std::string indexer_kv_dtype = "auto";
  int block_size = 256;               // native tokens per block, a multiple of 128
  int64_t max_model_len = 0;          // 0: the model's max_position_embeddings
  int max_num_seqs = 64;              // slots
  int max_num_batched_tokens = 0;     // tokens of a step; 0: DefaultStepTokens
  int max_waiting = 1024;             // queue length beyond which requests get 429
  int64_t kv_cache_memory = 0;        // bytes for blocks, slots and bundles; 0: not given
  double gpu_memory_utilization = 0;  // share of the device's memory for everything; 0: off
  CacheReuseOptions reuse;
  int graph_sequences =
      kGraphSequences;  // on a GPU, decoding steps of up to so many are captured; 0: none
  int threads = 0;      // compute threads; 0: one per CPU this process may use
};

struct Runtime {
  RuntimeOptions options;
  std::string directory;  // where the checkpoint lies
  ModelConfig config;
  std::string config_text;  // the JSON it was read from, overrides applied
  GenerationDefaults defaults;
  Geometry geometry;
  MemoryPlan plan;  // what is reserved: weights, workspaces, pools
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<ChatEncoder> encoder;
  Weights weights;
  std::unique_ptr<ThreadPool> threads;
  std::unique_ptr<ops::Backend> gpu;  // null: the model runs on the CPU
  EngineOptions engine_options;
  std::unique_ptr<Engine> engine;
};

// Loads in the order: configuration, geometry and plan, tokenizer, weights, engine, so that what
// cannot work fails before weights are read. Errors name the flag, file or number.
Expected<std::unique_ptr<Runtime>> LoadRuntime(const RuntimeOptions& options);

// Whether --device means a GPU on this machine: cuda, or auto where there is one.
bool RunsOnGpu(const std::string& device);

// Opens the GPU that --device asks for; null for the CPU. kUnavailable says why there is none when
// `device` is "cuda".
Expected<std::unique_ptr<ops::Backend>> OpenDevice(const std::string& device);

// Puts the weights where the model runs.
Status PlaceWeights(Weights& weights, const ModelConfig& config, ops::Backend* gpu,
                    ThreadPool& threads);

// Where the caches lie: host memory, or the GPU's.
MemorySource CacheMemory(const ops::Backend* gpu);

// The cache formats the two dtype flags and the numerics mean.
Expected<CacheOptions> MakeCacheOptions(const RuntimeOptions& options);

// Physical memory, or the cgroup's limit when that is smaller.
int64_t MachineMemoryBytes();

// The table a server prints at start: model, backend, limits, and the memory plan to the byte as
// `fathom plan` prints it.
std::string DescribeRuntime(const Runtime& runtime);

}  // namespace fathom
