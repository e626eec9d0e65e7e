// Scores on their way from the scan to the selection: all of them, and of every 16 rows the best.
#pragma once

#include "ops/indexer/cuda_query.cuh"

namespace fathom::ops::cuda {

constexpr int kGroupRows = 16;

// Sorts like the score, -0 as +0; NaN below every number.
__device__ inline uint32_t KeyOf(float score) {
  const uint32_t bits = __float_as_uint(score);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t key = (bits >> 31) != 0 ? 0x80000000u - magnitude : 0x80000000u + magnitude;
  return magnitude > 0x7f800000u ? 0 : key;
}

// The same but for NaN, which ranks as -inf.
__device__ inline uint32_t GroupKeyOf(float score) {
  const int32_t bits = __float_as_int(fmaxf(score, -INFINITY));
  const int32_t sign = bits >> 31;
  return 0x80000000u + static_cast<uint32_t>((bits & 0x7fffffff) ^ sign) -
         static_cast<uint32_t>(sign);
}

// The best of 16 rows from a multiple of 16 on. Every one of them below the visible rows is `mine`
// of some lane, which has its score; `first` is the place of the first one in p.scores. Warp.
__device__ inline void StoreGroup(const IndexerParams& p, uint32_t first, float score, bool mine,
                                  int lane) {
  const uint32_t best = __reduce_max_sync(0xffffffffu, mine ? GroupKeyOf(score) : 0);
  if (lane == 0 && mine) p.groups[first / kGroupRows] = best;
}

}  // namespace fathom::ops::cuda
