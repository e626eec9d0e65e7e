#include <immintrin.h>

#include "ops/output_projection/rotate_kernels.h"

namespace fathom::ops {
namespace {

// To nearest bf16, ties to even; NaN stays NaN.
__m256 RoundBf16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 rounded =
      _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  return _mm256_blendv_ps(rounded, v, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}

}  // namespace

void InverseRotateHeadsAvx2(float* o, int heads, const float* table, bool round) {
  const __m256 minus = _mm256_set1_ps(-0.0f);
  for (int i = 0; i < 64; i += 8) {
    const __m256 t = _mm256_loadu_ps(table + i);
    const __m256 cosine = _mm256_moveldup_ps(t);
    const __m256 minus_sine = _mm256_xor_ps(_mm256_movehdup_ps(t), minus);
    for (int h = 0; h < heads; ++h) {
      float* at = o + h * 512 + 448 + i;
      const __m256 x = _mm256_loadu_ps(at);
      const __m256 swapped = _mm256_permute_ps(x, 0xb1);
      // Even lanes subtract, odd lanes add: (x0 c + x1 s, x1 c - x0 s).
      const __m256 y =
          _mm256_addsub_ps(_mm256_mul_ps(x, cosine), _mm256_mul_ps(swapped, minus_sine));
      _mm256_storeu_ps(at, round ? RoundBf16(y) : y);
    }
  }
}

}  // namespace fathom::ops
