#include "cache/weight_budget.h"

#include <string>

#include "core/status.h"
#include "model/tensor_names.h"

namespace fathom {
namespace {

bool Holds(const std::string& name, std::string_view part) {
  return name.find(part) != std::string::npos;
}

WeightKind KindOf(const std::string& name) {
  if (name.starts_with("mtp.")) return WeightKind::kDrafters;
  if (name.starts_with("embed.")) return WeightKind::kEmbedding;
  if (name.starts_with("head.")) return WeightKind::kHead;
  if (Holds(name, ".ffn.experts.")) return WeightKind::kExperts;
  if (Holds(name, ".ffn.shared_experts.")) return WeightKind::kSharedExperts;
  if (Holds(name, ".ffn.gate.")) return WeightKind::kRouters;
  if (Holds(name, ".attn.indexer.")) return WeightKind::kIndexers;
  if (Holds(name, ".attn.compressor.")) return WeightKind::kCompressors;
  if (Holds(name, ".attn.")) return WeightKind::kAttention;
  return WeightKind::kOther;
}

}  // namespace

std::string_view WeightKindName(WeightKind kind) {
  switch (kind) {
    case WeightKind::kExperts: return "routed experts";
    case WeightKind::kSharedExperts: return "shared experts";
    case WeightKind::kAttention: return "attention";
    case WeightKind::kCompressors: return "compressors";
    case WeightKind::kIndexers: return "indexers";
    case WeightKind::kRouters: return "routers";
    case WeightKind::kEmbedding: return "embedding";
    case WeightKind::kHead: return "head";
    case WeightKind::kDrafters: return "drafters (mtp)";
    case WeightKind::kOther: return "norms, streams";
  }
  return "unknown";
}

std::string_view WeightKindKey(WeightKind kind) {
  switch (kind) {
    case WeightKind::kExperts: return "experts";
    case WeightKind::kSharedExperts: return "shared_experts";
    case WeightKind::kAttention: return "attention";
    case WeightKind::kCompressors: return "compressors";
    case WeightKind::kIndexers: return "indexers";
    case WeightKind::kRouters: return "routers";
    case WeightKind::kEmbedding: return "embedding";
    case WeightKind::kHead: return "head";
    case WeightKind::kDrafters: return "drafters";
    case WeightKind::kOther: return "other";
  }
  return "unknown";
}

int64_t WeightBudget::per_gpu(WeightKind kind, int gpus) const {
  FATHOM_CHECK(gpus >= 1 && gpus <= num_experts);
  if (kind == WeightKind::kDrafters) return 0;
  const Kind& whole = of(kind);
  // All routed experts are of one size.
  const int64_t one = whole.expert_bytes / num_experts;
  return whole.bytes - whole.expert_bytes + one * ((num_experts + gpus - 1) / gpus);
}

int64_t WeightBudget::per_gpu(int gpus) const {
  int64_t sum = 0;
  for (int kind = 0; kind < kWeightKinds; ++kind) {
    sum += per_gpu(static_cast<WeightKind>(kind), gpus);
  }
  return sum;
}

WeightBudget BudgetWeights(const ModelConfig& config) {
  return BudgetWeights(config, DrafterStages(config));
}

WeightBudget BudgetLoaded(const ModelConfig& config, int64_t tensors, int64_t bytes) {
  int stages = DrafterStages(config);
  WeightBudget budget = BudgetWeights(config, stages);
  while (stages > 0 && budget.bytes > bytes) budget = BudgetWeights(config, --stages);
  budget.kinds[static_cast<size_t>(WeightKind::kAttention)].bytes += bytes - budget.bytes;
  budget.bytes = bytes;
  budget.tensors = tensors;
  return budget;
}

WeightBudget BudgetWeights(const ModelConfig& config, int drafter_stages) {
  WeightBudget budget;
  budget.num_experts = config.num_experts;
  budget.experts_fp8 = config.expert_format == ExpertFormat::kFp8;
  budget.format_assumed = config.expert_format == ExpertFormat::kUnknown;
  for (const ExpectedTensor& tensor : ExpectedTensors(config, drafter_stages)) {
    WeightBudget::Kind& kind = budget.kinds[static_cast<size_t>(KindOf(tensor.name))];
    const int64_t bytes = tensor.bytes();
    ++kind.tensors;
    kind.bytes += bytes;
    if (Holds(tensor.name, ".ffn.experts.")) kind.expert_bytes += bytes;
    ++budget.tensors;
    budget.bytes += bytes;
  }
  return budget;
}

}  // namespace fathom
