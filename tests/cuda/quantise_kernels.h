// Kernels around the row functions of ops/quantise/cuda.cuh, for their test.
#pragma once

#include <cstddef>

#include "ops/cuda/device.h"
#include "ops/paged_rows.h"

namespace fathom::ops {

enum class RowRounding { kNone, kKv, kHadamard, kHadamardUnrounded, kFp4, kFp8Block };

// One warp a row: x [rows, channels] is rounded and encoded into block 0 of `out`; decoded
// [rows, channels] is read back from there, by rows and by single channels.
void RoundEncodeDecode(RowRounding rounding, const PagedRows& out, int rows, const float* x,
                       float* decoded, float* decoded_channels, CudaStream stream);

}  // namespace fathom::ops
