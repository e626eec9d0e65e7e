// router on CUDA: the contract of router.h, pointers on the device. top_k <= 32: a lane each.
#pragma once

#include "ops/cuda/device.h"
#include "ops/linear/linear.h"
#include "ops/router/router.h"

namespace fathom::ops {

void RouterCuda(const RouterArgs& args, CudaStream stream);

// The gate product and the choice of experts in one launch: the same bits as LinearCuda and
// RouterCuda; the logits are not stored. Takes: few rows of a gate of BF16, learned layers.
bool GateAndRouteCudaTakes(const LinearArgs& gate, const RouterArgs& route);
void GateAndRouteCuda(const LinearArgs& gate, const RouterArgs& route, CudaStream stream);

}  // namespace fathom::ops
