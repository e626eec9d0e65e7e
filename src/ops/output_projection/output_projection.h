// output_projection: inverse RoPE of the attention output and the grouped wo_a product
// (model.md 4.2, steps 9-10).
//
// o [T, H*512], in place: channels 448..511 of every head rotated by -position (-> bf16).
// Group g owns heads g*(H/G) .. (g+1)*(H/G)-1, flattened head-major to K = 512*H/G inputs:
// y[:, g*R .. (g+1)*R) = wo_a[rows g*R .. (g+1)*R) times that vector (-> bf16), R = o_lora_rank.
// wo_a [G*R, K] is stored FP8 and used as bf16 values (w = bf16(e4m3 * scale)); the activation is
// NOT quantised.
#pragma once

#include "core/matrix.h"
#include "core/thread_pool.h"
#include "ops/linear/linear.h"
#include "ops/numerics.h"

namespace fathom::ops {

struct OutputProjectionArgs {
  MatrixView o;                 // [T, H*512] in/out
  const float* rope = nullptr;  // [T, 64]
  int heads = 0;
  int groups = 0;
  const LinearWeight* wo_a = nullptr;  // [G*R, 512*H/G]; packed by PackLinearCpu
  MatrixView y;                        // [T, G*R]
  Numerics numerics = Numerics::kProduct;
};

void OutputProjectionReference(const OutputProjectionArgs& args);
void OutputProjectionCpu(const OutputProjectionArgs& args, ThreadPool& pool);

}  // namespace fathom::ops
