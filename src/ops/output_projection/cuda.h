// output_projection on CUDA (output_projection.h).
//
// The rotation is a pass of its own over the 64 rotating channels of a head (an eighth of o): every
// block of the product reads all of a group's channels, and would rotate them anew.
#pragma once

#include "ops/linear/cuda.h"
#include "ops/output_projection/output_projection.h"

namespace fathom::ops {

// Bytes of scratch for `rows` rows: none, unless o has to be copied for the tensor cores (kProduct
// with f32 rows, rows that are not 16-byte aligned, or more than 32 of them).
int64_t OutputProjectionCudaScratchBytes(const OutputProjectionArgs& args, int64_t rows);

// wo_a is packed by PackLinearCuda; FP4 only in kReference. Sums are those of linear/cuda.h.
void OutputProjectionCuda(const OutputProjectionArgs& args, void* scratch, CudaStream stream,
                          CudaWay way = CudaWay::kFaster);

}  // namespace fathom::ops
