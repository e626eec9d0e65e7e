#include "cli/plan_json.h"

#include <cmath>

namespace fathom {
namespace {

using Json = nlohmann::ordered_json;

// Whole numbers without a fraction: 9848, but 5511.4375.
Json Number(double value) {
  if (value == std::floor(value)) return static_cast<int64_t>(value);
  return value;
}

Json PoolsJson(const Geometry& geometry, const PoolSizes& pools) {
  return {{"blocks", pools.blocks},
          {"slots", pools.slots},
          {"bundles", pools.bundles},
          {"bytes", pools.bytes(geometry)}};
}

Json WeightsJson(const MemoryPlan& plan) {
  const WeightBudget& weights = plan.weights;
  Json kinds = Json::object();
  for (int i = 0; i < kWeightKinds; ++i) {
    const auto kind = static_cast<WeightKind>(i);
    kinds[std::string(WeightKindKey(kind))] = {
        {"tensors", weights.of(kind).tensors},
        {"bytes", weights.of(kind).bytes},
        {"gpu_bytes", weights.per_gpu(kind, plan.request.gpus)}};
  }
  return {{"tensors", weights.tensors},
          {"bytes", weights.bytes},
          {"gpu_bytes", plan.weight_bytes},
          {"expert_dtype", weights.experts_fp8 ? "fp8" : "fp4"},
          {"expert_dtype_assumed", weights.format_assumed},
          {"kinds", std::move(kinds)}};
}

Json FitJson(const ModelConfig& config, const MemoryPlan& plan) {
  const PoolSizes pools = plan.fits() ? plan.pools : PoolSizes{};
  Json fit = {{"fits", plan.fits()},
              {"shortfall_bytes", plan.shortfall},
              {"cache_bytes", plan.cache_memory},
              {"blocks", pools.blocks},
              {"slots", pools.slots},
              {"bundles", pools.bundles},
              {"sequences", SequencesIn(plan.geometry, pools, plan.request.context)}};
  Json lengths = Json::array();
  for (const Concurrency& line : plan.concurrency) {
    lengths.push_back({{"tokens", line.tokens}, {"sequences", line.in_pools}, {"most", line.most}});
  }
  fit["lengths"] = std::move(lengths);
  if (plan.fits()) return fit;
  const PlanRemedies remedies = Remedies(config, plan);
  Json changes = Json::array();
  for (const PlanAdvice& advice : remedies.changes) {
    changes.push_back({{"flag", advice.flag}, {"value", advice.value}});
  }
  fit["would_fit"] = {{"changes", std::move(changes)}, {"together", remedies.together}};
  return fit;
}

}  // namespace

Json PlanJson(const std::string& name, const ModelConfig& config, const MemoryPlan& plan,
              std::span<const Comparison> comparisons) {
  const PlanRequest& request = plan.request;
  const Geometry& geometry = plan.geometry;
  const SequenceBytes& one = plan.sequence;
  Json json = {{"model", name},
               {"context", request.context},
               {"batch", request.sequences},
               {"max_num_seqs", request.slots},
               {"max_num_batched_tokens", request.step_tokens},
               {"device", request.on_gpu ? "cuda" : "cpu"},
               {"gpus", request.gpus},
               {"kv_cache_dtype", KvDTypeName(request.cache.kv)},
               {"indexer_kv_dtype", IndexDTypeName(request.cache.index)}};
  json["kv"] = {{"bytes_per_token", Number(one.bytes_per_token)},
                {"context_bytes", one.rows},
                {"window_bytes", one.window},
                {"total_bytes", one.total()}};
  json["slot"] = {{"bytes", one.slot_bytes}};
  json["bundle"] = {{"bytes", plan.bundle_bytes}, {"unit_bytes", plan.bundle_unit}};
  int64_t padding = 0;
  Json pages = Json::object(), rows = Json::object();
  for (const KindGeometry& kind : geometry.kinds) {
    const std::string key(CacheKindName(kind.kind));
    pages[key] = kind.page_bytes;
    rows[key] = kind.row_bytes;
    if (kind.block_kind) padding += static_cast<int64_t>(kind.layers.size()) * kind.padding_bytes;
  }
  json["block"] = {{"tokens", geometry.options.block_tokens},
                   {"bytes", geometry.block_bytes},
                   {"padding_bytes", padding}};
  json["page_bytes"] = std::move(pages);
  json["row_bytes"] = std::move(rows);
  json["rows"] = {{"csa", one.csa_rows}, {"hca", one.hca_rows}};
  json["weights"] = WeightsJson(plan);
  const Workspaces& work = plan.workspaces;
  json["workspaces"] = {{"activations", work.activations},
                        {"logits", work.logits},
                        {"step_arrays", work.step_arrays},
                        {"kernel_scratch", work.kernel_scratch},
                        {"indexer_scratch", work.indexer_scratch},
                        {"graphs", work.graphs},
                        {"bytes", work.bytes()}};
  json["pools"] = PoolsJson(geometry, plan.pools);
  json["total_bytes"] = plan.total_bytes();
  if (!comparisons.empty()) json["compare"] = Json::object();
  for (const Comparison& c : comparisons) {
    json["compare"][c.name] = {{"layers", c.layers},
                               {"bytes_per_token", c.bytes_per_token},
                               {"bytes", c.bytes},
                               {"ratio", c.ratio},
                               {"ratio_rows", c.ratio_rows}};
  }
  if (plan.limited()) json["fit"] = FitJson(config, plan);
  return json;
}

Json WhatIfJson(const WhatIf& what_if) {
  Json contexts = Json::array(), batches = Json::array(), blocks = Json::array(),
       gpus = Json::array();
  const auto formats = [](const CacheOptions& cache) -> Json {
    return {{"kv_cache_dtype", KvDTypeName(cache.kv)},
            {"indexer_kv_dtype", IndexDTypeName(cache.index)}};
  };
  for (const ContextLine& line : what_if.contexts) {
    Json item = formats(line.cache);
    item["context"] = line.context;
    item["bytes"] = line.bytes;
    contexts.push_back(std::move(item));
  }
  const bool limited = what_if.request.memory >= 0 || what_if.request.cache_memory >= 0;
  for (const BatchLine& line : what_if.batches) {
    Json item = {{"context", line.context},       {"batch", line.batch},
                 {"blocks", line.pools.blocks},   {"slots", line.pools.slots},
                 {"bundles", line.pools.bundles}, {"bytes", line.bytes}};
    if (limited) item["fits"] = line.fits;
    batches.push_back(std::move(item));
  }
  for (const BlockSizeLine& line : what_if.block_sizes) {
    Json item = formats(line.cache);
    item["block_tokens"] = line.cache.block_tokens;
    item["page_bytes"] = {
        {"csa_kv", line.csa_page}, {"index_k", line.index_page}, {"hca_kv", line.hca_page}};
    item["block_bytes"] = line.block_bytes;
    item["padding_bytes"] = line.padding_bytes;
    item["padding_percent"] = line.padding_percent();
    item["hit_granularity"] = line.hit_granularity;
    item["tail_waste"] = line.tail_waste;
    blocks.push_back(std::move(item));
  }
  for (const GpuLine& line : what_if.gpus) {
    Json item = {{"gpus", line.gpus},
                 {"weight_bytes", line.weight_bytes},
                 {"workspace_bytes", line.workspace_bytes}};
    if (limited) {
      item["cache_bytes"] = line.pool_bytes;
      item["sequences"] = line.sequences;
      item["shortfall_bytes"] = line.shortfall;
    }
    gpus.push_back(std::move(item));
  }
  return {{"contexts", std::move(contexts)},
          {"batches", std::move(batches)},
          {"block_sizes", std::move(blocks)},
          {"gpus", std::move(gpus)}};
}

}  // namespace fathom
