#include "cache/what_if.h"

#include <algorithm>
#include <set>

namespace fathom {
namespace {

constexpr int64_t kContexts[] = {8'192, 32'768, 131'072, 1'048'576};
constexpr int kBatches[] = {1, 8, 32, 128};
constexpr int kBlockSizes[] = {128, 256, 512, 1'024};
constexpr int kGpus[] = {1, 2, 4, 8, 16, 32, 64};

struct Formats {
  KvDType kv;
  IndexDType index;
};
constexpr Formats kFormats[] = {{KvDType::kBf16, IndexDType::kBf16},
                                {KvDType::kFp8, IndexDType::kFp8},
                                {KvDType::kFp8, IndexDType::kMxfp4}};

std::vector<int64_t> Contexts(const ModelConfig& config) {
  std::vector<int64_t> out;
  for (const int64_t context : kContexts) {
    if (context <= config.max_position_embeddings) out.push_back(context);
  }
  if (out.empty()) out.push_back(config.max_position_embeddings);
  return out;
}

Status AddContexts(const ModelConfig& config, WhatIf* out) {
  for (const int64_t context : Contexts(config)) {
    for (const Formats& formats : kFormats) {
      CacheOptions cache = out->request.cache;
      cache.kv = formats.kv;
      cache.index = formats.index;
      FATHOM_ASSIGN(const Geometry geometry, MakeGeometry(config, cache));
      out->contexts.push_back({context, cache, PlanSequence(geometry, context).total()});
    }
  }
  return {};
}

Status AddBatches(const ModelConfig& config, const WeightBudget& weights, WhatIf* out) {
  for (const int64_t context : Contexts(config)) {
    for (const int batch : kBatches) {
      PlanRequest request = out->request;
      request.context = context;
      request.sequences = request.slots = batch;
      request.step_tokens = std::max(request.step_tokens, batch);
      FATHOM_ASSIGN(const MemoryPlan plan, PlanMemory(config, request, weights));
      out->batches.push_back(
          {context, batch, plan.least, plan.least.bytes(plan.geometry), plan.fits()});
    }
  }
  return {};
}

Expected<BlockSizeLine> BlockSize(const ModelConfig& config, const CacheOptions& cache) {
  FATHOM_ASSIGN(const Geometry geometry, MakeGeometry(config, cache));
  BlockSizeLine line{.cache = cache};
  std::set<int64_t> sizes;
  for (const KindGeometry& kind : geometry.kinds) {
    if (!kind.block_kind || kind.layers.empty()) continue;
    sizes.insert(kind.page_bytes);
    line.padding_bytes += static_cast<int64_t>(kind.layers.size()) * kind.padding_bytes;
  }
  line.csa_page = geometry.of(CacheKind::kCsaKv).page_bytes;
  line.index_page = geometry.of(CacheKind::kIndexK).page_bytes;
  line.hca_page = geometry.of(CacheKind::kHcaKv).page_bytes;
  line.page_sizes = static_cast<int>(sizes.size());
  line.block_bytes = geometry.block_bytes;
  line.hit_granularity = cache.block_tokens;
  line.tail_waste = cache.block_tokens - 1;
  return line;
}

Status AddBlockSizes(const ModelConfig& config, WhatIf* out) {
  for (const int tokens : kBlockSizes) {
    for (const KvDType kv : {KvDType::kBf16, KvDType::kFp8}) {
      for (const IndexDType index : {IndexDType::kBf16, IndexDType::kFp8, IndexDType::kMxfp4}) {
        FATHOM_ASSIGN(BlockSizeLine line,
                      BlockSize(config, {.kv = kv, .index = index, .block_tokens = tokens}));
        out->block_sizes.push_back(line);
      }
    }
  }
  return {};
}

Status AddGpus(const ModelConfig& config, const WeightBudget& weights, WhatIf* out) {
  for (const int gpus : kGpus) {
    if (gpus > config.num_experts) break;
    PlanRequest request = out->request;
    request.on_gpu = true;
    request.gpus = gpus;
    FATHOM_ASSIGN(const MemoryPlan plan, PlanMemory(config, request, weights));
    GpuLine line{.gpus = gpus,
                 .weight_bytes = plan.weight_bytes,
                 .workspace_bytes = plan.workspaces.bytes(),
                 .shortfall = plan.shortfall};
    if (plan.limited() && plan.fits()) {
      line.pool_bytes = plan.pool_bytes();
      line.sequences = gpus * SequencesIn(plan.geometry, plan.pools, plan.request.context);
    }
    out->gpus.push_back(line);
  }
  return {};
}

}  // namespace

double BlockSizeLine::padding_percent() const {
  return block_bytes == 0
             ? 0
             : 100.0 * static_cast<double>(padding_bytes) / static_cast<double>(block_bytes);
}

Expected<WhatIf> MakeWhatIf(const ModelConfig& config, const PlanRequest& request) {
  WhatIf out;
  out.request = request;
  if (request.context == 0) out.request.context = config.max_position_embeddings;
  const WeightBudget weights = BudgetWeights(config);
  FATHOM_TRY(AddContexts(config, &out));
  FATHOM_TRY(AddBatches(config, weights, &out));
  FATHOM_TRY(AddBlockSizes(config, &out));
  FATHOM_TRY(AddGpus(config, weights, &out));
  return out;
}

std::string_view KvDTypeName(KvDType type) {
  switch (type) {
    case KvDType::kF32: return "float32";
    case KvDType::kBf16: return "bf16";
    case KvDType::kFp8: return "fp8";
  }
  return "?";
}

std::string_view IndexDTypeName(IndexDType type) {
  switch (type) {
    case IndexDType::kF32: return "float32";
    case IndexDType::kBf16: return "bf16";
    case IndexDType::kFp8: return "fp8";
    case IndexDType::kMxfp4: return "mxfp4";
  }
  return "?";
}

}  // namespace fathom
