// The arithmetic of a seam: what a thread or a warp computes.
#pragma once

#include "ops/cuda/hopper.cuh"
#include "ops/hyper_connection/hyper_connection.h"

namespace fathom::ops::seam {

constexpr int S = kStreams;
constexpr unsigned kAll = 0xffffffffu;

// Two neighbouring channels as they lie in memory.
template <class T>
struct PairOf;
template <>
struct PairOf<float> {
  using Type = float2;
};
template <>
struct PairOf<__nv_bfloat16> {
  using Type = __nv_bfloat162;
};
template <class T>
using Pair = typename PairOf<T>::Type;

__device__ inline float2 Floats(float2 pair) {
  return pair;
}
__device__ inline float2 Floats(__nv_bfloat162 pair) {
  const uint32_t bits = *reinterpret_cast<const uint32_t*>(&pair);
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}
template <class T>
__device__ Pair<T>& PairAt(T* at) {
  return *reinterpret_cast<Pair<T>*>(at);
}
template <class T>
__device__ const Pair<T>& PairAt(const T* at) {
  return *reinterpret_cast<const Pair<T>*>(at);
}
template <class T>
__device__ Pair<T> Rounded(float x, float y, bool round) {
  if constexpr (sizeof(T) == 2) return __floats2bfloat162_rn(x, y);
  else return {cuda::RoundIf(x, round), cuda::RoundIf(y, round)};
}

// Four neighbouring channels.
__device__ inline float4 LoadFour(const float* at) {
  return *reinterpret_cast<const float4*>(at);
}
__device__ inline float4 LoadFour(const __nv_bfloat16* at) {
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(at);
  const float2 low = Floats(pairs[0]), high = Floats(pairs[1]);
  return {low.x, low.y, high.x, high.y};
}

// N neighbouring channels, 2 or 4.
template <int N, class T>
__device__ void Load(const T* at, float (&value)[N]) {
  if constexpr (N == 4) {
    const float4 v = LoadFour(at);
    value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
  } else {
    const float2 v = Floats(PairAt(at));
    value[0] = v.x, value[1] = v.y;
  }
}

__device__ inline void Add(float4& sum, float4 x) {
  sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
}

__device__ inline float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float Sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + expf(-x));
}

// The streams of a channel after the site before: out[k] = post[k] o + sum over j of comb[j][k]
// in[j].
__device__ inline void Update(const float (&post)[S], const float (&comb)[S * S],
                              const float (&in)[S], float o, float (&out)[S]) {
#pragma unroll
  for (int k = 0; k < S; ++k) {
    out[k] = __fmul_rn(post[k], o);
#pragma unroll
    for (int j = 0; j < S; ++j) out[k] = __fmaf_rn(comb[j * S + k], in[j], out[k]);
  }
}

// Sums over the eight lanes that differ in the lowest three bits; lane l gets those of
// value[l % 8 * N / 8] and those behind it, at the front.
template <int kBit = 4, int kHalf = 0, int N>
__device__ void SumOverEight(float (&value)[N]) {
  static_assert(N % 8 == 0);
  constexpr int kOthers = kHalf == 0 ? N / 2 : kHalf;
  const bool upper = (threadIdx.x & kBit) != 0;
#pragma unroll
  for (int i = 0; i < kOthers; ++i) {
    const float mine = upper ? value[i + kOthers] : value[i];
    const float other = upper ? value[i] : value[i + kOthers];
    value[i] = mine + __shfl_xor_sync(kAll, other, kBit);
  }
  if constexpr (kBit > 1) SumOverEight<kBit / 2, kOthers / 2>(value);
}

// Lane 8 + 4*j + k has the logit of comb[j][k]; every lane gets the matrix (model.md 6.3). It is
// kept as comb[j][k] = in[j][k] / (R[j] C[k]), so that an iteration is R[j] = sum over k of
// in[j][k] / C[k], and the same for C. eps matters at the first C only: later each sum of the
// matrix before it is divided lies between 1/4 and 4, and all that is left of eps is the last 1 /
// (1 + eps). A thread does all of it: exchanges between lanes would take longer. It gets 1 / R
// without a division, times the product of all R; q, one over that product an iteration ago, keeps
// it in range.
__device__ inline void Sinkhorn(float logit, int iterations, float eps, float (&comb)[S * S]) {
  float top = fmaxf(logit, __shfl_xor_sync(kAll, logit, 1));
  top = fmaxf(top, __shfl_xor_sync(kAll, top, 2));
  const float power = expf(logit - top);
  float sum = power + __shfl_xor_sync(kAll, power, 1);
  sum += __shfl_xor_sync(kAll, sum, 2);
  const float share = __fdividef(power, sum) + eps;
  float in[S][S];
#pragma unroll
  for (int i = 0; i < S * S; ++i) in[i / S][i % S] = __shfl_sync(kAll, share, 2 * S + i);
  float by_row[S] = {1, 1, 1, 1}, by_column[S];  // p / R, 1 / C
  float q = 1, p = 1, last = 1;                  // last / p is what by_row still lacks
#pragma unroll
  for (int k = 0; k < S; ++k) {
    by_column[k] = Reciprocal((in[0][k] + in[1][k]) + (in[2][k] + in[3][k]) + eps);
  }
#pragma unroll 1
  for (int round = 1; round < iterations; ++round) {
    float rows[S], columns[S];  // R, p C
#pragma unroll
    for (int k = 0; k < S; ++k) {
#pragma unroll
      for (int j = 0; j < S; ++j) {
        rows[j] = k == 0 ? in[j][k] * by_column[k] : __fmaf_rn(in[j][k], by_column[k], rows[j]);
      }
    }
    const float low = rows[0] * rows[1], high = rows[2] * rows[3], product = low * high;
    const float q_low = low * q, q_high = high * q;
    by_row[0] = rows[1] * q_high, by_row[1] = rows[0] * q_high;
    by_row[2] = rows[3] * q_low, by_row[3] = rows[2] * q_low;
    p = product * q, q = Reciprocal(product);
#pragma unroll
    for (int j = 0; j < S; ++j) {
#pragma unroll
      for (int k = 0; k < S; ++k) {
        columns[k] = j == 0 ? in[j][k] * by_row[j] : __fmaf_rn(in[j][k], by_row[j], columns[k]);
      }
    }
    const float of_low = Reciprocal(columns[0] * columns[1]);
    const float of_high = Reciprocal(columns[2] * columns[3]);
    by_column[0] = columns[1] * p * of_low, by_column[1] = columns[0] * p * of_low;
    by_column[2] = columns[3] * p * of_high, by_column[3] = columns[2] * p * of_high;
    last = 1.0f - eps;
  }
  last *= Reciprocal(p);
#pragma unroll
  for (int i = 0; i < S * S; ++i) {
    comb[i] = in[i / S][i % S] * (by_row[i / S] * last) * by_column[i % S];
  }
}

// After the second, the blocks of the cluster have started and see each other's barriers, which a
// fence of their initialisation went before.
__device__ inline void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace fathom::ops::seam
