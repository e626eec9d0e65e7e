#include "cache/planner.h"

#include <algorithm>

#include "cache/window_kinds.h"
#include "model/forward.h"
#include "ops/indexer/cuda.h"
#include "ops/indexer/scan.h"
#include "ops/sparse_attention/cuda.h"

namespace fathom {
namespace {

constexpr int64_t kMostSlots = 65'536;
constexpr int64_t kTableLengths[] = {8'192, 131'072, 1'048'576};

// Row stores and softmax states of one CPU thread, beside the indexer.
constexpr int64_t kThreadScratch = int64_t{4} << 20;
// Tokens that share the CPU indexer's expanded rows, at most.
constexpr int kIndexerGroup = 32;

Status CheckRange(const char* flag, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return {};
  return FailParam(Code::kInvalidArgument, flag, "{} {} is not within {} .. {}", flag, value, low,
                   high);
}

Status Check(const ModelConfig& config, const PlanRequest& request) {
  FATHOM_TRY(CheckRange("--context", request.context, 1, config.max_position_embeddings));
  FATHOM_TRY(CheckRange("--max-num-seqs", request.slots, 1, kMostSlots));
  FATHOM_TRY(CheckRange("--max-num-batched-tokens", request.step_tokens, 1, 1 << 20));
  FATHOM_TRY(CheckRange("--gpus", request.gpus, 1, config.num_experts));
  if (request.sequences < 1 || request.sequences > request.slots) {
    return FailParam(Code::kInvalidArgument, "--batch",
                     "--batch {} is not within 1 .. {} (--max-num-seqs)", request.sequences,
                     request.slots);
  }
  if (request.step_tokens < request.slots) {
    return FailParam(Code::kInvalidArgument, "--max-num-batched-tokens",
                     "--max-num-batched-tokens {} is less than --max-num-seqs {}: a step must hold "
                     "one token of every running sequence",
                     request.step_tokens, request.slots);
  }
  return {};
}

// Of one thread.
int64_t IndexerThreadScratch(const ModelConfig& config, const Geometry& geometry) {
  ops::IndexerArgs args;
  args.heads = config.index_heads;
  args.top_k = config.index_top_k;
  args.keys.format = geometry.of(CacheKind::kIndexK).format;
  return ops::IndexerScan(args, ops::kIndexerScalar, kIndexerGroup).scratch_bytes();
}

// The most sequences of so many tokens that run at once with the best --max-num-seqs, whose
// workspaces grow with it.
int64_t MostOf(const ModelConfig& config, const MemoryPlan& plan, int64_t tokens) {
  PlanRequest request = plan.request;
  request.context = tokens;
  const auto fits = [&](int64_t n) {
    request.slots = request.sequences = static_cast<int>(n);
    request.step_tokens = std::max(plan.request.step_tokens, request.slots);
    const PoolDemand demand{tokens, n, n, request.bundles};
    const int64_t cache = LeastPools(plan.geometry, demand).bytes(plan.geometry);
    if (request.cache_memory >= 0 && cache > request.cache_memory) return false;
    return request.memory < 0 ||
           plan.weight_bytes + PlanWorkspaces(config, plan.geometry, request).bytes() + cache <=
               request.memory;
  };
  PoolDemand many = plan.demand();
  many.context = tokens;
  const int64_t cache = request.memory < 0 ? plan.cache_memory : request.memory - plan.weight_bytes;
  int64_t low = 0, high = std::min<int64_t>(MostSequences(plan.geometry, many, cache), kMostSlots);
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (fits(middle)) low = middle;
    else high = middle - 1;
  }
  return low;
}

}  // namespace

int64_t SequenceBytes::reserved() const {
  return block_bytes + slot_bytes;
}

PoolDemand MemoryPlan::demand() const {
  return {request.context, request.sequences, request.slots, request.bundles};
}

int PlannedLogitRows(int slots) {
  return std::max(64, slots);
}

