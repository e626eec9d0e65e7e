// hyper_connection on CUDA: the contract of hyper_connection.h, pointers on the device; `site` is a
// host struct of device pointers. D is a multiple of 4, at most kSeamCudaChannels. fn, norm, post
// and comb begin at multiples of 16 bytes, rows of the matrices at multiples of two elements. eps
// lies between kSeamCudaLeastEps and kSeamCudaMostEps: Sinkhorn leaves out terms beyond.
#pragma once

#include "ops/cuda/device.h"
#include "ops/hyper_connection/hyper_connection.h"

namespace fathom::ops {

inline constexpr int64_t kSeamCudaChannels = 8'192;
inline constexpr float kSeamCudaLeastEps = 1e-12f, kSeamCudaMostEps = 1e-3f;

void HyperConnectionCuda(const HyperConnectionArgs& args, CudaStream stream);

}  // namespace fathom::ops
