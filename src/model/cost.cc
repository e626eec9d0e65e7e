#include "model/cost.h"

#include <algorithm>

#include "ops/numerics.h"

namespace fathom {

using ops::kHeadDim;
using ops::kIndexDim;
using ops::kStreams;

TokenCost CostOfToken(const ModelConfig& config, int64_t position, bool logits) {
  const auto d = static_cast<double>(config.hidden_size);
  const double heads = config.num_heads;
  const double q = static_cast<double>(config.q_lora_rank);
  const double grouped =
      static_cast<double>(config.o_groups) * static_cast<double>(config.o_lora_rank);
  const double expert = 3.0 * d * static_cast<double>(config.expert_width);
  // Every layer: query and key projections, output projections, gate, experts, two seams.
  const double common = d * q + q * heads * kHeadDim + d * kHeadDim +
                        static_cast<double>(config.o_lora_rank) * heads * kHeadDim + grouped * d +
                        d * config.num_experts + expert * (config.experts_per_token + 1) +
                        2.0 * 24 * kStreams * d;
  TokenCost cost;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    double macs = common;
    double rows = static_cast<double>(std::min<int64_t>(position + 1, ops::kWindow));
    if (config.kind(layer) == LayerKind::kCsa) {
      macs += 2 * d * 2 * kHeadDim + 2 * d * 2 * kIndexDim + q * config.index_heads * kIndexDim +
              d * config.index_heads;
      const int64_t visible = (position + 1) / 4;
      rows += static_cast<double>(std::min<int64_t>(visible, config.index_top_k));
      if (visible > config.index_top_k) {
        cost.indexer_flops += 2.0 * static_cast<double>(visible) * config.index_heads * kIndexDim;
      }
    } else if (config.kind(layer) == LayerKind::kHca) {
      macs += 2 * d * kHeadDim;
      rows += static_cast<double>((position + 1) / 128);
    }
    cost.linear_flops += 2 * macs;
    cost.attention_flops += 2.0 * 2 * rows * heads * kHeadDim;
  }
  if (logits) cost.head_flops = 2.0 * d * static_cast<double>(config.vocab_size);
  return cost;
}

}  // namespace fathom
