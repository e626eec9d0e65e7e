#include <immintrin.h>

#include "ops/indexer/kernels.h"
#include "ops/vec16.h"
// vec16.h first: the query's steps are written in its lanes.
#include "ops/indexer/query.inc"

namespace fathom::ops {
namespace {

// ---- tiles ----

// 16 bytes (four dwords) of 16 rows `stride` apart, as four registers of one dword per row.
inline void Transpose4(const uint8_t* data, int64_t stride, __m512i (&out)[4]) {
  __m512i rows[4];  // rows[i]: rows i, 4+i, 8+i, 12+i
  for (int i = 0; i < 4; ++i) {
    auto load = [&](int row) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + row * stride));
    };
    __m512i r = _mm512_castsi128_si512(load(i));
    r = _mm512_inserti32x4(r, load(4 + i), 1);
    r = _mm512_inserti32x4(r, load(8 + i), 2);
    rows[i] = _mm512_inserti32x4(r, load(12 + i), 3);
  }
  const __m512i a = _mm512_unpacklo_epi32(rows[0], rows[1]);
  const __m512i b = _mm512_unpackhi_epi32(rows[0], rows[1]);
  const __m512i c = _mm512_unpacklo_epi32(rows[2], rows[3]);
  const __m512i d = _mm512_unpackhi_epi32(rows[2], rows[3]);
  out[0] = _mm512_unpacklo_epi64(a, c);
  out[1] = _mm512_unpackhi_epi64(a, c);
  out[2] = _mm512_unpacklo_epi64(b, d);
  out[3] = _mm512_unpackhi_epi64(b, d);
}

struct CodeTable {
  alignas(64) uint8_t entry[64];  // [shift * 16 + code]
};
constexpr CodeTable MakeCodes() {
  constexpr int kDouble[8] = {0, 1, 2, 3, 4, 6, 8, 12};
  CodeTable table{};
  for (int i = 0; i < 64; ++i) {
    const int magnitude = kDouble[i & 7] << (i / 16);
    table.entry[i] = static_cast<uint8_t>(Fp4Tile::kOffset + ((i & 8) ? -magnitude : magnitude));
  }
  return table;
}
constexpr CodeTable kCodes = MakeCodes();

void ExpandFp4(const uint8_t* data, const uint8_t* scale, Fp4Tile* out) {
  const __m512i byte = _mm512_set1_epi32(0xff);
  const __m512i scales = _mm512_loadu_si512(scale);  // one dword, four blocks, per row
  __m512i exponent[4];
  for (int b = 0; b < 4; ++b) {
    exponent[b] = _mm512_and_si512(_mm512_srlv_epi32(scales, _mm512_set1_epi32(8 * b)), byte);
  }
  const __m512i lowest = _mm512_min_epi32(_mm512_min_epi32(exponent[0], exponent[1]),
                                          _mm512_min_epi32(exponent[2], exponent[3]));
  const __m512i highest = _mm512_max_epi32(_mm512_max_epi32(exponent[0], exponent[1]),
                                           _mm512_max_epi32(exponent[2], exponent[3]));
  const __mmask16 bad =
      _mm512_cmpgt_epi32_mask(_mm512_sub_epi32(highest, lowest), _mm512_set1_epi32(3)) |
      _mm512_cmplt_epi32_mask(lowest, _mm512_set1_epi32(64)) |
      _mm512_cmpgt_epi32_mask(highest, _mm512_set1_epi32(190));
  __m512i shift[4];
  out->aligned = bad == 0;
  if (bad == 0) {
    // Byte b of every dword to all bytes, times 16: the table's upper index.
    const __m512i shifts = _mm512_sub_epi8(
        scales,
        _mm512_shuffle_epi8(lowest, _mm512_broadcast_i32x4(_mm_setr_epi8(
                                        0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12))));
    const __m512i upper = _mm512_slli_epi32(shifts, 4);
    for (int b = 0; b < 4; ++b) {
      const auto bb = static_cast<char>(b);
      const __m128i pick = _mm_add_epi8(
          _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12), _mm_set1_epi8(bb));
      shift[b] = _mm512_shuffle_epi8(upper, _mm512_broadcast_i32x4(pick));
      _mm512_storeu_ps(out->block_scale[b], _mm512_set1_ps(1.0f));
    }
    const __m512i half = _mm512_slli_epi32(_mm512_sub_epi32(lowest, _mm512_set1_epi32(1)), 23);
    _mm512_storeu_ps(out->row_scale, _mm512_castsi512_ps(half));
  } else {
    for (int b = 0; b < 4; ++b) {
      shift[b] = _mm512_setzero_si512();
      const __m512 value = _mm512_mask_mov_ps(
          _mm512_castsi512_ps(_mm512_slli_epi32(exponent[b], 23)),
          _mm512_testn_epi32_mask(exponent[b], exponent[b]), _mm512_set1_ps(0x1p-127f));
      _mm512_storeu_ps(out->block_scale[b], _mm512_mul_ps(value, _mm512_set1_ps(0.5f)));
    }
    _mm512_storeu_ps(out->row_scale, _mm512_set1_ps(1.0f));
  }
  const __m512i table = _mm512_load_si512(kCodes.entry);
  const __m512i nibble = _mm512_set1_epi8(15);
  for (int b = 0; b < 4; ++b) {
    __m512i dwords[4];
    Transpose4(data + 16 * b, 64, dwords);
    for (int d = 0; d < 4; ++d) {
      const __m512i even = _mm512_ternarylogic_epi32(dwords[d], nibble, shift[b], 0xea);
      const __m512i odd =
          _mm512_ternarylogic_epi32(_mm512_srli_epi32(dwords[d], 4), nibble, shift[b], 0xea);
      uint8_t* quad = out->quad[2 * (4 * b + d)];
      _mm512_store_si512(quad, _mm512_permutexvar_epi8(even, table));
      _mm512_store_si512(quad + 64, _mm512_permutexvar_epi8(odd, table));
    }
  }
}

