// A product in f32 FMA, without tensor cores: kReference, and weights stored as F32. The oracle's
// kernel: one order for every number of rows, speed comes second.
#pragma once

#include "ops/linear/cuda_expand.cuh"

namespace fathom::ops::cuda {

inline constexpr int kFloatOutputs = 64;
inline constexpr int kFloatRows = 32;
inline constexpr int kFloatInputs = 32;
inline constexpr int kFloatThreads = 256;

struct FloatShared {
  float w[kFloatInputs][kFloatOutputs + 1];
  float x[kFloatInputs][kFloatRows + 1];
};

// Outputs out0 .. out0 + 63 (those below out_end) of up to kFloatRows rows, by kFloatThreads.
// value(r, k) is the activation of tile row r < rows at input k < w.in; store(r, output, value).
// total = sum over pieces of 32 inputs, ascending, of the piece's FMA chain from zero.
template <class Value, class Store>
__device__ void FloatProduct(const CudaWeightView& w, int out0, int out_end, int rows,
                             FloatShared& shared, Value&& value, Store&& store) {
  const int lane_out = threadIdx.x % 16;  // outputs lane_out + 16 j
  const int lane_row = threadIdx.x / 16;  // rows lane_row + 16 i
  float total[2][4] = {};
  for (int k0 = 0; k0 < w.in; k0 += kFloatInputs) {
    for (int i = threadIdx.x; i < kFloatInputs * kFloatOutputs; i += kFloatThreads) {
      const int k = i % kFloatInputs;
      const int o = i / kFloatInputs;
      shared.w[k][o] =
          out0 + o < out_end && k0 + k < w.in ? WeightValue(w, out0 + o, k0 + k) : 0.0f;
    }
    for (int i = threadIdx.x; i < kFloatInputs * kFloatRows; i += kFloatThreads) {
      const int k = i % kFloatInputs;
      const int r = i / kFloatInputs;
      shared.x[k][r] = r < rows && k0 + k < w.in ? value(r, k0 + k) : 0.0f;
    }
    __syncthreads();
    float piece[2][4] = {};
#pragma unroll 8
    for (int k = 0; k < kFloatInputs; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = shared.x[k][lane_row + 16 * i];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          piece[i][j] = fmaf(x, shared.w[k][lane_out + 16 * j], piece[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) total[i][j] += piece[i][j];
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = lane_row + 16 * i;
      const int o = out0 + lane_out + 16 * j;
      if (r < rows && o < out_end) store(r, o, total[i][j]);
    }
  }
}

}  // namespace fathom::ops::cuda
