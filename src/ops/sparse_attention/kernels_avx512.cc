#include <immintrin.h>

#include <cstdint>

#include "ops/sparse_attention/kernels.h"
#include "ops/vec16.h"

namespace fathom::ops {
namespace {

// 4 x 4 score accumulators and 4 x 4 value accumulators: 16 of 32 registers, two multiply-adds a
// cycle hidden behind a latency of four.
constexpr int kScoreHeads = 4;
constexpr int kScoreRows = 4;
constexpr int kValueHeads = 4;
constexpr int kValuePairs = 2;

inline void LoadBf16Pairs(const uint16_t* p, V16* even, V16* odd) {
  const __m512i pairs = _mm512_loadu_si512(p);
  even->v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd->v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
}

inline void LoadDeinterleaved(const float* p, V16* even, V16* odd) {
  const __m512i index =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512 a = _mm512_loadu_ps(p), b = _mm512_loadu_ps(p + 16);
  even->v = _mm512_permutex2var_ps(a, index, b);
  odd->v = _mm512_permutex2var_ps(a, _mm512_add_epi32(index, _mm512_set1_epi32(1)), b);
}

inline void StoreInterleaved(float* p, V16 even, V16 odd) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  _mm512_storeu_ps(p, _mm512_permutex2var_ps(even.v, low, odd.v));
  _mm512_storeu_ps(p + 16, _mm512_permutex2var_ps(even.v, high, odd.v));
}

// The lane sums of four vectors down to four lanes each: lanes i and i+8, then i and i+4.
inline __m512 FourOfEach(V16 a, V16 b, V16 c, V16 d) {
  const __m512 ab =
      _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xee));
  const __m512 cd =
      _mm512_add_ps(_mm512_shuffle_f32x4(c.v, d.v, 0x44), _mm512_shuffle_f32x4(c.v, d.v, 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

inline __m512 TwoOfEach(__m512 a, __m512 b) {
  const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

// ReduceAdd of all sixteen accumulators at once, by the same tree; 128-bit lane h holds the four
// rows of head h.
inline void StoreScores(const V16 (&acc)[kScoreHeads][kScoreRows], float* p) {
  __m512 four[kScoreRows];
  for (int r = 0; r < kScoreRows; ++r) {
    four[r] = FourOfEach(acc[0][r], acc[1][r], acc[2][r], acc[3][r]);
  }
  const __m512 x = TwoOfEach(four[0], four[1]), y = TwoOfEach(four[2], four[3]);
  const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
  _mm_storeu_ps(p, _mm512_castps512_ps128(sums));
  _mm_storeu_ps(p + 512, _mm512_extractf32x4_ps(sums, 1));
  _mm_storeu_ps(p + 1024, _mm512_extractf32x4_ps(sums, 2));
  _mm_storeu_ps(p + 1536, _mm512_extractf32x4_ps(sums, 3));
}

// 64 e4m3 bytes times 2^(scale-127) as bf16 bits.
void ExpandBlock64(const uint8_t* data, int scale, uint16_t* out);

}  // namespace
}  // namespace fathom::ops

#include "ops/sparse_attention/kernels.inc"

namespace fathom::ops {
namespace {

// The rare block with a zero, subnormal or NaN byte.
__attribute__((noinline)) void ExpandAnyBlock64(const uint8_t* data, int scale, uint16_t* out) {
  // Exponents: e4m3 has bias 7, bf16 127, the scale adds scale - 127.
  const __m128i small = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kSubnormal));
  const __m128i power = _mm_set1_epi16(static_cast<int16_t>((scale - 127) * 128));
  const __m512i table = _mm512_castsi128_si512(
      _mm_mask_add_epi16(small, _mm_test_epi16_mask(small, small), small, power));
  const __m512i bias = _mm512_set1_epi16(static_cast<int16_t>((scale - 7) * 128));
  for (int i = 0; i < 64; i += 32) {
    const __m512i byte =
        _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i)));
    const __m512i magnitude = _mm512_and_si512(byte, _mm512_set1_epi16(0x7f));
    const __m512i sign = _mm512_slli_epi16(_mm512_sub_epi16(byte, magnitude), 8);
    __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), bias);
    bits = _mm512_mask_permutexvar_epi16(
        bits, _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, table);
    bits = _mm512_mask_mov_epi16(bits, _mm512_cmpeq_epi16_mask(magnitude, _mm512_set1_epi16(0x7f)),
                                 _mm512_set1_epi16(0x7fc0));
    _mm512_storeu_si512(out + i, _mm512_or_si512(bits, sign));
  }
}

void ExpandBlock64(const uint8_t* data, int scale, uint16_t* out) {
  const __m512i byte = _mm512_loadu_si512(data);
  const __m512i magnitude = _mm512_and_si512(byte, _mm512_set1_epi8(0x7f));
  // Normal numbers are the magnitudes 0x08 .. 0x7e: one unsigned comparison.
  const __mmask64 special = _mm512_cmpgt_epu8_mask(_mm512_sub_epi8(magnitude, _mm512_set1_epi8(8)),
                                                   _mm512_set1_epi8(0x76));
  if (special != 0) return ExpandAnyBlock64(data, scale, out);
  // Sign-extended and moved up, a byte has its mantissa and exponent in place and copies of the
  // sign in bits 11..15; bit 15 stays, and the exponent is rebased.
  const __m512i bias = _mm512_set1_epi16(static_cast<int16_t>((scale - 7) * 128));
  const __m512i keep = _mm512_set1_epi16(static_cast<int16_t>(0x87f0));
  const auto expand = [&](__m256i bytes) {
    const __m512i word = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 4);
    return _mm512_add_epi16(_mm512_and_si512(word, keep), bias);
  };
  _mm512_storeu_si512(out, expand(_mm512_castsi512_si256(byte)));
  _mm512_storeu_si512(out + 32, expand(_mm512_extracti64x4_epi64(byte, 1)));
}

