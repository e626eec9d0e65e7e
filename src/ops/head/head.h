// head: embedding at the bottom, collapse and vocabulary product at the top (model.md 2).
//
// Embed: X[t] = four copies of embed[token] (bf16 table [V, D]).
// Head: for each listed token row: collapse of its streams with the head site (hyper_connection),
//   RMSNorm, logits = head.weight * normed in f32, not rounded.
#pragma once

#include "core/matrix.h"
#include "core/thread_pool.h"
#include "ops/hyper_connection/hyper_connection.h"
#include "ops/linear/linear.h"
#include "ops/numerics.h"

namespace fathom::ops {

struct EmbedArgs {
  const bf16_t* table = nullptr;   // [V, D]
  const int32_t* token = nullptr;  // [T], each below V
  MatrixView x;                    // [T, 4*D] out
};

void EmbedReference(const EmbedArgs& args);
void EmbedCpu(const EmbedArgs& args, ThreadPool& pool);

struct HeadArgs {
  MatrixView x;                   // [T, 4*D]
  const int32_t* rows = nullptr;  // [R] token indices whose logits are wanted
  int num_rows = 0;
  const HyperConnectionSite* site = nullptr;  // mixes = 4
  const float* norm = nullptr;                // [D]
  const LinearWeight* weight = nullptr;       // [V, D]
  MatrixView gathered;                        // [R, 4*D] scratch
  MatrixView u;                               // [R, D] scratch
  MatrixView z;                               // [R, D] scratch
  MatrixView logits;                          // [R, V] out
  float eps = 1e-6f;                          // hc_eps
  Numerics numerics = Numerics::kProduct;
};

void HeadReference(const HeadArgs& args);
void HeadCpu(const HeadArgs& args, ThreadPool& pool);

}  // namespace fathom::ops
