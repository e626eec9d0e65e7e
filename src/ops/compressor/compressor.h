// compressor: groups of m tokens pooled into one cache row (model.md 5.2-5.5).
//
// Three instances: main ratio 4 (e=512, overlapping), indexer ratio 4 (e=128, overlapping), main
// ratio 128 (e=512). c = wkv z and g = wgate z arrive as f32 projections WITHOUT ape; this op adds
// ape[t mod m] to g.
//
// Ratio 4: row j pools 8 members in this order: tokens 4j-4 .. 4j-1 with the first e channels of
//   c and g, then tokens 4j .. 4j+3 with the last e channels; one softmax per channel over the
//   members, maximum subtracted, sums in that order (oldest first). Row 0 has only its last four.
// Ratio 128: row j pools tokens 128j .. 128j+127 by an online softmax record per channel
//   (m, l, a) <- (max(m,g), l*exp(m-m') + exp(g-m'), a*exp(m-m') + c*exp(g-m')), oldest first.
// Both orders are fixed by position alone, so rows and state are bit-identical for every chunking.
//
// Then (5.4): bf16(E), RMSNorm with `norm` (-> bf16), RoPE on the last 64 channels at position m*j
// (-> bf16), for kFp4Index rows Hadamard (-> bf16), and the row is encoded into its page
// (RowFormat). round_kv: as in norm_rope_insert, main rows only.
//
// State per sequence (f32, in its slot):
//   ratio 4:   8 rows of [c (2e) | g with ape (2e)]; rows 0..3 previous group, row 4 + t mod 4 the
//              current one; when a group completes rows 4..7 move to 0..3.
//   ratio 128: [m (512) | l (512) | a (512)]; started afresh at t mod 128 == 0.
// Rows that end before StepView::emit_from are not written; the state advances all the same.
// Nothing of a stale slot is ever read: whether a member exists follows from the position.
#pragma once

#include "core/matrix.h"
#include "core/thread_pool.h"
#include "ops/norm_rope_insert/rope.h"
#include "ops/numerics.h"
#include "ops/paged_rows.h"
#include "ops/step_view.h"

namespace fathom::ops {

struct CompressorArgs {
  const StepView* step = nullptr;
  int ratio = 4;                // m: 4 or 128
  int channels = 512;           // e: 512 or 128
  MatrixView c;                 // [T, coff*e] f32, coff = 2 for ratio 4, else 1
  MatrixView g;                 // [T, coff*e] f32
  const float* ape = nullptr;   // [m, coff*e]
  const float* norm = nullptr;  // [e]
  const RopeFrequencies* rope = nullptr;
  float* state = nullptr;    // this layer's state in slot 0
  int64_t state_stride = 0;  // floats from a slot to the next
  PagedRows rows;            // out: row j of a sequence at block_table[j / N], j % N
  bool round_kv = true;
  Numerics numerics = Numerics::kProduct;
};

// Floats of state one sequence needs.
constexpr int64_t CompressorStateFloats(int ratio, int channels) {
  return ratio == 4 ? int64_t{8} * 4 * channels : int64_t{3} * channels;
}

void CompressorReference(const CompressorArgs& args);
void CompressorCpu(const CompressorArgs& args, ThreadPool& pool);

}  // namespace fathom::ops
