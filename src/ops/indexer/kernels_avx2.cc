#include <immintrin.h>

#include "ops/indexer/kernels.h"
#include "ops/vec16.h"
// vec16.h first: the query's steps are written in its lanes.
#include "ops/indexer/query.inc"

namespace fathom::ops {
namespace {

// ---- tiles ----

// 16 bytes (four dwords) of four rows `stride` apart, as four registers of one dword per row.
inline void Transpose4(const uint8_t* data, int64_t stride, __m128i (&out)[4]) {
  auto load = [&](int row) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + row * stride));
  };
  const __m128i a = _mm_unpacklo_epi32(load(0), load(1));
  const __m128i b = _mm_unpackhi_epi32(load(0), load(1));
  const __m128i c = _mm_unpacklo_epi32(load(2), load(3));
  const __m128i d = _mm_unpackhi_epi32(load(2), load(3));
  out[0] = _mm_unpacklo_epi64(a, c);
  out[1] = _mm_unpackhi_epi64(a, c);
  out[2] = _mm_unpacklo_epi64(b, d);
  out[3] = _mm_unpackhi_epi64(b, d);
}

void ExpandFp4(const uint8_t* data, const uint8_t* scale, Fp4Tile* out) {
  bool aligned = true;
  alignas(16) int32_t shift[4][kTileRows];
  for (int r = 0; r < kTileRows; ++r) {
    const uint8_t* s = scale + 4 * r;
    uint8_t lowest = s[0], highest = s[0];
    for (int b = 1; b < 4; ++b) {
      lowest = s[b] < lowest ? s[b] : lowest;
      highest = s[b] > highest ? s[b] : highest;
    }
    for (int b = 0; b < 4; ++b) shift[b][r] = s[b] - lowest;
    out->row_scale[r] = __builtin_bit_cast(float, (static_cast<uint32_t>(lowest) - 1) << 23);
    aligned = aligned && highest - lowest <= 3 && lowest >= 64 && highest <= 190;
  }
  out->aligned = aligned;
  for (int b = 0; b < 4; ++b) {
    for (int r = 0; r < kTileRows; ++r) {
      const uint8_t exponent = scale[4 * r + b];
      const float value = exponent == 0
                              ? 0x1p-127f
                              : __builtin_bit_cast(float, static_cast<uint32_t>(exponent) << 23);
      out->block_scale[b][r] = aligned ? 1.0f : value * 0.5f;
      if (!aligned) {
        shift[b][r] = 0;
        out->row_scale[r] = 1.0f;
      }
    }
  }
  // Twice the value plus 12, shifted, plus what makes 12 << shift into the offset.
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  const __m128i nibble = _mm_set1_epi8(15);
  for (int b = 0; b < 4; ++b) {
    for (int r = 0; r < kTileRows; r += 4) {
      const __m128i s = _mm_load_si128(reinterpret_cast<const __m128i*>(shift[b] + r));
      const __m128i twelve = _mm_set1_epi8(12);
      const __m128i rest = _mm_sub_epi8(_mm_set1_epi8(Fp4Tile::kOffset), _mm_sllv_epi32(twelve, s));
      __m128i dwords[4];
      Transpose4(data + 16 * b + 64 * r, 64, dwords);
      for (int d = 0; d < 4; ++d) {
        const __m128i even = _mm_and_si128(dwords[d], nibble);
        const __m128i odd = _mm_and_si128(_mm_srli_epi32(dwords[d], 4), nibble);
        uint8_t* quad = out->quad[2 * (4 * b + d)] + 4 * r;
        _mm_store_si128(reinterpret_cast<__m128i*>(quad),
                        _mm_add_epi8(_mm_sllv_epi32(_mm_shuffle_epi8(table, even), s), rest));
        _mm_store_si128(reinterpret_cast<__m128i*>(quad + 64),
                        _mm_add_epi8(_mm_sllv_epi32(_mm_shuffle_epi8(table, odd), s), rest));
      }
    }
  }
}

inline __m128 DecodeE4m3(__m128i code) {
  const __m128i magnitude = _mm_and_si128(code, _mm_set1_epi32(0x7f));
  const __m128i sign = _mm_slli_epi32(_mm_and_si128(code, _mm_set1_epi32(0x80)), 24);
  const __m128i normal = _mm_add_epi32(_mm_slli_epi32(magnitude, 20), _mm_set1_epi32(120 << 23));
  const __m128 subnormal = _mm_mul_ps(_mm_cvtepi32_ps(magnitude), _mm_set1_ps(0x1p-9f));
  __m128i value = _mm_blendv_epi8(normal, _mm_castps_si128(subnormal),
                                  _mm_cmplt_epi32(magnitude, _mm_set1_epi32(8)));
  value = _mm_blendv_epi8(value, _mm_set1_epi32(0x7fc00000),
                          _mm_cmpeq_epi32(magnitude, _mm_set1_epi32(0x7f)));
  return _mm_castsi128_ps(_mm_or_si128(value, sign));
}

