// output_projection on CUDA (output_projection.h).
//
// The rotation is a pass of its own over the 64 rotating channels of a head (an eighth of o): every
// block of the product reads all of a group's channels, and would rotate them anew.
#pragma once

#include "ops/linear/cuda.h"
#include "ops/output_projection/output_projection.h"

namespace fathom::ops {

// wo_a is packed by PackLinearCuda, FP8, BF16 or (kReference only) any format. In kProduct o is
// bf16, its rows 16-byte aligned (base and stride). Sums are those of linear/cuda.h.
void OutputProjectionCuda(const OutputProjectionArgs& args, CudaStream stream);

}  // namespace fathom::ops
