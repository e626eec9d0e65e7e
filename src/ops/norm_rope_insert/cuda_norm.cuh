// RmsNorm of a row by a block, with one order of the sum, so that every kernel that has a row to
// normalise gives it the same bits.
#pragma once

#include "ops/cuda/common.cuh"
#include "ops/numerics.h"

namespace fathom::ops::cuda {

inline constexpr int kNormThreads = 256;  // of the block

using NormSums = float[kNormThreads / 32];

// y = the norm of load(i), i < n. A thread writes only elements that it has read before: y may be
// what load reads. sums: shared memory that nothing else uses until the block's next barrier.
template <class T, class Load>
__device__ void NormRow(Load&& load, const float* weight, T* y, int n, bool round, NormSums& sums) {
  constexpr int kHeld = 8;  // values of a thread that are read once, all at the same time
  const auto thread = static_cast<int>(threadIdx.x);
  float held[kHeld], factor[kHeld];
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = thread + j * kNormThreads;
    held[j] = i < n ? load(i) : 0.0f;
    factor[j] = i < n ? weight[i] : 0.0f;
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) sum += held[j] * held[j];
  for (int i = thread + kHeld * kNormThreads; i < n; i += kNormThreads) {
    const float v = load(i);
    sum += v * v;
  }
  sum = WarpSum(sum);
  if (thread % 32 == 0) sums[thread / 32] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kNormThreads / 32; ++w) total += sums[w];
  const float r = 1.0f / sqrtf(total / static_cast<float>(n) + kNormEps);
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = thread + j * kNormThreads;
    if (i < n) y[i] = FromFloat<T>(RoundIf(factor[j] * (held[j] * r), round));
  }
  for (int i = thread + kHeld * kNormThreads; i < n; i += kNormThreads) {
    y[i] = FromFloat<T>(RoundIf(weight[i] * (load(i) * r), round));
  }
}

}  // namespace fathom::ops::cuda