Workspaces PlanWorkspaces(const ModelConfig& config, const Geometry& geometry,
                          const PlanRequest& request) {
  const bool bf16 = request.on_gpu && request.numerics == ops::Numerics::kProduct;
  const int64_t rows = PlannedLogitRows(request.slots);
  const int64_t tokens = request.step_tokens;
  Workspaces out;
  out.activations = Forward::WorkspaceBytes(config,
                                            {.numerics = request.numerics,
                                             .max_tokens = request.step_tokens,
                                             .max_logit_rows = static_cast<int>(rows)},
                                            bf16 ? DType::kBF16 : DType::kF32);
  out.logits = rows * config.vocab_size * int64_t{sizeof(float)};
  // token, position and sequence [T]; query_start [S + 1], slot and emit_from [S],
  // block_table [S, blocks], logit rows (step_view.h). Tables are as long as the model's context,
  // whatever --context says.
  const int64_t table = geometry.blocks_for(geometry.max_positions);
  out.step_arrays =
      (3 * tokens + (3 + table) * request.slots + 1 + rows) * int64_t{sizeof(int32_t)};

  // Inputs as a product's kernel wants them: of the widest matrix, or of all experts' slots.
  const int64_t width = bf16 ? 2 : 4;
  const int64_t slots = config.experts_per_token + 1;
  const int64_t widest =
      std::max(config.num_heads * int64_t{ops::kHeadDim}, ops::kStreams * config.hidden_size);
  const int64_t experts =
      2 * config.hidden_size + slots * (3 * config.expert_width + config.hidden_size);
  const int64_t prepared = width * tokens * std::max(widest, experts) + (int64_t{1} << 20);
  const bool csa = !geometry.of(CacheKind::kIndexK).layers.empty();
  if (request.on_gpu) {
    // Kernels follow each other on one stream and share it; those of small steps run on three, of
    // which one is the indexer's (ops::Backend::Branch).
    const int64_t branch = std::min<int64_t>(tokens, kGpuBranchTokens);
    const int64_t large = csa ? ops::IndexerCudaScratchBytes(tokens) : 0;
    const int64_t beside = csa ? ops::IndexerCudaScratchBytes(branch) : 0;
    out.indexer_scratch = large + beside;
    out.kernel_scratch = std::max({ops::kSparseAttentionCudaScratchBytes, prepared, large}) +
                         beside + width * branch * config.hidden_size;
    out.graphs =
        GraphBytes(config.num_layers, std::min(request.graph_sequences, request.slots), table);
  } else {
    out.indexer_scratch = csa ? request.threads * IndexerThreadScratch(config, geometry) : 0;
    out.kernel_scratch = prepared + request.threads * kThreadScratch + out.indexer_scratch;
  }
  return out;
}

SequenceBytes PlanSequence(const Geometry& geometry, int64_t tokens) {
  SequenceBytes out;
  for (const KindGeometry& kind : geometry.kinds) {
    if (!kind.block_kind) continue;
    const int64_t row = static_cast<int64_t>(kind.layers.size()) * kind.row_bytes;
    out.bytes_per_token += static_cast<double>(row) / kind.tokens_per_row;
  }
  out.csa_rows = tokens / geometry.of(CacheKind::kCsaKv).tokens_per_row;
  out.hca_rows = tokens / geometry.of(CacheKind::kHcaKv).tokens_per_row;
  out.rows = geometry.row_bytes(tokens);
  out.window = geometry.window_bytes();
  out.blocks = geometry.blocks_for(tokens);
  out.block_bytes = out.blocks * geometry.block_bytes;
  out.slot_bytes = geometry.slot_bytes;
  return out;
}

Expected<MemoryPlan> PlanMemory(const ModelConfig& config, const PlanRequest& request) {
  return PlanMemory(config, request, BudgetWeights(config));
}

Expected<MemoryPlan> PlanMemory(const ModelConfig& config, const PlanRequest& request,
                                const WeightBudget& weights) {
  MemoryPlan plan;
  plan.request = request;
  if (request.context == 0) plan.request.context = config.max_position_embeddings;
  FATHOM_TRY(Check(config, plan.request));
  FATHOM_ASSIGN(plan.geometry, MakeGeometry(config, request.cache));
  const Geometry& geometry = plan.geometry;
  plan.weights = weights;
  plan.weight_bytes = weights.per_gpu(request.gpus);
  plan.workspaces = PlanWorkspaces(config, geometry, plan.request);
  plan.sequence = PlanSequence(geometry, plan.request.context);
  plan.bundle_bytes = WindowKinds(geometry).aligned_bundle_bytes();
  plan.bundle_unit = BundleUnitBytes(geometry);

  const PoolDemand demand = plan.demand();
  plan.least = LeastPools(geometry, demand);
  const int64_t least = plan.least.bytes(geometry);
  const int64_t fixed = plan.weight_bytes + plan.workspaces.bytes();
  if (request.cache_memory >= 0) plan.cache_memory = request.cache_memory;
  else if (request.memory >= 0) plan.cache_memory = std::max<int64_t>(0, request.memory - fixed);
  if (plan.cache_memory < 0) {
    plan.pools = DefaultPools(geometry, demand);
  } else {
    plan.shortfall = std::max<int64_t>(0, least - plan.cache_memory);
    if (request.memory >= 0) {
      // Given both, the cache must fit, and the device must hold all of it.
      const int64_t cache = std::max<int64_t>(least, request.cache_memory);
      plan.shortfall = std::max(plan.shortfall, fixed + cache - request.memory);
    }
    plan.pools = plan.fits() ? PoolsWithin(geometry, demand, plan.cache_memory) : plan.least;
  }

  std::vector<int64_t> lengths(std::begin(kTableLengths), std::end(kTableLengths));
  lengths.push_back(plan.request.context);
  std::sort(lengths.begin(), lengths.end());
  lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  for (const int64_t tokens : lengths) {
    if (tokens > config.max_position_embeddings) continue;
    Concurrency line{.tokens = tokens};
    if (plan.fits()) line.in_pools = SequencesIn(geometry, plan.pools, tokens);
    if (plan.cache_memory >= 0) line.most = MostOf(config, plan, tokens);
    plan.concurrency.push_back(line);
  }
  return plan;
}

}  // namespace fathom