void ExpandFp8(const uint8_t* data, const uint8_t* scale, FloatTile* out) {
  for (int r = 0; r < kTileRows; r += 4) {
    const __m128 scales = _mm_loadu_ps(reinterpret_cast<const float*>(scale) + r);
    for (int chunk = 0; chunk < 8; ++chunk) {
      __m128i dwords[4];
      Transpose4(data + 16 * chunk + 128 * r, 128, dwords);
      for (int d = 0; d < 4; ++d) {
        for (int i = 0; i < 4; ++i) {
          const __m128i code = _mm_and_si128(_mm_srl_epi32(dwords[d], _mm_cvtsi32_si128(8 * i)),
                                             _mm_set1_epi32(0xff));
          _mm_store_ps(out->key[16 * chunk + 4 * d + i] + r, _mm_mul_ps(DecodeE4m3(code), scales));
        }
      }
    }
  }
}

void ExpandBf16(const uint8_t* data, const uint8_t*, FloatTile* out) {
  for (int r = 0; r < kTileRows; r += 4) {
    for (int chunk = 0; chunk < 16; ++chunk) {
      __m128i dwords[4];
      Transpose4(data + 16 * chunk + 256 * r, 256, dwords);
      for (int d = 0; d < 4; ++d) {
        const int c = 8 * chunk + 2 * d;
        _mm_store_ps(out->key[c] + r, _mm_castsi128_ps(_mm_slli_epi32(dwords[d], 16)));
        _mm_store_ps(out->key[c + 1] + r,
                     _mm_castsi128_ps(_mm_and_si128(dwords[d], _mm_set1_epi32(-65536))));
      }
    }
  }
}

void ExpandF32(const uint8_t* data, const uint8_t*, FloatTile* out) {
  for (int r = 0; r < kTileRows; r += 4) {
    for (int chunk = 0; chunk < 32; ++chunk) {
      __m128i dwords[4];
      Transpose4(data + 16 * chunk + 512 * r, 512, dwords);
      for (int d = 0; d < 4; ++d) {
        _mm_store_ps(out->key[4 * chunk + d] + r, _mm_castsi128_ps(dwords[d]));
      }
    }
  }
}

// ---- scores: one tile (two registers of eight rows) by four heads ----

constexpr int kHalves = 2;
constexpr int kHeads = 4;

inline __m256i Quad(const Fp4Tile& tile, int quad, int half) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(tile.quad[quad] + 32 * half));
}

inline __m256i QueryQuad(const Fp4Heads& heads, int h, int quad) {
  int32_t four;
  __builtin_memcpy(&four, heads.q[h] + 4 * quad, 4);
  return _mm256_set1_epi32(four);
}

// sum + four products of unsigned and signed bytes; pairs stay within 16 bits (query.inc).
inline __m256i DotBytes(__m256i sum, __m256i key, __m256i q) {
  return _mm256_add_epi32(sum,
                          _mm256_madd_epi16(_mm256_maddubs_epi16(key, q), _mm256_set1_epi16(1)));
}

inline __m256 Relu(__m256 x) {
  return _mm256_max_ps(x, _mm256_setzero_ps());  // NaN: the second operand
}

inline void ScoreAligned(const Fp4Tile& tile, const Fp4Heads& heads, __m256 (&score)[kHalves]) {
  for (int first = 0; first < kHeadGroup; first += kHeads) {
    __m256i sum[kHalves][kHeads];
    for (int h = 0; h < kHeads; ++h) {
      sum[0][h] = sum[1][h] = _mm256_set1_epi32(heads.bias[first + h]);
    }
#pragma GCC unroll 2
    for (int quad = 0; quad < 32; ++quad) {
      const __m256i low = Quad(tile, quad, 0);
      const __m256i high = Quad(tile, quad, 1);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        const __m256i q = QueryQuad(heads, first + h, quad);
        sum[0][h] = DotBytes(sum[0][h], low, q);
        sum[1][h] = DotBytes(sum[1][h], high, q);
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      const __m256 w = _mm256_set1_ps(heads.w[first + h]);
      for (int i = 0; i < kHalves; ++i) {
        score[i] = _mm256_fmadd_ps(w, Relu(_mm256_cvtepi32_ps(sum[i][h])), score[i]);
      }
    }
  }
}

