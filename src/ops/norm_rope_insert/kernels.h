// Per-ISA kernels of norm_rope_insert, one row each. n and 512 are multiples of 16.
#pragma once

#include <cstdint>

namespace fathom::ops {

struct NormKernels {
  // y = [bf16] (weight * (x * rsqrt(mean(x^2) + eps)))
  void (*rms_norm)(const float* x, const float* weight, float* y, int64_t n, float eps, bool round);
  // One query head in place: weightless norm, then RoPE on the last 64 channels.
  void (*query_head)(float* q, const float* rope, float eps, bool round);
  // kv row -> normalised and rotated row of 512.
  void (*key_row)(const float* kv, const float* weight, const float* rope, float* row, float eps,
                  bool round);
};

extern const NormKernels kNormAvx2;
extern const NormKernels kNormAvx512;

}  // namespace fathom::ops
