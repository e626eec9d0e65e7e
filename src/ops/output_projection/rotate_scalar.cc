#include "core/dtype.h"
#include "ops/norm_rope_insert/rope.h"
#include "ops/numerics.h"
#include "ops/output_projection/rotate_kernels.h"

namespace fathom::ops {

void InverseRotateHeadsScalar(float* o, int heads, const float* table, bool round) {
  for (int h = 0; h < heads; ++h) {
    float* x = o + h * kHeadDim + kNopeDim;
    RotateRow(x, table, /*inverse=*/true);
    if (!round) continue;
    for (int i = 0; i < kRopeDim; ++i) x[i] = RoundBf16(x[i]);
  }
}

}  // namespace fathom::ops
