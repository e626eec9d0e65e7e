// The statistic of RmsNorm (norm_rope_insert.h) by a block of kRmsThreads, in an order of its own:
// whoever normalises a row in this order gets the bits of RmsNormCuda.
#pragma once

#include "ops/cuda/common.cuh"

namespace fathom::ops::cuda {

inline constexpr int kRmsThreads = 256;
inline constexpr int kRmsWarps = kRmsThreads / 32;

// Sums of squares of kRows rows of n inputs, `stride` apart, those beyond `last` row `last` again:
// in every lane those of the inputs that the thread's warp has.
template <int kRows, class T>
__device__ inline void RmsPartials(const T* x, int64_t stride, int last, int n,
                                   float (&sum)[kRows]) {
#pragma unroll
  for (int t = 0; t < kRows; ++t) sum[t] = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < n; i += kRmsThreads) {
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      const float v = ToFloat(x[(kRows == 1 ? 0 : min(t, last)) * stride + i]);
      sum[t] += v * v;
    }
  }
#pragma unroll
  for (int t = 0; t < kRows; ++t) sum[t] = WarpSum(sum[t]);
}

// 1 / rms of n inputs from the sums of the warps.
__device__ inline float RmsInverse(const float* partial, int n) {
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kRmsWarps; ++w) total += partial[w];
  return 1.0f / sqrtf(total / static_cast<float>(n) + kNormEps);
}

}  // namespace fathom::ops::cuda
