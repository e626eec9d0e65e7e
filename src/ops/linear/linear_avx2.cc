// The panel kernels for AVX2 + FMA + F16C: see linear_kernels.h for the order of sums and
// packed_weight.h for the layouts. The results equal the AVX-512 set's to the bit.
//
// 256 inputs of a panel are expanded to f32 in L1, then six rows at a time multiply with 16 of the
// 32 outputs: 12 independent sums.
#include <immintrin.h>

#include "ops/linear/linear_kernels.h"
#include "ops/linear/linear_vector.inc"

namespace fathom::ops {
namespace {

inline __m256i LoadBits(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

inline void StoreF32(float* p, __m256i bits) {
  _mm256_store_ps(p, _mm256_castsi256_ps(bits));
}

// Each function expands `inputs` inputs of 32 outputs to tile [inputs][32].

void ExpandF32(const uint8_t* p, int64_t inputs, float* tile) {
  for (int64_t i = 0; i < inputs * 4; ++i) StoreF32(tile + 8 * i, LoadBits(p + 32 * i));
}

void ExpandBf16(const uint8_t* p, int64_t inputs, float* tile) {
  const __m256i upper = _mm256_set1_epi32(-65536);
  for (int64_t k = 0; k < inputs; k += 2, p += 128, tile += 2 * kPanelOutputs) {
    for (int i = 0; i < 4; ++i) {  // 8 outputs, words (k0, k1)
      const __m256i pairs = LoadBits(p + 32 * i);
      StoreF32(tile + 8 * i, _mm256_slli_epi32(pairs, 16));
      StoreF32(tile + kPanelOutputs + 8 * i, _mm256_and_si256(pairs, upper));
    }
  }
}

// e4m3 codes in the upper byte of each word to 16 floats in lane order 0,2,1,3 of 4 words: as f16
// the code is the value times 2^-8, subnormals included, and the conversion is exact. The NaN code
// would read as 480, so its exponent is filled.
inline void StoreE4m3(__m256i words, float* low, float* high) {
  const __m256i code = _mm256_slli_epi16(_mm256_srli_epi16(words, 8), 9);
  const __m256i is_nan = _mm256_cmpeq_epi16(code, _mm256_set1_epi16(static_cast<short>(0xfe00)));
  const __m256i half = _mm256_or_si256(
      _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(static_cast<short>(0xbf80))),
      _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7c00)));
  const __m256i ordered = _mm256_permute4x64_epi64(half, 0xd8);
  const __m256 unscale = _mm256_set1_ps(256.0f);
  _mm256_store_ps(low, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(ordered)), unscale));
  _mm256_store_ps(high,
                  _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(ordered, 1)), unscale));
}

void ExpandFp8(const uint8_t* p, int64_t inputs, float* tile) {
  for (int64_t k = 0; k < inputs; k += 2, p += 64, tile += 2 * kPanelOutputs) {
    for (int i = 0; i < 2; ++i) {  // outputs 8i..8i+7 and 16+8i..16+8i+7, bytes (k0, k1)
      const __m256i codes = LoadBits(p + 32 * i);
      float* first = tile + 8 * i;
      float* second = first + kPanelOutputs;
      StoreE4m3(_mm256_slli_epi16(codes, 8), first, first + 16);
      StoreE4m3(codes, second, second + 16);
    }
  }
}

void ExpandFp4(const uint8_t* p, int64_t inputs, float* tile) {
  const __m256 magnitude = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256i sign_bit = _mm256_set1_epi32(8);
  for (int64_t k = 0; k < inputs; k += 4, p += 64, tile += 4 * kPanelOutputs) {
    for (int i = 0; i < 2; ++i) {  // dword d: output 8i + d (and + 16), nibbles as in the layout
      __m256i codes = LoadBits(p + 32 * i);
      for (int nibble = 0; nibble < 8; ++nibble) {
        const int input = (nibble / 4) + (nibble & 2);
        const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(codes, sign_bit), 28);
        // The lookup uses the low three bits of each dword.
        const __m256 value = _mm256_permutevar8x32_ps(magnitude, codes);
        _mm256_store_ps(tile + input * kPanelOutputs + 16 * (nibble & 1) + 8 * i,
                        _mm256_or_ps(value, _mm256_castsi256_ps(sign)));
        codes = _mm256_srli_epi32(codes, 4);
      }
    }
  }
}

