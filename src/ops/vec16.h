// Sixteen float lanes: one AVX-512 register or two AVX2 ones, chosen by the including file's
// target. For *_avx2.cc and *_avx512.cc only: everything is static, so that no AVX-512 copy of a
// function can be linked into code that runs on a lesser CPU.
//
// Lane arithmetic and the order of every reduction are the same for both targets.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace fathom::ops {
namespace {

#if defined(__AVX512F__)

struct V16 {
  __m512 v;
};

inline V16 Load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
inline void Store(float* p, V16 a) {
  _mm512_storeu_ps(p, a.v);
}
inline V16 Set1(float x) {
  return {_mm512_set1_ps(x)};
}
inline V16 Zero() {
  return {_mm512_setzero_ps()};
}
inline V16 Add(V16 a, V16 b) {
  return {_mm512_add_ps(a.v, b.v)};
}
inline V16 Sub(V16 a, V16 b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
inline V16 Mul(V16 a, V16 b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
inline V16 Div(V16 a, V16 b) {
  return {_mm512_div_ps(a.v, b.v)};
}
inline V16 Max(V16 a, V16 b) {
  return {_mm512_max_ps(a.v, b.v)};
}
inline V16 Min(V16 a, V16 b) {
  return {_mm512_min_ps(a.v, b.v)};
}
inline V16 Sqrt(V16 a) {
  return {_mm512_sqrt_ps(a.v)};
}
inline V16 Fma(V16 a, V16 b, V16 c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
inline V16 Abs(V16 a) {
  return {_mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff)))};
}

// Rounded to bfloat16, kept as float.
inline V16 RoundToBf16(V16 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  return {_mm512_castsi512_ps(_mm512_and_si512(sum, _mm512_set1_epi32(-65536)))};
}

// The upper halves (bfloat16 bits of bf16-valued lanes).
inline void StoreBf16(uint16_t* p, V16 a) {
  const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(a.v), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}

// Rotates 8 interleaved pairs by the table's (cos, sin) pairs.
inline V16 RotatePairs(V16 x, V16 table) {
  const __m512 c = _mm512_moveldup_ps(table.v);
  const __m512 s = _mm512_movehdup_ps(table.v);
  const __m512 swapped = _mm512_permute_ps(x.v, 0xb1);
  return {_mm512_fmaddsub_ps(x.v, c, _mm512_mul_ps(swapped, s))};
}

// 2^k * p(r): |error| under 2 ulp; inputs below -87.3 give 0, above 88.7 saturate.
inline V16 Exp(V16 x) {
  const __m512 clamped =
      _mm512_min_ps(_mm512_max_ps(x.v, _mm512_set1_ps(-87.33654f)), _mm512_set1_ps(88.72283f));
  const __m512 k = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(k, _mm512_set1_ps(0.693359375f), clamped);
  r = _mm512_fnmadd_ps(k, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  const __mmask16 tiny = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-87.33654f), _CMP_LT_OQ);
  return {_mm512_mask_mov_ps(_mm512_scalef_ps(p, k), tiny, _mm512_setzero_ps())};
}

// e4m3 codes of lanes within +-448 (larger saturate), round to nearest even.
inline void StoreE4m3(uint8_t* p, V16 x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  const __m512i m = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(m, 20), _mm512_set1_epi32(1));
  __m512i code = _mm512_add_epi32(_mm512_add_epi32(m, _mm512_set1_epi32(0x7ffff)), odd);
  code = _mm512_sub_epi32(_mm512_srli_epi32(code, 20), _mm512_set1_epi32(120 << 3));
  const __m512 magnitude = _mm512_castsi512_ps(m);
  const __m512 magic = _mm512_set1_ps(16384.0f);  // its last mantissa bit is 2^-9
  const __m512i small = _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(magnitude, magic)),
                                         _mm512_castps_si512(magic));
  const __mmask16 subnormal = _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
  code = _mm512_mask_mov_epi32(code, subnormal, small);
  code = _mm512_min_epi32(code, _mm512_set1_epi32(0x7e));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign)));
}

struct Half {
  __m256 v;
};
inline Half Low(V16 a) {
  return {_mm512_castps512_ps256(a.v)};
}
inline Half High(V16 a) {
  return {_mm512_extractf32x8_ps(a.v, 1)};
}

#else  // AVX2

struct V16 {
  __m256 lo, hi;
};

