// indexer: which compressed rows each query token attends to (model.md 5.6; CSA layers only).
//
// q [T, Hi*128] as wq_b left it (bf16), in place: RoPE on channels 64..127 of each head (-> bf16),
//   then by the format of `keys`: kFp4Index Hadamard (-> bf16) and FP4 rounding; kFp8Index e4m3
//   rounding in one block of 128; kBf16 and kF32 nothing. kReference leaves out "-> bf16" alone.
// w [T, Hi]: w <- bf16(w * bf16(128^-0.5 * Hi^-0.5)) (kReference: unrounded).
// score(t, j) = sum_h w_h * relu(q_h . k_j), products and sums in f32, heads ascending.
// Row j is visible to token t iff j < floor((position + 1) / 4).
//
// The exact expression, the same in every backend of the CPU and independent of T, of the page
// size and of tiles (fma rounds once, all other operations once each):
//   kFp4Index   b_i = sum over channels 32i..32i+31 of q*k (exact in f32: the values of a block
//               are small integers times a power of two);  dot = ((b_0 + b_1) + b_2) + b_3
//   the others  dot = fma chain over channels 0..127 from 0
//   score = fma chain over heads of (w_h, dot > 0 ? dot : 0) from 0
// (Bit for bit as long as nothing leaves the normal range of f32; a NaN dot counts as 0.)
//
// selected [T, top_k] int32: the min(top_k, visible) best rows, ties to the lower row, written in
//   ASCENDING row order, padded with -1. counts [T]: how many. A NaN score (NaN weight) ranks below
//   every number, -0 equals +0. When visible <= top_k all rows are taken without scoring (unless
//   `scores` asks for them), and q and w of such a token keep their input values.
// Sums run in an order independent of T and of the page size, so a selection never depends on the
// chunk. Memory beyond the outputs is bounded by the tile, not by the context.
#pragma once

#include "core/matrix.h"
#include "core/thread_pool.h"
#include "ops/numerics.h"
#include "ops/paged_rows.h"
#include "ops/step_view.h"

namespace fathom::ops {

struct IndexerArgs {
  const StepView* step = nullptr;
  int heads = 0;  // Hi
  int top_k = 0;
  MatrixView q;                 // [T, Hi*128] in/out
  MatrixView w;                 // [T, Hi] in/out
  const float* rope = nullptr;  // [T, 64]
  PagedRows keys;               // index_k pages, channels 128
  int32_t* selected = nullptr;  // [T, top_k]
  int32_t* counts = nullptr;    // [T]
  // Optional, for dumps: [T, scores_stride] f32, visible rows only; null otherwise.
  float* scores = nullptr;
  int64_t scores_stride = 0;
  Numerics numerics = Numerics::kProduct;
};

void IndexerReference(const IndexerArgs& args);
void IndexerCpu(const IndexerArgs& args, ThreadPool& pool);

}  // namespace fathom::ops
