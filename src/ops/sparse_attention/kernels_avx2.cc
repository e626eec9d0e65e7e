#include <immintrin.h>

#include <cstdint>

#include "ops/sparse_attention/kernels.h"
#include "ops/vec16.h"

namespace fathom::ops {
namespace {

// A V16 is two registers here: 2 x 2 accumulators fill eight of the sixteen.
constexpr int kScoreHeads = 2;
constexpr int kScoreRows = 2;
constexpr int kValueHeads = 2;
constexpr int kValuePairs = 1;

inline void LoadBf16Pairs(const uint16_t* p, V16* even, V16* odd) {
  const auto* in = reinterpret_cast<const __m256i*>(p);
  const __m256i low = _mm256_loadu_si256(in), high = _mm256_loadu_si256(in + 1);
  const __m256i upper = _mm256_set1_epi32(-65536);
  even->lo = _mm256_castsi256_ps(_mm256_slli_epi32(low, 16));
  even->hi = _mm256_castsi256_ps(_mm256_slli_epi32(high, 16));
  odd->lo = _mm256_castsi256_ps(_mm256_and_si256(low, upper));
  odd->hi = _mm256_castsi256_ps(_mm256_and_si256(high, upper));
}

// Eight even and eight odd elements of 16 consecutive floats.
inline void Deinterleave8(const float* p, __m256* even, __m256* odd) {
  const __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8);
  const __m256d e = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0x88));
  const __m256d o = _mm256_castps_pd(_mm256_shuffle_ps(a, b, 0xdd));
  *even = _mm256_castpd_ps(_mm256_permute4x64_pd(e, 0xd8));
  *odd = _mm256_castpd_ps(_mm256_permute4x64_pd(o, 0xd8));
}

inline void LoadDeinterleaved(const float* p, V16* even, V16* odd) {
  Deinterleave8(p, &even->lo, &odd->lo);
  Deinterleave8(p + 16, &even->hi, &odd->hi);
}

inline void Interleave8(float* p, __m256 even, __m256 odd) {
  const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
  _mm256_storeu_ps(p, _mm256_permute2f128_ps(low, high, 0x20));
  _mm256_storeu_ps(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
}

inline void StoreInterleaved(float* p, V16 even, V16 odd) {
  Interleave8(p, even.lo, odd.lo);
  Interleave8(p + 16, even.hi, odd.hi);
}

inline void StoreScores(const V16 (&acc)[kScoreHeads][kScoreRows], float* p) {
  for (int h = 0; h < kScoreHeads; ++h) {
    for (int r = 0; r < kScoreRows; ++r) p[h * 512 + r] = ReduceAdd(acc[h][r]);
  }
}

void ExpandBlock64(const uint8_t* data, int scale, uint16_t* out);

}  // namespace
}  // namespace fathom::ops

#include "ops/sparse_attention/kernels.inc"

namespace fathom::ops {
namespace {

// The rare block with a zero, subnormal or NaN byte.
__attribute__((noinline)) void ExpandAnyBlock64(const uint8_t* data, int scale, uint16_t* out) {
  const __m128i subnormal = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kSubnormal));
  const __m128i zero = _mm_cmpeq_epi16(subnormal, _mm_setzero_si128());
  const __m128i power = _mm_set1_epi16(static_cast<int16_t>((scale - 127) * 128));
  const __m128i words = _mm_andnot_si128(zero, _mm_add_epi16(subnormal, power));
  // A byte shuffle looks up both halves of a word: low bytes at 0..7, high bytes at 8..15.
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_shuffle_epi8(words, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15)));
  const __m256i bias = _mm256_set1_epi16(static_cast<int16_t>((scale - 7) * 128));
  for (int i = 0; i < 64; i += 16) {
    const __m256i byte =
        _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + i)));
    const __m256i magnitude = _mm256_and_si256(byte, _mm256_set1_epi16(0x7f));
    const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(_mm256_set1_epi16(0x7f), byte), 8);
    const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), bias);
    const __m256i index = _mm256_or_si256(
        magnitude, _mm256_add_epi16(_mm256_slli_epi16(magnitude, 8), _mm256_set1_epi16(0x0800)));
    const __m256i small = _mm256_shuffle_epi8(table, index);
    __m256i bits =
        _mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi16(_mm256_set1_epi16(8), magnitude));
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi16(0x7fc0),
                              _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_or_si256(bits, sign));
  }
}

void ExpandBlock64(const uint8_t* data, int scale, uint16_t* out) {
  const auto* in = reinterpret_cast<const __m256i*>(data);
  // Normal numbers are the magnitudes 0x08 .. 0x7e.
  const auto special = [](__m256i bytes) {
    const __m256i magnitude = _mm256_and_si256(bytes, _mm256_set1_epi8(0x7f));
    return _mm256_or_si256(_mm256_cmpgt_epi8(_mm256_set1_epi8(8), magnitude),
                           _mm256_cmpeq_epi8(magnitude, _mm256_set1_epi8(0x7f)));
  };
  const __m256i any =
      _mm256_or_si256(special(_mm256_loadu_si256(in)), special(_mm256_loadu_si256(in + 1)));
  if (!_mm256_testz_si256(any, any)) return ExpandAnyBlock64(data, scale, out);
  // Sign-extended and moved up, a byte has its mantissa and exponent in place and copies of the
  // sign in bits 11..15; bit 15 stays, and the exponent is rebased.
  const __m256i bias = _mm256_set1_epi16(static_cast<int16_t>((scale - 7) * 128));
  const __m256i keep = _mm256_set1_epi16(static_cast<int16_t>(0x87f0));
  for (int i = 0; i < 64; i += 16) {
    const __m256i word = _mm256_slli_epi16(
        _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + i))), 4);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        _mm256_add_epi16(_mm256_and_si256(word, keep), bias));
  }
}

}  // namespace

const AttentionKernels kAttentionAvx2 = {
    Segment<float>, Segment<uint16_t>, Merge, PackQuery, Finish, ExpandFp8,
};

}  // namespace fathom::ops