// The scales of outputs 8j..8j+7 of the panel for the chunk that starts at input k.
inline __m256 ChunkScale(const PanelJob& job, const uint8_t* scales, int64_t k, int j) {
  switch (job.format) {
    case WeightFormat::kFp8Block128: return _mm256_set1_ps(E8m0(scales[k / 128]));
    case WeightFormat::kFp4Block32: {
      const __m128i bytes = _mm_loadl_epi64(
          reinterpret_cast<const __m128i*>(scales + k / 32 * kPanelOutputs + 8 * j));
      const __m256i exponent = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
      // Byte 0 is 2^-127, the one scale that is no normal f32.
      return _mm256_castsi256_ps(_mm256_max_epu32(exponent, _mm256_set1_epi32(0x00400000)));
    }
    default: return _mm256_set1_ps(1.0f);
  }
}

inline __m256 RoundBf16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 rounded = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(-65536)));
  return _mm256_blendv_ps(rounded, v, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
}

// All ones in the lanes below `count`.
inline __m256i LaneMask(int64_t count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const int limit = count > 8 ? 8 : count < 0 ? 0 : static_cast<int>(count);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(limit), lane);
}

// Inputs [begin, end) of kRows rows against 8 * kVectors outputs of the tile from vector `first`
// on; totals are carried in y.
template <int kRows, int kVectors>
void TileRows(const PanelJob& job, int first, int64_t r0, int64_t begin, int64_t end, int chunk) {
  const float* x[kRows];
  for (int r = 0; r < kRows; ++r) x[r] = RowOf(job, r0 + r);
  float* y = job.y + r0 * job.y_stride + 8 * first;
  __m256i mask[kVectors];
  for (int j = 0; j < kVectors; ++j) mask[j] = LaneMask(job.cols - 8 * (first + j));
  alignas(32) float total[kRows][8 * kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kVectors; ++j) {
      _mm256_store_ps(total[r] + 8 * j,
                      begin == 0 ? _mm256_setzero_ps()
                                 : _mm256_maskload_ps(y + r * job.y_stride + 8 * j, mask[j]));
    }
  }
  const float* tile = job.tile + 8 * first;
  for (int64_t k0 = begin; k0 < end; k0 += chunk) {
    const int64_t k1 = Min(end, k0 + chunk);
    __m256 partial[kRows][kVectors];
    for (auto& row : partial) {
      for (auto& sum : row) sum = _mm256_setzero_ps();
    }
    for (int64_t k = k0; k < k1; ++k, tile += kPanelOutputs) {
      __m256 w[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) w[j] = _mm256_load_ps(tile + 8 * j);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const __m256 value = _mm256_broadcast_ss(x[r] + k);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
          partial[r][j] = _mm256_fmadd_ps(value, w[j], partial[r][j]);
        }
      }
    }
    // Keeps the totals in memory between chunks: the partial sums need the registers.
    asm volatile("" : : : "memory");
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const __m256 scale = ChunkScale(job, job.scales, k0, first + j);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        float* sum = total[r] + 8 * j;
        _mm256_store_ps(sum, _mm256_fmadd_ps(partial[r][j], scale, _mm256_load_ps(sum)));
      }
    }
  }
  const bool round = job.round && end == job.depth;
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kVectors; ++j) {
      const __m256 value = _mm256_load_ps(total[r] + 8 * j);
      _mm256_maskstore_ps(y + r * job.y_stride + 8 * j, mask[j], round ? RoundBf16(value) : value);
    }
  }
}

// kRows rows and all 32 outputs: up to three rows have registers for all sums at once.
template <int kRows>
void PanelRows(const PanelJob& job, int64_t r0, int64_t begin, int64_t end, int chunk) {
  if constexpr (kRows <= 3) {
    TileRows<kRows, 4>(job, 0, r0, begin, end, chunk);
  } else {
    TileRows<kRows, 2>(job, 0, r0, begin, end, chunk);
    if (job.cols > 16) TileRows<kRows, 2>(job, 2, r0, begin, end, chunk);
  }
}

using Expand = void (*)(const uint8_t* weights, int64_t inputs, float* tile);

