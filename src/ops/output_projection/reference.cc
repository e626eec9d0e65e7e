#include "ops/norm_rope_insert/rope.h"
#include "ops/output_projection/output_projection.h"

namespace fathom::ops {

void OutputProjectionReference(const OutputProjectionArgs& args) {
  const bool product = args.numerics == Numerics::kProduct;
  const int64_t depth = int64_t{kHeadDim} * args.heads / args.groups;
  const int64_t rank = args.wo_a->out / args.groups;
  for (int64_t t = 0; t < args.o.rows; ++t) {
    float* o = args.o.f32_row(t);
    for (int h = 0; h < args.heads; ++h) {
      float* rope = o + h * kHeadDim + kNopeDim;
      RotateRow(rope, args.rope + t * kRopeDim, /*inverse=*/true);
      if (!product) continue;
      for (int i = 0; i < kRopeDim; ++i) rope[i] = RoundBf16(rope[i]);
    }
    for (int64_t row = 0; row < args.wo_a->out; ++row) {
      const float* x = o + row / rank * depth;
      double sum = 0;
      for (int64_t i = 0; i < depth; ++i) sum += double{WeightAt(*args.wo_a, row, i)} * x[i];
      const float y = static_cast<float>(sum);
      args.y.f32_row(t)[row] = product ? RoundBf16(y) : y;
    }
  }
}

}  // namespace fathom::ops
