// router on CUDA: the contract of router.h, pointers on the device. top_k <= 32: a lane each.
#pragma once

#include "ops/cuda/device.h"
#include "ops/router/router.h"

namespace fathom::ops {

void RouterCuda(const RouterArgs& args, CudaStream stream);

}  // namespace fathom::ops
