// hyper_connection: one seam between two sites of manifold-constrained hyper-connections
// (model.md 3 and 6), in up to three parts, each optional:
//
//   post  (o given):    X[k] <- bf16(post[k] * o + sum_j comb[j,k] * X[j]), f32 inside; the sum
//                       runs over the FIRST index of comb, j ascending.
//   pre   (site given): mixes of X -> pre, post, comb (Sinkhorn, 20 iterations, f32);
//                       u = bf16(sum_j pre_j X[j]).
//   norm  (norm given): z = RMSNorm(u) (-> bf16).
// X [T, 4*D], stream-major within a row. post [T,4] and comb [T,16] are read by `post` and then
// overwritten by `pre`. The head's collapse is `pre` with a head site (no post/comb, no Sinkhorn).
#pragma once

#include "core/matrix.h"
#include "core/thread_pool.h"
#include "ops/numerics.h"

namespace fathom::ops {

// Parameters of one site. mixes = 24 (pre 4, post 4, comb 16) or 4 (head: pre only).
struct HyperConnectionSite {
  const float* fn = nullptr;     // [mixes, 4*D]
  const float* base = nullptr;   // [mixes]
  const float* scale = nullptr;  // [3] (head: [1])
  int mixes = 24;
};

struct HyperConnectionArgs {
  MatrixView x;    // [T, 4*D] in/out
  MatrixView o{};  // [T, D] or empty
  const HyperConnectionSite* site = nullptr;
  float* post = nullptr;        // [T, 4]
  float* comb = nullptr;        // [T, 16], comb[4*j + k]
  MatrixView u{};               // [T, D] scratch/out: the collapsed vector before the norm
  const float* norm = nullptr;  // [D]
  MatrixView z{};               // [T, D] out; may alias o
  int sinkhorn_iterations = 20;
  float eps = 1e-6f;  // hc_eps
  Numerics numerics = Numerics::kProduct;
};

void HyperConnectionReference(const HyperConnectionArgs& args);
void HyperConnectionCpu(const HyperConnectionArgs& args, ThreadPool& pool);

}  // namespace fathom::ops
