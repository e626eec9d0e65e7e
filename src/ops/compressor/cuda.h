// compressor on CUDA. The pointers of the arguments are device pointers, except `step` and `rope`,
// which are read by the host when it launches.
#pragma once

#include "ops/compressor/compressor.h"
#include "ops/cuda/device.h"

namespace fathom::ops {

void CompressorCuda(const CompressorArgs& args, CudaStream stream);

}  // namespace fathom::ops
