// router: which experts a token uses and with what weight (model.md 7.1).
//
// logits [T, E] f32 (gate product). s_e = sqrt(softplus(logits_e)); softplus is x above 20, else
// log1p(exp(x)), and does not underflow for very negative x.
// Learned (bias given): the k experts with the largest s_e + bias_e, ties to the lower id.
// Hash (tid2eid given): experts = tid2eid[token], table order, no bias.
// w_e = s_e / sum(s of the chosen), times `scale`. Experts are written in ASCENDING id for learned
// layers (the order experts are summed in), table order for hash layers is sorted likewise.
#pragma once

#include <cstdint>

#include "core/matrix.h"
#include "core/thread_pool.h"

namespace fathom::ops {

struct RouterArgs {
  MatrixView logits;                 // [T, E]
  const float* bias = nullptr;       // [E], learned layers
  const int64_t* tid2eid = nullptr;  // [V, k], hash layers
  const int32_t* token = nullptr;    // [T], hash layers; ids below V
  int top_k = 0;
  float scale = 1.0f;          // routed_scaling_factor
  int32_t* experts = nullptr;  // [T, k] out
  float* weights = nullptr;    // [T, k] out
};

void RouterReference(const RouterArgs& args);
void RouterCpu(const RouterArgs& args, ThreadPool& pool);

}  // namespace fathom::ops
