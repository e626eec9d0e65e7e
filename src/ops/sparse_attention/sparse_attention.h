// sparse_attention: one softmax over the 128-token window, the compressed rows and a sink
// (model.md 4.4). K and V are the same 512-vector, shared by all heads.
//
// q [T, H*512]. Entries of token t at position p, in this order:
//   1. window: positions max(0, p-127) .. p, oldest first. A position of this step is row
//      (token index) of step_rows, an older one row (position mod ring rows) of the slot's ring.
//   2. compressed rows: `selected`/`counts` (CSA, ascending), or with selected == null the rows
//      0 .. floor((p+1)/128)-1 (HCA), or none (compressed.base == null).
// score = (q . k) * 512^-0.5, f32. M = max over entries (the sink is not in it).
// p_j = exp(score_j - M), Z = sum_j p_j + exp(sink_h - M).
// out = (sum_j p_j v_j) / Z (-> bf16). kProduct rounds p_j to bf16 for the sum with v, not for Z.
// Entries may be split into segments of kAttentionSegment, counted from the first compressed row
// (the window is a segment of its own), with a local maximum each, and merged in order. This split
// is fixed by the entry list alone: out is bit-identical for every chunk and batch shape.
#pragma once

#include "core/matrix.h"
#include "core/thread_pool.h"
#include "ops/numerics.h"
#include "ops/paged_rows.h"
#include "ops/step_view.h"

namespace fathom::ops {

inline constexpr int kAttentionSegment = 512;

struct SparseAttentionArgs {
  const StepView* step = nullptr;
  int heads = 0;  // H
  MatrixView q;   // [T, H*512]
  PagedRows step_rows;
  PagedRows ring;
  PagedRows compressed;               // base == null: window only (ratio 0)
  const int32_t* selected = nullptr;  // [T, top_k] or null
  const int32_t* counts = nullptr;    // [T]
  int top_k = 0;
  const float* sink = nullptr;  // [H]
  MatrixView out;               // [T, H*512]; may alias q
  Numerics numerics = Numerics::kProduct;
};

void SparseAttentionReference(const SparseAttentionArgs& args);
void SparseAttentionCpu(const SparseAttentionArgs& args, ThreadPool& pool);

}  // namespace fathom::ops