// The same segment with the bf16 product, which adds two exact products to each lane: lanes are
// pairs of channels for the scores, pairs of entries for the values.

inline __m512bh LoadBf16(const void* p) {
  return (__m512bh)_mm512_loadu_si512(p);
}

inline void ScoreBlockBf16(const AttentionSegment& s, int head, int j) {
  V16 acc[kScoreHeads][kScoreRows];
  for (int h = 0; h < kScoreHeads; ++h) {
    for (int r = 0; r < kScoreRows; ++r) acc[h][r] = Zero();
  }
  for (int channel = 0; channel < kDim; channel += 32) {
    __m512bh rows[kScoreRows];
    for (int r = 0; r < kScoreRows; ++r) {
      rows[r] = LoadBf16(static_cast<const uint16_t*>(s.rows[j + r]) + channel);
    }
    for (int h = 0; h < kScoreHeads; ++h) {
      const float* q = s.q + int64_t{head + h} * kDim;
      const __m512bh query = LoadBf16(reinterpret_cast<const uint16_t*>(q) + channel);
      for (int r = 0; r < kScoreRows; ++r) {
        acc[h][r].v = _mm512_dpbf16_ps(acc[h][r].v, query, rows[r]);
      }
    }
  }
  StoreScores(acc, s.p + int64_t{head} * kSegment + j);
}

inline void ValueBlockBf16(const AttentionSegment& s, int head, int channel) {
  V16 acc[kValueHeads][2 * kValuePairs];
  for (int h = 0; h < kValueHeads; ++h) {
    for (int v = 0; v < 2 * kValuePairs; ++v) acc[h][v] = Zero();
  }
  const float* p = s.p + int64_t{head} * kSegment;
  for (int j = 0; j < s.count; j += 2) {
    // An odd last entry is paired with itself, at weight 0.
    const auto* first = static_cast<const uint16_t*>(s.rows[j]) + channel;
    const auto* second =
        static_cast<const uint16_t*>(s.rows[j + 1 < s.count ? j + 1 : j]) + channel;
    __m512bh value[2 * kValuePairs];
    for (int v = 0; v < kValuePairs; ++v) {
      const __m512i a = _mm512_loadu_si512(first + 32 * v);
      const __m512i b = _mm512_loadu_si512(second + 32 * v);
      value[2 * v] = (__m512bh)_mm512_unpacklo_epi16(a, b);
      value[2 * v + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
    for (int h = 0; h < kValueHeads; ++h) {
      int32_t pair;
      __builtin_memcpy(&pair, reinterpret_cast<const uint16_t*>(p + h * kSegment) + j, 4);
      const __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
      for (int v = 0; v < 2 * kValuePairs; ++v) {
        acc[h][v].v = _mm512_dpbf16_ps(acc[h][v].v, value[v], weight);
      }
    }
  }
  for (int h = 0; h < kValueHeads; ++h) {
    float* out = s.acc + int64_t{head + h} * kDim + channel;
    for (int v = 0; v < 2 * kValuePairs; ++v) Store(out + 16 * v, acc[h][v]);
  }
}

void SegmentBf16Product(const AttentionSegment& s) {
  for (int j = 0; j < s.count; j += kScoreRows) {
    for (int h = 0; h < s.heads; h += kScoreHeads) ScoreBlockBf16(s, h, j);
  }
  for (int h = 0; h < s.heads; ++h) {
    float* p = s.p + int64_t{h} * kSegment;
    Softmax(p, s.count, true, &s.max[h], &s.sum[h]);
    // In place: 16 values shrink to the first half of what they were read from.
    for (int j = 0; j < s.count; j += 16) {
      StoreBf16(reinterpret_cast<uint16_t*>(p) + j, Load(p + j));
    }
  }
  for (int channel = 0; channel < kDim; channel += 32 * kValuePairs) {
    for (int h = 0; h < s.heads; h += kValueHeads) ValueBlockBf16(s, h, channel);
  }
}

void PackQueryBf16(const float* q, bool pairs, float* packed) {
  if (!pairs) return PackQuery(q, false, packed);
  for (int i = 0; i < kDim; i += 16) {
    StoreBf16(reinterpret_cast<uint16_t*>(packed) + i, RoundToBf16(Load(q + i)));
  }
}

// The unpacked halves hold channels 0..3 and 4..7 of every eight.
void FinishBf16(const float* acc, float inverse, bool pairs, bool round, float* out) {
  if (!pairs) return Finish(acc, inverse, false, round, out);
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int i = 0; i < kDim; i += 32) {
    V16 a = Mul(Load(acc + i), Set1(inverse)), b = Mul(Load(acc + i + 16), Set1(inverse));
    if (round) a = RoundToBf16(a), b = RoundToBf16(b);
    _mm512_storeu_ps(out + i, _mm512_permutex2var_ps(a.v, low, b.v));
    _mm512_storeu_ps(out + i + 16, _mm512_permutex2var_ps(a.v, high, b.v));
  }
}

}  // namespace

const AttentionKernels kAttentionAvx512 = {
    Segment<float>, Segment<uint16_t>, Merge, PackQuery, Finish, ExpandFp8,
};

const AttentionKernels kAttentionAvx512Bf16 = {
    Segment<float>, SegmentBf16Product, Merge, PackQueryBf16, FinishBf16, ExpandFp8,
};

}  // namespace fathom::ops