inline V16 Load(const float* p) {
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
inline void Store(float* p, V16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline V16 Set1(float x) {
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
inline V16 Zero() {
  return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
inline V16 Add(V16 a, V16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
inline V16 Sub(V16 a, V16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
inline V16 Mul(V16 a, V16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
inline V16 Div(V16 a, V16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
inline V16 Max(V16 a, V16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
inline V16 Min(V16 a, V16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
inline V16 Sqrt(V16 a) {
  return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)};
}
inline V16 Fma(V16 a, V16 b, V16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline __m256 Abs8(__m256 a) {
  return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)));
}
inline V16 Abs(V16 a) {
  return {Abs8(a.lo), Abs8(a.hi)};
}

inline __m256 RoundToBf16x8(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  return _mm256_castsi256_ps(_mm256_and_si256(sum, _mm256_set1_epi32(-65536)));
}
inline V16 RoundToBf16(V16 a) {
  return {RoundToBf16x8(a.lo), RoundToBf16x8(a.hi)};
}

inline void StoreBf16(uint16_t* p, V16 a) {
  const __m256i lo = _mm256_srli_epi32(_mm256_castps_si256(a.lo), 16);
  const __m256i hi = _mm256_srli_epi32(_mm256_castps_si256(a.hi), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}

inline __m256 RotatePairs8(__m256 x, __m256 table) {
  const __m256 c = _mm256_moveldup_ps(table);
  const __m256 s = _mm256_movehdup_ps(table);
  return _mm256_fmaddsub_ps(x, c, _mm256_mul_ps(_mm256_permute_ps(x, 0xb1), s));
}
inline V16 RotatePairs(V16 x, V16 table) {
  return {RotatePairs8(x.lo, table.lo), RotatePairs8(x.hi, table.hi)};
}

inline __m256 Exp8(__m256 x) {
  const __m256 clamped =
      _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(-87.33654f)), _mm256_set1_ps(88.72283f));
  const __m256 k = _mm256_round_ps(_mm256_mul_ps(clamped, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(k, _mm256_set1_ps(0.693359375f), clamped);
  r = _mm256_fnmadd_ps(k, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
  p = _mm256_fmadd_ps(_mm256_mul_ps(r, r), p, _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
  // 2^k in two factors: k reaches 128, one more than a normal exponent holds.
  const __m256i ki = _mm256_cvtps_epi32(k);
  const __m256i half = _mm256_srai_epi32(ki, 1);
  const __m256i rest = _mm256_sub_epi32(ki, half);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  const __m256 b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  const __m256 tiny = _mm256_cmp_ps(x, _mm256_set1_ps(-87.33654f), _CMP_LT_OQ);
  return _mm256_andnot_ps(tiny, _mm256_mul_ps(_mm256_mul_ps(p, a), b));
}
inline V16 Exp(V16 x) {
  return {Exp8(x.lo), Exp8(x.hi)};
}

inline __m256i E4m3Codes8(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
  const __m256i m = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(m, 20), _mm256_set1_epi32(1));
  __m256i code = _mm256_add_epi32(_mm256_add_epi32(m, _mm256_set1_epi32(0x7ffff)), odd);
  code = _mm256_sub_epi32(_mm256_srli_epi32(code, 20), _mm256_set1_epi32(120 << 3));
  const __m256 magnitude = _mm256_castsi256_ps(m);
  const __m256 magic = _mm256_set1_ps(16384.0f);
  const __m256i small = _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(magnitude, magic)),
                                         _mm256_castps_si256(magic));
  const __m256i subnormal =
      _mm256_castps_si256(_mm256_cmp_ps(magnitude, _mm256_set1_ps(0x1p-6f), _CMP_LT_OQ));
  code = _mm256_blendv_epi8(code, small, subnormal);
  code = _mm256_min_epi32(code, _mm256_set1_epi32(0x7e));
  return _mm256_or_si256(code, sign);
}
inline void StoreE4m3(uint8_t* p, V16 x) {
  const __m256i words = _mm256_packus_epi32(E4m3Codes8(x.lo), E4m3Codes8(x.hi));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes =
      _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

struct Half {
  __m256 v;
};
inline Half Low(V16 a) {
  return {a.lo};
}
inline Half High(V16 a) {
  return {a.hi};
}

#endif

// Sum of the lanes: halves of 8, then 4, 2, 1.
inline float ReduceAdd(V16 a) {
  const __m256 eight = _mm256_add_ps(Low(a).v, High(a).v);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float ReduceMax(V16 a) {
  const __m256 eight = _mm256_max_ps(Low(a).v, High(a).v);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

}  // namespace
}  // namespace fathom::ops
