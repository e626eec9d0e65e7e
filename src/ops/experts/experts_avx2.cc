#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about the undefined pass-through operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include "ops/experts/experts_kernels.h"
#include "ops/vec16.h"
//
#include "ops/experts/experts.inc"

namespace fathom::ops {

const ExpertsKernels kExpertsAvx2 = {Swiglu, AddRow};

}  // namespace fathom::ops
