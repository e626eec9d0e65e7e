// head on CUDA: the contract of head.h, pointers on the device (`rows` too); `site` is a host
// struct of device pointers.
#pragma once

#include "ops/cuda/device.h"
#include "ops/head/head.h"

namespace fathom::ops {

void EmbedCuda(const EmbedArgs& args, CudaStream stream);

// The head up to args.z [R, D]: rows gathered, streams collapsed, normed. The vocabulary product is
// a linear of its own.
void HeadCollapseCuda(const HeadArgs& args, CudaStream stream);

}  // namespace fathom::ops
