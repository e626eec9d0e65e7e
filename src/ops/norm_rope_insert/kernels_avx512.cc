#include "ops/norm_rope_insert/kernels.h"
#include "ops/vec16.h"
// clang-format off
#include "ops/norm_rope_insert/kernels.inc"
// clang-format on

namespace fathom::ops {

const NormKernels kNormAvx512 = {RmsNorm, QueryHead, KeyRow};

}  // namespace fathom::ops
