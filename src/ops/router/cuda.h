// router on CUDA: the contract of router.h, pointers on the device.
#pragma once

#include "ops/cuda/device.h"
#include "ops/linear/linear.h"
#include "ops/router/router.h"

namespace fathom::ops {

// What RouterCuda takes at most; model/cuda_weights.h refuses more.
inline constexpr int kRouterCudaExperts = 512;  // a warp holds their keys in registers
inline constexpr int kRouterCudaChosen = 32;    // top_k: a lane each

void RouterCuda(const RouterArgs& args, CudaStream stream);

// The gate product and the choice of experts in one launch: the same bits as LinearCuda and
// RouterCuda; the logits are not stored. Takes, in kProduct: up to 8 rows of bf16 with a multiple
// of 8 inputs, a gate of BF16 with up to 384 experts and unrounded logits; learned and hash layers.
bool GateAndRouteCudaTakes(const LinearArgs& gate, const RouterArgs& route);
void GateAndRouteCuda(const LinearArgs& gate, const RouterArgs& route, CudaStream stream);

}  // namespace fathom::ops
