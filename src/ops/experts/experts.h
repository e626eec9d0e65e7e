// experts: the routed experts a token chose plus the shared expert (model.md 7.2).
//
// For each chosen expert: g = w1 z, u = w3 z (linear, -> bf16); u clamped to +-limit, g clamped
// from above; a = silu(g) * u * routing weight in f32 (-> bf16); y_e = w2 a (linear, -> bf16).
// The shared expert is the same with weight 1. y = bf16(sum over routed experts in ascending id,
// f32, + shared last).
// Rows are independent: y[t] is bit-identical for every batch around it.
#pragma once

#include <cstdint>
#include <vector>

#include "core/matrix.h"
#include "core/thread_pool.h"
#include "ops/linear/linear.h"
#include "ops/numerics.h"

namespace fathom::ops {

struct ExpertWeights {
  LinearWeight w1;  // gate [I, D]
  LinearWeight w2;  // down [D, I]
  LinearWeight w3;  // up   [I, D]
};

struct ExpertsArgs {
  MatrixView z;                            // [T, D]
  const ExpertWeights* experts = nullptr;  // [E]
  int num_experts = 0;
  const ExpertWeights* shared = nullptr;
  const int32_t* chosen = nullptr;  // [T, k] ascending ids (router)
  const float* weights = nullptr;   // [T, k]
  int top_k = 0;
  float limit = 10.0f;         // swiglu_limit
  float shared_limit = 10.0f;  // infinity reproduces the April reference code
  MatrixView y;                // [T, D]; must not alias z
  Numerics numerics = Numerics::kProduct;
};

void ExpertsReference(const ExpertsArgs& args);
void ExpertsCpu(const ExpertsArgs& args, ThreadPool& pool);

}  // namespace fathom::ops
