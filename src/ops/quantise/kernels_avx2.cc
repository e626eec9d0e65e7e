#include "ops/quantise/kernels.h"
#include "ops/vec16.h"
// clang-format off
#include "ops/quantise/kernels.inc"
// clang-format on

namespace fathom::ops {

const QuantiseKernels kQuantiseAvx2 = {EncodeFp8Main, EncodeBf16};

}  // namespace fathom::ops