inline void ScoreBlocks(const Fp4Tile& tile, const Fp4Heads& heads, __m256 (&score)[kHalves]) {
  for (int h = 0; h < kHeadGroup; ++h) {
    const __m256 w = _mm256_set1_ps(heads.w[h]);
    __m256 dot[kHalves] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int b = 0; b < 4; ++b) {
      for (int i = 0; i < kHalves; ++i) {
        __m256i sum = _mm256_set1_epi32(heads.block_bias[h][b]);
        for (int quad = 8 * b; quad < 8 * b + 8; ++quad) {
          sum = DotBytes(sum, Quad(tile, quad, i), QueryQuad(heads, h, quad));
        }
        __m256 block =
            _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_loadu_ps(tile.block_scale[b] + 8 * i));
        block = _mm256_mul_ps(block, _mm256_set1_ps(heads.block_scale[h][b]));
        dot[i] = _mm256_add_ps(dot[i], block);
      }
    }
    for (int i = 0; i < kHalves; ++i) score[i] = _mm256_fmadd_ps(w, Relu(dot[i]), score[i]);
  }
}

void ScoreFp4(const Fp4Tile* tiles, int count, const Fp4Heads* heads, int groups, float* scores) {
  for (int t = 0; t < count; ++t, scores += kTileRows) {
    const Fp4Tile& tile = tiles[t];
    __m256 score[kHalves] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int g = 0; g < groups; ++g) {
      if (tile.aligned & heads[g].aligned) ScoreAligned(tile, heads[g], score);
      else ScoreBlocks(tile, heads[g], score);
    }
    for (int i = 0; i < kHalves; ++i) {
      const __m256 scale = _mm256_loadu_ps(tile.row_scale + 8 * i);
      _mm256_storeu_ps(scores + 8 * i, _mm256_mul_ps(score[i], scale));
    }
  }
}

void ScoreFloat(const FloatTile* tiles, int count, const FloatHeads* heads, int groups,
                float* scores) {
  for (int t = 0; t < count; ++t, scores += kTileRows) {
    __m256 score[kHalves] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int first = 0; first < groups * kHeadGroup; first += kHeads) {
      const FloatHeads& group = heads[first / kHeadGroup];
      const int lane = first % kHeadGroup;
      __m256 dot[kHalves][kHeads];
      for (int h = 0; h < kHeads; ++h) dot[0][h] = dot[1][h] = _mm256_setzero_ps();
      for (int c = 0; c < 128; ++c) {
        const __m256 low = _mm256_load_ps(tiles[t].key[c]);
        const __m256 high = _mm256_load_ps(tiles[t].key[c] + 8);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) {
          const __m256 q = _mm256_set1_ps(group.q[lane + h][c]);
          dot[0][h] = _mm256_fmadd_ps(q, low, dot[0][h]);
          dot[1][h] = _mm256_fmadd_ps(q, high, dot[1][h]);
        }
      }
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        const __m256 w = _mm256_set1_ps(group.w[lane + h]);
        for (int i = 0; i < kHalves; ++i) score[i] = _mm256_fmadd_ps(w, Relu(dot[i][h]), score[i]);
      }
    }
    for (int i = 0; i < kHalves; ++i) _mm256_storeu_ps(scores + 8 * i, score[i]);
  }
}

// ---- selection ----

int32_t Append(const float* scores, int32_t n, int32_t first_row, int32_t floor, int32_t* keys,
               int32_t* rows, int32_t count) {
  int32_t i = 0;
  if (floor != INT32_MIN) {
    // Eight at a time while none passes, which is nearly always once the bar is up.
    const __m256i bar = _mm256_set1_epi32(floor - 1);
    for (; i + 8 <= n; i += 8) {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scores + i));
      const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
      const __m256i sign = _mm256_srai_epi32(bits, 31);
      __m256i key = _mm256_sub_epi32(_mm256_xor_si256(magnitude, sign), sign);
      key = _mm256_blendv_epi8(key, _mm256_set1_epi32(INT32_MIN),
                               _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000)));
      int pass = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(key, bar)));
      for (; pass != 0; pass &= pass - 1) {
        const int32_t lane = i + __builtin_ctz(pass);
        keys[count] = ScoreKey(scores[lane]);
        rows[count++] = first_row + lane;
      }
    }
  }
  for (; i < n; ++i) {
    const int32_t key = ScoreKey(scores[i]);
    keys[count] = key;
    rows[count] = first_row + i;
    count += key >= floor;
  }
  return count;
}

}  // namespace

constinit const IndexerKernels kIndexerAvx2{Prepare,    PackFp4,    ExpandFp4, ExpandFp8,
                                            ExpandBf16, ExpandF32,  ScoreFp4,  ScoreFloat,
                                            Append,     KthLargest, KeepPlain};

}  // namespace fathom::ops
