// What the kernels that choose experts share: scores, keys, and a warp's choice for a token.
#pragma once

#include <cfloat>

#include "ops/cuda/hopper.cuh"

namespace fathom::ops::router {

inline constexpr unsigned kAll = 0xffffffffu;

// sqrt(softplus(x)); floored so that a token all of whose chosen experts vanish still divides by
// something. Double is cheap here and leaves the choice to the logits alone.
__device__ inline double Score(float x) {
  const double v = x;
  return fmax(sqrt(v > 20 ? v : log1p(exp(v))), static_cast<double>(FLT_MIN));
}

// Greater for greater values; 0 for what is never chosen, NaN and -infinity.
__device__ inline unsigned Key(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // no negative zero
  if (!(x > -INFINITY)) return 0;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The experts of the greatest keys, ties to the lower id: the one this lane holds, of lanes below
// top_k, else -1. key[j] is that of expert 32 j + lane, 0 beyond `experts`: in registers, where a
// round takes a few maxima and two reductions.
template <int kSlots>
__device__ int Choose(unsigned (&key)[kSlots], int experts, int top_k) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int mine = -1;
#pragma unroll 1
  for (int round = 0; round < top_k; ++round) {
    unsigned best = key[0];
#pragma unroll
    for (int j = 1; j < kSlots; ++j) best = max(best, key[j]);
    const unsigned most = __reduce_max_sync(kAll, best);
    int at = experts;
#pragma unroll
    for (int j = kSlots - 1; j >= 0; --j) {
      if (key[j] == best) at = 32 * j + lane;
    }
    at = __reduce_min_sync(kAll, best == most && best != 0 ? at : experts);
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (32 * j + lane == at) key[j] = 0;
    }
    if (at == experts) at = round;  // only NaN is left: any expert, but one that exists
    if (lane == round) mine = at;
  }
  return mine;
}

// What is written of a token, by a warp whose lanes below top_k have an expert each and its score,
// the others a score of 0.
__device__ inline void WriteRoute(int mine, double score, int top_k, float scale, int32_t* chosen,
                                  float* weights) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // Rank by id: the order in which experts are written (and summed).
  int rank = 0;
  for (int i = 0; i < top_k; ++i) {
    const int other = __shfl_sync(kAll, mine, i);
    rank += other < mine || (other == mine && i < lane);
  }
  double sum = score;
  // Up to eight experts leave out sums with 0, which are exact.
  for (int offset = top_k <= 8 ? 4 : 16; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(kAll, sum, offset);
  if (lane < top_k) {
    chosen[rank] = mine;
    weights[rank] = static_cast<float>(score / sum * scale);
  }
}

}  // namespace fathom::ops::router
