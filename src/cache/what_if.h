// Tables of plans over one or two things at a time: contexts and formats, contexts and batches,
// block sizes, numbers of GPUs (`fathom plan --what-if`).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cache/planner.h"

namespace fathom {

// One sequence: its rows and windows.
struct ContextLine {
  int64_t context = 0;
  CacheOptions cache;
  int64_t bytes = 0;
};

// `batch` sequences of `context` tokens at once: what they cannot do without.
struct BatchLine {
  int64_t context = 0;
  int batch = 0;
  PoolSizes pools;
  int64_t bytes = 0;
  bool fits = true;  // in the memory of the request, where it gives one
};

// What a block size means (kv-cache.md 2).
struct BlockSizeLine {
  CacheOptions cache;
  int64_t csa_page = 0, index_page = 0, hca_page = 0;
  int page_sizes = 0;  // different ones
  int64_t block_bytes = 0;
  int64_t padding_bytes = 0;  // of a block
  // Tokens. Sequences share whole blocks, so a hit on another's prefix ends at a multiple of
  // `hit_granularity`; the last block of a sequence has up to `tail_waste` tokens unused.
  int64_t hit_granularity = 0;
  int64_t tail_waste = 0;

  double padding_percent() const;
};

// Sizes are those of one GPU.
struct GpuLine {
  int gpus = 0;
  int64_t weight_bytes = 0;
  int64_t workspace_bytes = 0;
  int64_t pool_bytes = 0;  // of what fits; 0 without a memory size
  int64_t sequences = 0;   // of the request's context, on all GPUs together
  int64_t shortfall = 0;
};

struct WhatIf {
  PlanRequest request;  // what the tables do not vary
  std::vector<ContextLine> contexts;
  std::vector<BatchLine> batches;
  std::vector<BlockSizeLine> block_sizes;  // 128 .. 1,024 with every pair of formats
  std::vector<GpuLine> gpus;
};

// Contexts beyond the model's are left out. Refuses what PlanMemory refuses.
Expected<WhatIf> MakeWhatIf(const ModelConfig& config, const PlanRequest& request);

// At most 100 columns.
std::string WhatIfText(const WhatIf& what_if);

std::string_view KvDTypeName(KvDType type);        // "bf16", "fp8", "float32"
std::string_view IndexDTypeName(IndexDType type);  // "bf16", "fp8", "mxfp4", "float32"

}  // namespace fathom
