// router on CUDA: the contract of router.h, pointers on the device. top_k <= 32: a lane each.
#pragma once

#include "ops/cuda/candidates.h"
#include "ops/cuda/device.h"
#include "ops/linear/linear.h"
#include "ops/router/router.h"

namespace fathom::ops {

// held: keys in registers rather than in shared memory, of up to 512 experts; the same bits.
void RouterCuda(const RouterArgs& args, CudaStream stream, bool held = kCudaCandidates);

// How GateAndRouteCuda works; all ways give the same bits.
struct GateWay {
  bool rehearse = true;  // runs the kernel's end once in vain while the kernel in front is at work
  // Units of 128 inputs that a segment of the sum may keep in shared memory. As many as fit need a
  // multiprocessor of their own; two leave room for a block of the kernel in front.
  int stages = 8;
};

// The gate product and the choice of experts in one launch: the same bits as LinearCuda and
// RouterCuda; the logits are not stored. Takes, in kProduct: up to 8 rows of bf16 with a multiple
// of 8 inputs, a gate of BF16 with up to 384 experts and unrounded logits; learned and hash layers.
bool GateAndRouteCudaTakes(const LinearArgs& gate, const RouterArgs& route);
void GateAndRouteCuda(const LinearArgs& gate, const RouterArgs& route, CudaStream stream,
                      const GateWay& way = {});

}  // namespace fathom::ops