// e4m3 codes in the low byte of each dword, the rest zero.
inline __m512 DecodeE4m3(__m512i code) {
  const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi32(0x7f));
  const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(code, _mm512_set1_epi32(0x80)), 24);
  const __m512i normal =
      _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
  const __m512 subnormal = _mm512_mul_ps(_mm512_cvtepi32_ps(magnitude), _mm512_set1_ps(0x1p-9f));
  __m512i value =
      _mm512_mask_mov_epi32(normal, _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8)),
                            _mm512_castps_si512(subnormal));
  value = _mm512_mask_mov_epi32(value, _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f)),
                                _mm512_set1_epi32(0x7fc00000));
  return _mm512_castsi512_ps(_mm512_or_si512(value, sign));
}

void ExpandFp8(const uint8_t* data, const uint8_t* scale, FloatTile* out) {
  const __m512 scales = _mm512_loadu_ps(scale);
  const __m512i byte = _mm512_set1_epi32(0xff);
  for (int chunk = 0; chunk < 8; ++chunk) {
    __m512i dwords[4];
    Transpose4(data + 16 * chunk, 128, dwords);
    for (int d = 0; d < 4; ++d) {
      float* key = out->key[16 * chunk + 4 * d];
      for (int i = 0; i < 4; ++i) {
        const __m512i code =
            _mm512_and_si512(_mm512_srlv_epi32(dwords[d], _mm512_set1_epi32(8 * i)), byte);
        _mm512_store_ps(key + kTileRows * i, _mm512_mul_ps(DecodeE4m3(code), scales));
      }
    }
  }
}

void ExpandBf16(const uint8_t* data, const uint8_t*, FloatTile* out) {
  for (int chunk = 0; chunk < 16; ++chunk) {
    __m512i dwords[4];
    Transpose4(data + 16 * chunk, 256, dwords);
    for (int d = 0; d < 4; ++d) {
      float* key = out->key[8 * chunk + 2 * d];
      _mm512_store_si512(key, _mm512_slli_epi32(dwords[d], 16));
      _mm512_store_si512(key + kTileRows, _mm512_and_si512(dwords[d], _mm512_set1_epi32(-65536)));
    }
  }
}

void ExpandF32(const uint8_t* data, const uint8_t*, FloatTile* out) {
  for (int chunk = 0; chunk < 32; ++chunk) {
    __m512i dwords[4];
    Transpose4(data + 16 * chunk, 512, dwords);
    for (int d = 0; d < 4; ++d) _mm512_store_si512(out->key[4 * chunk + d], dwords[d]);
  }
}

// ---- scores ----

inline __m512i Quad(const Fp4Tile& tile, int quad) {
  return _mm512_load_si512(tile.quad[quad]);
}

