#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/status.h"
#include "ops/norm_rope_insert/norm_rope_insert.h"
#include "ops/norm_rope_insert/rope.h"
#include "ops/quantise/quantise.h"

namespace fathom::ops {
namespace {

float Round(float x, Numerics numerics) {
  return numerics == Numerics::kProduct ? RoundBf16(x) : x;
}

float InverseRms(const float* x, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  return 1.0f / std::sqrt(static_cast<float>(sum / static_cast<double>(n)) + kNormEps);
}

}  // namespace

void RmsNormReference(const RmsNormArgs& args) {
  for (int64_t t = 0; t < args.x.rows; ++t) {
    const float* x = args.x.f32_row(t);
    float* y = args.y.f32_row(t);
    const float r = InverseRms(x, args.x.cols);
    for (int64_t i = 0; i < args.x.cols; ++i) {
      y[i] = Round(args.weight[i] * (x[i] * r), args.numerics);
    }
  }
}

void NormRopeInsertReference(const NormRopeInsertArgs& args) {
  FATHOM_CHECK(args.step_rows.rows_per_page >= args.kv.rows);
  for (int64_t t = 0; t < args.kv.rows; ++t) {
    const float* rope = args.rope + t * kRopeDim;
    for (int h = 0; h < args.heads; ++h) {
      float* q = args.q.f32_row(t) + int64_t{h} * kHeadDim;
      const float r = InverseRms(q, kHeadDim);
      for (int i = 0; i < kHeadDim; ++i) q[i] = Round(q[i] * r, args.numerics);
      RotateRow(q + kNopeDim, rope, false);
      for (int i = kNopeDim; i < kHeadDim; ++i) q[i] = Round(q[i], args.numerics);
    }
    float row[kHeadDim];
    const float* kv = args.kv.f32_row(t);
    const float r = InverseRms(kv, kHeadDim);
    for (int i = 0; i < kHeadDim; ++i) row[i] = Round(args.kv_norm[i] * (kv[i] * r), args.numerics);
    RotateRow(row + kNopeDim, rope, false);
    for (int i = kNopeDim; i < kHeadDim; ++i) row[i] = Round(row[i], args.numerics);
    const PagedRows& out = args.step_rows;
    if (args.round_kv && out.format == RowFormat::kBf16) RoundKvRow(row);
    EncodeRow(out.format, kHeadDim, row, out.data(0, static_cast<int32_t>(t)),
              out.scale(0, static_cast<int32_t>(t)));
  }
}

void WindowCommitReference(const WindowCommitArgs& args) {
  const StepView& step = *args.step;
  const PagedRows& from = args.step_rows;
  const PagedRows& ring = args.ring;
  const int64_t data_bytes = RowDataBytes(from.format, from.channels);
  const int64_t scale_bytes = RowScaleBytes(from.format);
  for (int32_t s = 0; s < step.num_sequences; ++s) {
    const int32_t end = step.query_start[s + 1];
    for (int32_t t = std::max(step.query_start[s], end - kWindow); t < end; ++t) {
      const int32_t row = step.position[t] % ring.rows_per_page;
      std::memcpy(ring.data(step.slot[s], row), from.data(0, t), data_bytes);
      if (scale_bytes > 0)
        std::memcpy(ring.scale(step.slot[s], row), from.scale(0, t), scale_bytes);
    }
  }
}

}  // namespace fathom::ops