void OnePanel(const PanelJob& job, Expand expand, int chunk) {
  const int64_t bytes_per_unit = job.panel_bytes / (job.depth / 4);  // of four inputs
  // With few rows a short tile lets the expansion of the next overlap the products of this one.
  const int64_t depth = job.rows <= 16 ? 64 : kPanelTileDepth;
  const int64_t groups = (job.rows + 5) / 6;
  for (int64_t begin = 0; begin < job.depth; begin += depth) {
    const int64_t end = Min(job.depth, begin + depth);
    expand(job.weights + begin / 4 * bytes_per_unit, end - begin, job.tile);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t r = job.rows * group / groups;
      switch (job.rows * (group + 1) / groups - r) {
        case 1: PanelRows<1>(job, r, begin, end, chunk); break;
        case 2: PanelRows<2>(job, r, begin, end, chunk); break;
        case 3: PanelRows<3>(job, r, begin, end, chunk); break;
        case 4: PanelRows<4>(job, r, begin, end, chunk); break;
        case 5: PanelRows<5>(job, r, begin, end, chunk); break;
        default: PanelRows<6>(job, r, begin, end, chunk); break;
      }
    }
  }
}

void Panel(const PanelJob& job) {
  Expand expand = ExpandF32;
  switch (job.format) {
    case WeightFormat::kF32: break;
    case WeightFormat::kBF16: expand = ExpandBf16; break;
    case WeightFormat::kFp8Block128: expand = ExpandFp8; break;
    case WeightFormat::kFp4Block32: expand = ExpandFp4; break;
  }
  const int chunk = job.format == WeightFormat::kFp4Block32 ? 32 : 64;
  for (int64_t p = 0; p < job.panels; ++p) {
    PanelJob one = job;
    one.weights += p * job.panel_bytes;
    one.scales += p * job.panel_scales;
    one.y += p * kPanelOutputs;
    one.cols = Min(kPanelOutputs, job.cols - p * kPanelOutputs);
    OnePanel(one, expand, chunk);
  }
}

void Round(const float* x, int64_t channels, int64_t padded, float* out) {
  for (int64_t i = 0; i < padded; i += 8) {
    const __m256 v = RoundBf16(_mm256_maskload_ps(x + i, LaneMask(channels - i)));
    _mm256_maskstore_ps(out + i, LaneMask(padded - i), v);
  }
}

// e4m3(v) as a value, |v| <= 448: three mantissa bits, or a multiple of 2^-9 below 2^-6.
inline __m256 RoundE4m3(__m256 v) {
  const __m256 minus = _mm256_set1_ps(-0.0f);
  const __m256 m = _mm256_min_ps(_mm256_set1_ps(448.0f), _mm256_andnot_ps(minus, v));
  const __m256i bits = _mm256_castps_si256(m);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7ffff)));
  const __m256 normal = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(-(1 << 20))));
  const __m256 magic = _mm256_set1_ps(16384.0f);  // its last mantissa bit is 2^-9
  const __m256 small = _mm256_sub_ps(_mm256_add_ps(m, magic), magic);
  const __m256 subnormal = _mm256_cmp_ps(m, _mm256_set1_ps(0x1p-6f), _CMP_LT_OQ);
  return _mm256_or_ps(_mm256_and_ps(minus, v), _mm256_blendv_ps(normal, small, subnormal));
}

void Quantise(const float* x, int64_t channels, int64_t padded, float* out) {
  const __m256 minus = _mm256_set1_ps(-0.0f);
  for (int64_t block = 0; block < padded; block += 128) {
    const int64_t end = Min(padded, block + 128);
    __m256 a = _mm256_set1_ps(1e-4f);
    for (int64_t i = block; i < end; i += 8) {
      const __m256 v = _mm256_maskload_ps(x + i, LaneMask(channels - i));
      a = _mm256_max_ps(_mm256_andnot_ps(minus, v), a);
    }
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_movehdup_ps(m));
    const float scale = ScaleOf(_mm_cvtss_f32(m));
    const __m256 s = _mm256_set1_ps(scale);
    const __m256 inverse = _mm256_set1_ps(1.0f / scale);
    for (int64_t i = block; i < end; i += 8) {
      const __m256 v = _mm256_maskload_ps(x + i, LaneMask(channels - i));
      const __m256 q = _mm256_mul_ps(RoundE4m3(_mm256_mul_ps(v, inverse)), s);
      _mm256_maskstore_ps(out + i, LaneMask(padded - i), q);
    }
  }
}

}  // namespace

const LinearKernels kLinearAvx2 = {Panel, Quantise, Round};

}  // namespace fathom::ops
