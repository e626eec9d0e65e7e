// The memory plan: every byte of weights, workspaces and cache before a weight is read
// (kv-cache.md 4). Needs config.json alone.
//
//   FATHOM_ASSIGN(ModelConfig config, LoadModelConfig(directory));
//   FATHOM_ASSIGN(MemoryPlan plan, PlanMemory(config, {.context = 131'072, .memory = 80 << 30}));
//   if (!plan.fits()) ... plan.shortfall bytes more are needed
//   fmt::print("{}", PlanText(plan));   // plan_text.h
//
// With more than one GPU the layout is TP 1, EP `gpus`: routed experts are divided, everything else
// and a cache of its own lie on every device. All sizes are then those of one device (the fullest).
#pragma once

#include <cstdint>
#include <vector>

#include "cache/geometry.h"
#include "cache/graph_plan.h"
#include "cache/pool_sizes.h"
#include "cache/weight_budget.h"
#include "core/status.h"
#include "model/config.h"
#include "ops/numerics.h"

namespace fathom {

struct PlanRequest {
  CacheOptions cache;
  ops::Numerics numerics = ops::Numerics::kProduct;
  int64_t context = 0;    // tokens of the longest sequence; 0: max_position_embeddings
  int sequences = 1;      // of that length that must fit together
  int slots = 64;         // --max-num-seqs
  int step_tokens = 512;  // --max-num-batched-tokens
  bool bundles = true;    // prefix caching
  int gpus = 1;
  bool on_gpu = true;                     // activations are bf16 there, float32 on the CPU
  int graph_sequences = kGraphSequences;  // on a GPU: what is captured (graph_plan.h); 0: nothing
  int threads = 1;                        // of the CPU backend
  int64_t memory = -1;                    // of one device, for everything; -1: not given
  int64_t cache_memory = -1;              // for the three pools; -1: not given, `memory` decides
};

// What a step needs beside weights and cache.
struct Workspaces {
  int64_t activations = 0;  // Forward::WorkspaceBytes, exact
  int64_t logits = 0;       // [rows, V] float32, exact
  int64_t step_arrays = 0;  // token ids, positions, block tables of the largest step, exact
  // Upper bound of what kernels share as scratch; it grows with the step, never with the context.
  int64_t kernel_scratch = 0;
  // Of that, the indexer: scores live in a tile until they are offered to a list of the best.
  int64_t indexer_scratch = 0;

  int64_t graphs = 0;  // at most; 0 on the CPU

  int64_t bytes() const { return activations + logits + step_arrays + kernel_scratch + graphs; }
};

// One sequence of PlanRequest::context tokens.
struct SequenceBytes {
  double bytes_per_token = 0;  // compressed rows, without page padding
  int64_t csa_rows = 0;        // of each CSA layer, complete ones
  int64_t hca_rows = 0;
  int64_t rows = 0;    // compressed rows of all layers (the published "KV size of a context")
  int64_t window = 0;  // 128 rows of every layer
  int64_t total() const { return rows + window; }
  int64_t blocks = 0;        // blocks it takes
  int64_t block_bytes = 0;   // their bytes
  int64_t reserved() const;  // blocks and slot: what it takes in the pools
  int64_t slot_bytes = 0;
};

// How many sequences of `tokens` tokens run at once.
struct Concurrency {
  int64_t tokens = 0;
  int64_t in_pools = 0;  // as the pools are
  int64_t most = 0;      // with the best --max-num-seqs for that length; 0 without a memory size
};

struct MemoryPlan {
  PlanRequest request;  // context filled in
  Geometry geometry;
  WeightBudget weights;
  Workspaces workspaces;
  SequenceBytes sequence;
  int64_t weight_bytes = 0;              // on one device
  int64_t bundle_bytes = 0;              // at a multiple of 128 tokens
  int64_t bundle_unit = 0;               // at the worst token: what the pool reserves for each
  PoolSizes least;                       // what the request cannot do without
  PoolSizes pools;                       // what is reserved; `least` when that does not fit
  int64_t cache_memory = -1;             // what is left for the pools; -1: no memory size given
  int64_t shortfall = 0;                 // bytes that are missing on a device; 0: it fits
  std::vector<Concurrency> concurrency;  // 8K, 128K, 1M and the context

  bool limited() const { return cache_memory >= 0 || shortfall > 0; }
  bool fits() const { return shortfall == 0; }
  int64_t pool_bytes() const { return pools.bytes(geometry); }
  int64_t total_bytes() const { return weight_bytes + workspaces.bytes() + pool_bytes(); }
  PoolDemand demand() const;
};

// Rows of logits a step may ask for: one of every running sequence; prompt log-probabilities take
// theirs in pieces of 64.
int PlannedLogitRows(int slots);

// Of one device.
Workspaces PlanWorkspaces(const ModelConfig& config, const Geometry& geometry,
                          const PlanRequest& request);

SequenceBytes PlanSequence(const Geometry& geometry, int64_t tokens);

// Refuses what no memory would make possible, naming the flag: a context of less than 1 or more
// than max_position_embeddings, more sequences than slots, fewer step tokens than slots, more GPUs
// than experts, an illegal block size. What does not fit is a plan with a shortfall.
Expected<MemoryPlan> PlanMemory(const ModelConfig& config, const PlanRequest& request);
// The same where the weights are known already.
Expected<MemoryPlan> PlanMemory(const ModelConfig& config, const PlanRequest& request,
                                const WeightBudget& weights);

}  // namespace fathom
