// norm_rope_insert on CUDA: the contracts of norm_rope_insert.h and rope.h, pointers on the device.
#pragma once

#include "ops/cuda/device.h"
#include "ops/norm_rope_insert/norm_rope_insert.h"
#include "ops/norm_rope_insert/rope.h"

namespace fathom::ops {

void NormRopeInsertCuda(const NormRopeInsertArgs& args, CudaStream stream);
void WindowCommitCuda(const WindowCommitArgs& args, CudaStream stream);
void RmsNormCuda(const RmsNormArgs& args, CudaStream stream);

// table [T, 64]: RopeTableRow at step.position of every token.
void RopeTablesCuda(const StepView& step, const RopeFrequencies& rope, float* table,
                    CudaStream stream);

}  // namespace fathom::ops
