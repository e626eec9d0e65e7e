// norm_rope_insert: query norm + query RoPE + key norm + key RoPE + cache encoding (model.md 4.2,
// steps 3-6), and the insertion of the step's keys into the window rings.
//
// q [T, H*512], in place: per head q <- q * rsqrt(mean(q^2) + 1e-6), statistic in f32 (-> bf16),
//   then RoPE on channels 448..511 at the token's position (-> bf16).
// kv [T, 512] (read only): RMSNorm with kv_norm (-> bf16), RoPE on 448..511 (-> bf16), then encoded
//   into step_rows, page row t (format of the window cache; kFp8Main rounds channels 0..447).
//   With `round_kv` the fp8 rounding of channels 0..447 is applied before storing in kBf16 too
//   (REF2: kBf16 and kFp8Main hold the same values).
// step_rows is a one-page buffer of at least T rows: attention reads the step's own keys there and
// older ones from the ring, so a chunk longer than the window loses nothing.
//
// WindowCommit copies, for every sequence, the last min(tokens, 128) rows of step_rows into the
// ring of its slot (row = position mod ring rows). Call it after attention has read the ring.
//
// Where every sequence has one token, a backend may do both at once (Backend::InsertCommits): the
// row at p replaces that of p - ring rows, and attention reads p-127 .. p-1 of a ring of 128 rows
// or more, p itself from step_rows.
#pragma once

#include "core/matrix.h"
#include "core/thread_pool.h"
#include "ops/numerics.h"
#include "ops/paged_rows.h"
#include "ops/step_view.h"

namespace fathom::ops {

struct NormRopeInsertArgs {
  MatrixView q;                    // [T, H*512] in/out
  MatrixView kv;                   // [T, 512]
  const float* kv_norm = nullptr;  // [512]
  const float* rope = nullptr;     // [T, 64] cos/sin rows of rope.h at each token's position
  PagedRows step_rows;             // out, rows_per_page >= T, block 0
  int heads = 0;                   // H
  bool round_kv = true;
  Numerics numerics = Numerics::kProduct;
  // Of a backend that commits too, else null. A token at position -1 is padding: not committed.
  const StepView* step = nullptr;
  PagedRows ring;  // as WindowCommit's
};

void NormRopeInsertReference(const NormRopeInsertArgs& args);
void NormRopeInsertCpu(const NormRopeInsertArgs& args, ThreadPool& pool);

struct WindowCommitArgs {
  const StepView* step = nullptr;
  PagedRows step_rows;
  PagedRows ring;  // block = slot; rows_per_page = ring rows >= 128
};

void WindowCommitReference(const WindowCommitArgs& args);
void WindowCommitCpu(const WindowCommitArgs& args, ThreadPool& pool);

// y [T, n] = RMSNorm(x) (model.md 2): v = mean(x^2), y = bf16(w * (x * rsqrt(v + 1e-6))).
struct RmsNormArgs {
  MatrixView x;
  const float* weight = nullptr;  // [n]
  MatrixView y;                   // may alias x
  Numerics numerics = Numerics::kProduct;
};

void RmsNormReference(const RmsNormArgs& args);
void RmsNormCpu(const RmsNormArgs& args, ThreadPool& pool);

}  // namespace fathom::ops
