// What the weights of a model take, by kind, from config.json alone: the shapes and dtypes of
// model/tensor_names.h, summed (model.md 9.4 has the totals of the released checkpoints).
//
//   const WeightBudget weights = BudgetWeights(config);
//   weights.bytes;          // 159,609,485,896 for the Flash preview
//   weights.per_gpu(4);     // the fullest of 4 devices
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "model/config.h"

namespace fathom {

enum class WeightKind : uint8_t {
  kExperts,        // routed experts
  kSharedExperts,  // one a layer, of every token
  kAttention,      // projections, norms, sinks
  kCompressors,    // of CSA and HCA rows
  kIndexers,       // with their own compressors
  kRouters,        // gates, biases, hash tables
  kEmbedding,
  kHead,
  kDrafters,  // mtp.*, their experts included; checked at load, not run and not loaded yet
  kOther,     // norms, hyper-connections
};
inline constexpr int kWeightKinds = 10;
std::string_view WeightKindName(WeightKind kind);  // "routed experts", ...
std::string_view WeightKindKey(WeightKind kind);   // of JSON: "experts", "shared_experts", ...

struct WeightBudget {
  struct Kind {
    int64_t tensors = 0;
    int64_t bytes = 0;         // as stored, what metadata.total_size counts
    int64_t expert_bytes = 0;  // those of routed experts among them
  };
  std::array<Kind, kWeightKinds> kinds;
  int64_t tensors = 0;
  int64_t bytes = 0;
  int num_experts = 0;
  bool experts_fp8 = false;
  bool format_assumed = false;  // config.json left the experts' format open: FP4 counted

  const Kind& of(WeightKind kind) const { return kinds[static_cast<size_t>(kind)]; }
  // Bytes on the fullest of `gpus` devices: attention is replicated (TP 1), routed experts are
  // divided whole (EP `gpus`), ceil(E / gpus) on the fullest. Drafters stay in the checkpoint: 0.
  // 1 <= gpus <= num_experts.
  int64_t per_gpu(WeightKind kind, int gpus) const;
  int64_t per_gpu(int gpus) const;
};

// With as many drafter stages as the config promises, or with that many.
WeightBudget BudgetWeights(const ModelConfig& config);
WeightBudget BudgetWeights(const ModelConfig& config, int drafter_stages);

// Of a checkpoint that was opened and has so many tensors and bytes: it may have fewer drafters
// than promised (model.md 8.3), and output projections in BF16 (model.md 9.3).
WeightBudget BudgetLoaded(const ModelConfig& config, int64_t tensors, int64_t bytes);

}  // namespace fathom
