// What every implementation of sampling.h shares.
#pragma once

#include <span>

#include "ops/sampling/sampling.h"

namespace fathom::ops {

// What a row's weights depend on, apart from its logits.
struct WeightRule {
  float inverse;  // 1 / temperature, finite
  int32_t floor;  // of min_p
};

WeightRule MakeWeightRule(const SamplingParams& params);

// The lowest id below `vocabulary` that is not banned, or 0: the token of a row without any logit
// above -inf.
TokenId LowestFree(std::span<const TokenId> banned, int64_t vocabulary);

// One row of a batch, whose logits are changed in place.
SampledToken SampleRow(const SamplingRow& row, std::span<float> logits);

}  // namespace fathom::ops
