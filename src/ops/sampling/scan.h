// The passes over a whole row of logits that sampling and log-probabilities are made of, compiled
// once per instruction set from scan_loops.inc. All of them give the same bits on every set.
#pragma once

#include <cstdint>

namespace fathom::ops {

inline constexpr int kScanChunk = 64;  // logits whose maximum and weight are kept together
inline constexpr int32_t kUnitWeight = 1 << 30;  // weight of the most likely token

// Sorts like the logit: larger logit, larger key. NaN counts as -inf, -0 equals +0.
static inline int32_t LogitKey(float logit) {
  const int32_t bits = __builtin_bit_cast(int32_t, logit);
  const int32_t magnitude = bits & 0x7fffffff;
  const int32_t key = bits < 0 ? -magnitude : magnitude;
  return magnitude > 0x7f800000 ? -0x7f800000 : key;
}

inline constexpr int32_t kMinusInfinityKey = -0x7f800000;
inline constexpr int32_t kPlusInfinityKey = 0x7f800000;

struct ScanKernels {
  // chunk_max[c] = largest key of logits [64c, 64c + 64).
  void (*chunk_max)(const float* logits, int64_t n, int32_t* chunk_max);
  // weights[i] = round(2^30 exp((logits[i] - max) * inverse)), 0 when below `floor`; chunk_sum[c]
  // their sums over 64. `max` is the largest logit, finite.
  void (*weights)(const float* logits, int64_t n, float max, float inverse, int32_t floor,
                  int32_t* weights, uint64_t* chunk_sum);
  // Sum of exp(logits[i] - max) in double, in a fixed order. `max` finite.
  double (*exp_sum)(const float* logits, int64_t n, float max);
};

const ScanKernels& ScalarScan();
const ScanKernels& Avx2Scan();
const ScanKernels& Avx512Scan();

// By CpuIsa().
const ScanKernels& CpuScan();

}  // namespace fathom::ops