inline __m512i QueryQuad(const Fp4Heads& heads, int h, int quad) {
  int32_t four;
  __builtin_memcpy(&four, heads.q[h] + 4 * quad, 4);
  return _mm512_set1_epi32(four);
}

inline __m512 Relu(__m512 x) {
  return _mm512_max_ps(x, _mm512_setzero_ps());  // NaN: the second operand
}

// N tiles by 8 heads: 8 N accumulators, N loads and 8 broadcasts for 8 N products.
template <int N>
inline void ScoreAligned(const Fp4Tile* tiles, const Fp4Heads& heads, __m512 (&score)[N]) {
  __m512i sum[N][kHeadGroup];
  for (int n = 0; n < N; ++n) {
    for (int h = 0; h < kHeadGroup; ++h) sum[n][h] = _mm512_set1_epi32(heads.bias[h]);
  }
#pragma GCC unroll 4
  for (int quad = 0; quad < 32; ++quad) {
    __m512i key[N];
    for (int n = 0; n < N; ++n) key[n] = Quad(tiles[n], quad);
#pragma GCC unroll 8
    for (int h = 0; h < kHeadGroup; ++h) {
      const __m512i q = QueryQuad(heads, h, quad);
      for (int n = 0; n < N; ++n) sum[n][h] = _mm512_dpbusd_epi32(sum[n][h], key[n], q);
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < kHeadGroup; ++h) {
    const __m512 w = _mm512_set1_ps(heads.w[h]);
    for (int n = 0; n < N; ++n) {
      score[n] = _mm512_fmadd_ps(w, Relu(_mm512_cvtepi32_ps(sum[n][h])), score[n]);
    }
  }
}

template <int N>
inline void ScoreBlocks(const Fp4Tile* tiles, const Fp4Heads& heads, __m512 (&score)[N]) {
  for (int h = 0; h < kHeadGroup; ++h) {
    __m512i sum[N][4];
    for (int b = 0; b < 4; ++b) {
      for (int n = 0; n < N; ++n) sum[n][b] = _mm512_set1_epi32(heads.block_bias[h][b]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 4
      for (int b = 0; b < 4; ++b) {
        const __m512i q = QueryQuad(heads, h, 8 * b + i);
        for (int n = 0; n < N; ++n) {
          sum[n][b] = _mm512_dpbusd_epi32(sum[n][b], Quad(tiles[n], 8 * b + i), q);
        }
      }
    }
    const __m512 w = _mm512_set1_ps(heads.w[h]);
    for (int n = 0; n < N; ++n) {
      __m512 dot = _mm512_setzero_ps();
      for (int b = 0; b < 4; ++b) {
        __m512 block =
            _mm512_mul_ps(_mm512_cvtepi32_ps(sum[n][b]), _mm512_loadu_ps(tiles[n].block_scale[b]));
        block = _mm512_mul_ps(block, _mm512_set1_ps(heads.block_scale[h][b]));
        dot = _mm512_add_ps(dot, block);
      }
      score[n] = _mm512_fmadd_ps(w, Relu(dot), score[n]);
    }
  }
}

template <int N>
inline void ScoreTiles(const Fp4Tile* tiles, const Fp4Heads* heads, int groups, float* scores) {
  __m512 score[N];
  int32_t aligned = 1;
  for (int n = 0; n < N; ++n) {
    score[n] = _mm512_setzero_ps();
    aligned &= tiles[n].aligned;
  }
  for (int g = 0; g < groups; ++g) {
    if (aligned & heads[g].aligned) ScoreAligned<N>(tiles, heads[g], score);
    else ScoreBlocks<N>(tiles, heads[g], score);
  }
  for (int n = 0; n < N; ++n) {
    _mm512_storeu_ps(scores + kTileRows * n,
                     _mm512_mul_ps(score[n], _mm512_loadu_ps(tiles[n].row_scale)));
  }
}

void ScoreFp4(const Fp4Tile* tiles, int count, const Fp4Heads* heads, int groups, float* scores) {
  int i = 0;
  for (; i + 2 <= count; i += 2) ScoreTiles<2>(tiles + i, heads, groups, scores + kTileRows * i);
  if (i < count) ScoreTiles<1>(tiles + i, heads, groups, scores + kTileRows * i);
}

template <int N>
inline void ScoreFloatTiles(const FloatTile* tiles, const FloatHeads* heads, int groups,
                            float* scores) {
  __m512 score[N];
  for (int n = 0; n < N; ++n) score[n] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g) {
    __m512 dot[N][kHeadGroup];
    for (int n = 0; n < N; ++n) {
      for (int h = 0; h < kHeadGroup; ++h) dot[n][h] = _mm512_setzero_ps();
    }
#pragma GCC unroll 2
    for (int c = 0; c < 128; ++c) {
      __m512 key[N];
      for (int n = 0; n < N; ++n) key[n] = _mm512_load_ps(tiles[n].key[c]);
#pragma GCC unroll 8
      for (int h = 0; h < kHeadGroup; ++h) {
        const __m512 q = _mm512_set1_ps(heads[g].q[h][c]);
        for (int n = 0; n < N; ++n) dot[n][h] = _mm512_fmadd_ps(q, key[n], dot[n][h]);
      }
    }
#pragma GCC unroll 8
    for (int h = 0; h < kHeadGroup; ++h) {
      const __m512 w = _mm512_set1_ps(heads[g].w[h]);
      for (int n = 0; n < N; ++n) score[n] = _mm512_fmadd_ps(w, Relu(dot[n][h]), score[n]);
    }
  }
  for (int n = 0; n < N; ++n) _mm512_storeu_ps(scores + kTileRows * n, score[n]);
}

void ScoreFloat(const FloatTile* tiles, int count, const FloatHeads* heads, int groups,
                float* scores) {
  int i = 0;
  for (; i + 2 <= count; i += 2) {
    ScoreFloatTiles<2>(tiles + i, heads, groups, scores + kTileRows * i);
  }
  if (i < count) ScoreFloatTiles<1>(tiles + i, heads, groups, scores + kTileRows * i);
}

// ---- selection ----

int32_t Append(const float* scores, int32_t n, int32_t first_row, int32_t floor, int32_t* keys,
               int32_t* rows, int32_t count) {
  const __m512i zero = _mm512_setzero_si512();
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i bar = _mm512_set1_epi32(floor);
  for (int32_t i = 0; i < n; i += 16) {
    const __mmask16 valid = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1);
    const __m512i bits = _mm512_maskz_loadu_epi32(valid, scores + i);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __m512i key = _mm512_mask_sub_epi32(magnitude, _mm512_movepi32_mask(bits), zero, magnitude);
    key = _mm512_mask_mov_epi32(key,
                                _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000)),
                                _mm512_set1_epi32(INT32_MIN));
    const __mmask16 keep = _mm512_mask_cmpge_epi32_mask(valid, key, bar);
    if (keep == 0) continue;
    const __m512i row = _mm512_add_epi32(lanes, _mm512_set1_epi32(first_row + i));
    // Compressed in the register and stored whole: a compressing store is slow on some CPUs.
    _mm512_storeu_si512(keys + count, _mm512_maskz_compress_epi32(keep, key));
    _mm512_storeu_si512(rows + count, _mm512_maskz_compress_epi32(keep, row));
    count += __builtin_popcount(keep);
  }
  return count;
}

