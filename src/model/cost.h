// What the mathematics of one token costs, for bounds: operations and bytes of weights.
#pragma once

#include <cstdint>

#include "model/config.h"

namespace fathom {

struct TokenCost {
  double linear_flops = 0;     // matrices, hyper-connections and head excluded below
  double attention_flops = 0;  // scores and sums over window, selected and c128 rows
  double indexer_flops = 0;    // scan over the c4 rows
  double head_flops = 0;       // vocabulary product, where logits are wanted
  double total() const { return linear_flops + attention_flops + indexer_flops + head_flops; }
};

// Of the token at `position` (two operations per multiply-add). The indexer scans only where it has
// to choose, that is past 4 * index_top_k tokens.
TokenCost CostOfToken(const ModelConfig& config, int64_t position, bool logits);

}  // namespace fathom