int32_t Keep(int32_t* keys, int32_t* rows, int32_t n, int32_t bar, int32_t equal) {
  const __m512i at = _mm512_set1_epi32(bar);
  int32_t kept = 0;
  for (int32_t i = 0; i < n; i += 16) {
    const __mmask16 valid = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1);
    const __m512i key = _mm512_maskz_loadu_epi32(valid, keys + i);
    const __m512i row = _mm512_maskz_loadu_epi32(valid, rows + i);
    uint32_t ties = _mm512_mask_cmpeq_epi32_mask(valid, key, at);
    const int32_t found = __builtin_popcount(ties);
    if (found > equal) ties = _pdep_u32((1u << equal) - 1, ties);  // the lowest `equal` of them
    equal -= found < equal ? found : equal;
    const auto keep = static_cast<__mmask16>(_mm512_mask_cmpgt_epi32_mask(valid, key, at) | ties);
    // Reaches at most element i + 15, which is in the registers already.
    _mm512_storeu_si512(keys + kept, _mm512_maskz_compress_epi32(keep, key));
    _mm512_storeu_si512(rows + kept, _mm512_maskz_compress_epi32(keep, row));
    kept += __builtin_popcount(keep);
  }
  return kept;
}

}  // namespace

constinit const IndexerKernels kIndexerAvx512{Prepare,    PackFp4,    ExpandFp4, ExpandFp8,
                                              ExpandBf16, ExpandF32,  ScoreFp4,  ScoreFloat,
                                              Append,     KthLargest, Keep};

}  // namespace fathom::ops
