// The panel kernels for AVX-512 (F, BW, DQ, VL, VBMI): see linear_kernels.h for the order of sums
// and packed_weight.h for the layouts.
//
// Few rows: weights are expanded in registers and used at once. More rows: 256 inputs of a panel
// are expanded to f32 in L1, then every group of six rows multiplies with them: 12 independent
// sums, two weight loads and six broadcasts per input keep both multiply-add ports busy.
#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 warns about the undefined pass-through operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "ops/linear/linear_kernels.h"
#include "ops/linear/linear_vector.inc"

namespace fathom::ops {
namespace {

// Each source expands one unit: kUnit inputs of 32 outputs, w[input][output half]. Up to
// kDirectRows rows it is cheaper to expand once per eight rows than to go through the tile.

struct F32Source {
  static constexpr int kUnit = 2;
  static constexpr int kUnitBytes = 256;
  static constexpr int kDirectRows = 32;
  static constexpr int kChunk = 64;
  void Expand(const uint8_t* p, __m512 (&w)[2][2]) const {
    w[0][0] = _mm512_loadu_ps(p);
    w[0][1] = _mm512_loadu_ps(p + 64);
    w[1][0] = _mm512_loadu_ps(p + 128);
    w[1][1] = _mm512_loadu_ps(p + 192);
  }
};

// Words (k0, k1) of one output to two f32 registers.
inline void SplitPairs(__m512i pairs, __m512& first, __m512& second) {
  first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
}

struct Bf16Source {
  static constexpr int kUnit = 2;
  static constexpr int kUnitBytes = 128;
  static constexpr int kDirectRows = 32;
  static constexpr int kChunk = 64;
  void Expand(const uint8_t* p, __m512 (&w)[2][2]) const {
    SplitPairs(_mm512_loadu_si512(p), w[0][0], w[1][0]);
    SplitPairs(_mm512_loadu_si512(p + 64), w[0][1], w[1][1]);
  }
};

// The two bytes of the bfloat16 that equals an e4m3 magnitude, by lookup: exact for subnormals
// too, which an exponent shift would not be.
struct E4m3Tables {
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
  constexpr E4m3Tables() : low(), high() {
    for (int code = 0; code < 128; ++code) {
      int exponent = code >> 3;
      int mantissa = code & 7;
      uint16_t bits = 0;
      if (code == 127) {
        bits = 0x7fc0;
      } else if (exponent > 0) {
        bits = static_cast<uint16_t>(((exponent + 120) << 7) | (mantissa << 4));
      } else if (mantissa > 0) {  // mantissa * 2^-9, normalised
        exponent = 127 - 6;
        while ((mantissa & 8) == 0) {
          mantissa <<= 1;
          --exponent;
        }
        bits = static_cast<uint16_t>((exponent << 7) | ((mantissa & 7) << 4));
      }
      low[code] = static_cast<uint8_t>(bits);
      high[code] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
constexpr E4m3Tables kE4m3;

struct Fp8Source {
  static constexpr int kUnit = 2;
  static constexpr int kUnitBytes = 64;
  static constexpr int kDirectRows = 8;
  static constexpr int kChunk = 64;
  __m512i low0 = _mm512_load_si512(kE4m3.low);
  __m512i low1 = _mm512_load_si512(kE4m3.low + 64);
  __m512i high0 = _mm512_load_si512(kE4m3.high);
  __m512i high1 = _mm512_load_si512(kE4m3.high + 64);
  void Expand(const uint8_t* p, __m512 (&w)[2][2]) const {
    const __m512i codes = _mm512_loadu_si512(p);
    const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
    const __m512i magnitude = _mm512_permutex2var_epi8(high0, codes, high1);
    // magnitude | (codes & 0x80)
    const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(-128), 0xf8);
    SplitPairs(_mm512_unpacklo_epi8(low, high), w[0][0], w[1][0]);
    SplitPairs(_mm512_unpackhi_epi8(low, high), w[0][1], w[1][1]);
  }
};

struct Fp4Source {
  static constexpr int kUnit = 4;
  static constexpr int kUnitBytes = 64;
  static constexpr int kDirectRows = 16;
  static constexpr int kChunk = 32;
  __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f,
                                 -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f);
  // permutexvar uses the low four bits of each dword: the nibble that was shifted there.
  template <int kShift>
  __m512 Nibble(__m512i codes) const {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(codes, kShift), values);
  }
  void Expand(const uint8_t* p, __m512 (&w)[4][2]) const {
    const __m512i codes = _mm512_loadu_si512(p);
    w[0][0] = _mm512_permutexvar_ps(codes, values);
    w[0][1] = Nibble<4>(codes);
    w[2][0] = Nibble<8>(codes);
    w[2][1] = Nibble<12>(codes);
    w[1][0] = Nibble<16>(codes);
    w[1][1] = Nibble<20>(codes);
    w[3][0] = Nibble<24>(codes);
    w[3][1] = Nibble<28>(codes);
  }
};

// total += partial * scale of the chunk that starts at input k; half 0 or 1 of the panel.
template <class Source>
inline __m512 AddChunk(const uint8_t* scales, int64_t k, int half, __m512 partial, __m512 total) {
  if constexpr (Source::kUnitBytes == Fp8Source::kUnitBytes && Source::kUnit == 2) {
    return _mm512_fmadd_ps(partial, _mm512_set1_ps(E8m0(scales[k / 128])), total);
  } else if constexpr (Source::kUnit == 4) {
    const __m128i bytes = _mm_loadu_si128(
        reinterpret_cast<const __m128i*>(scales + k / 32 * kPanelOutputs + half * 16));
    const __m512i exponent = _mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23);
    // Byte 0 is 2^-127, the one scale that is no normal f32.
    const __m512i bits = _mm512_max_epu32(exponent, _mm512_set1_epi32(0x00400000));
    return _mm512_fmadd_ps(partial, _mm512_castsi512_ps(bits), total);
  } else {
    return _mm512_add_ps(partial, total);
  }
}

inline __m512 RoundBf16(__m512 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i rounded = _mm512_and_si512(up, _mm512_set1_epi32(-65536));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_mask_mov_ps(_mm512_castsi512_ps(rounded), nan, v);
}

inline __mmask16 HalfMask(int64_t cols, int half) {
  const int64_t left = cols - 16 * half;
  return left >= 16 ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1u << left) - 1);
}

// Decode streams weights from memory: the hardware prefetcher stops at every 4 KiB page. At a
// panel's end this reads ahead into the next panel, which comes next or is at work already.
constexpr int kPrefetchBytes = 4096;

// Rows r0 .. r0+kRows-1, kPanels panels, weights expanded in registers.
template <class Source, int kRows, int kPanels>
void Direct(const PanelJob& job, int64_t panel, int64_t r0) {
  const Source source;
  const float* x[kRows];
  for (int r = 0; r < kRows; ++r) x[r] = RowOf(job, r0 + r);
  const uint8_t* weights[kPanels];
  const uint8_t* scales[kPanels];
  for (int p = 0; p < kPanels; ++p) {
    weights[p] = job.weights + (panel + p) * job.panel_bytes;
    scales[p] = job.scales + (panel + p) * job.panel_scales;
  }
  alignas(64) float total[kPanels][kRows][kPanelOutputs];
  for (int64_t k0 = 0; k0 < job.depth; k0 += Source::kChunk) {
    const int64_t k1 = Min(job.depth, k0 + Source::kChunk);
    __m512 partial[kPanels][kRows][2];
    for (auto& panel_partial : partial) {
      for (auto& row : panel_partial) row[0] = row[1] = _mm512_setzero_ps();
    }
    for (int64_t k = k0; k < k1; k += Source::kUnit) {
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        __m512 w[Source::kUnit][2];
        source.Expand(weights[p], w);
        for (int line = 0; line < Source::kUnitBytes; line += 64) {
          _mm_prefetch(weights[p] + kPrefetchBytes + line, _MM_HINT_T0);
        }
        weights[p] += Source::kUnitBytes;
#pragma GCC unroll 4
        for (int i = 0; i < Source::kUnit; ++i) {
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
            const __m512 value = _mm512_set1_ps(x[r][k + i]);
            partial[p][r][0] = _mm512_fmadd_ps(value, w[i][0], partial[p][r][0]);
            partial[p][r][1] = _mm512_fmadd_ps(value, w[i][1], partial[p][r][1]);
          }
        }
      }
    }
    // Keeps the totals in memory between chunks: the partial sums need the registers.
    asm volatile("" : : : "memory");
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        for (int half = 0; half < 2; ++half) {
          float* sum = total[p][r] + 16 * half;
          const __m512 before = k0 == 0 ? _mm512_setzero_ps() : _mm512_load_ps(sum);
          _mm512_store_ps(sum, AddChunk<Source>(scales[p], k0, half, partial[p][r][half], before));
        }
      }
    }
  }
  for (int p = 0; p < kPanels; ++p) {
    for (int r = 0; r < kRows; ++r) {
      float* y = job.y + (r0 + r) * job.y_stride + (panel + p) * kPanelOutputs;
      for (int half = 0; half < 2; ++half) {
        const __mmask16 mask = HalfMask(job.cols - (panel + p) * kPanelOutputs, half);
        const __m512 value = _mm512_load_ps(total[p][r] + 16 * half);
        _mm512_mask_storeu_ps(y + 16 * half, mask, job.round ? RoundBf16(value) : value);
      }
    }
  }
}

template <class Source>
void ExpandTile(const uint8_t* weights, int64_t inputs, float* tile) {
  const Source source;
  for (int64_t k = 0; k < inputs; k += Source::kUnit, weights += Source::kUnitBytes) {
    __m512 w[Source::kUnit][2];
    source.Expand(weights, w);
#pragma GCC unroll 4
    for (int i = 0; i < Source::kUnit; ++i, tile += kPanelOutputs) {
      _mm512_store_ps(tile, w[i][0]);
      _mm512_store_ps(tile + 16, w[i][1]);
    }
  }
}

// Inputs [begin, end) of kRows rows against the tile; totals are carried in y.
template <class Source, int kRows>
void TileRows(const PanelJob& job, int64_t panel, int64_t r0, int64_t begin, int64_t end) {
  const float* x[kRows];
  for (int r = 0; r < kRows; ++r) x[r] = RowOf(job, r0 + r);
  const uint8_t* scales = job.scales + panel * job.panel_scales;
  float* y = job.y + r0 * job.y_stride + panel * kPanelOutputs;
  const __mmask16 mask0 = HalfMask(job.cols - panel * kPanelOutputs, 0);
  const __mmask16 mask1 = HalfMask(job.cols - panel * kPanelOutputs, 1);
  alignas(64) float total[kRows][kPanelOutputs];
  for (int r = 0; r < kRows; ++r) {
    const float* row = y + r * job.y_stride;
    const __mmask16 carried = begin == 0 ? 0 : 0xffff;
    _mm512_store_ps(total[r], _mm512_maskz_loadu_ps(mask0 & carried, row));
    _mm512_store_ps(total[r] + 16, _mm512_maskz_loadu_ps(mask1 & carried, row + 16));
  }
  const float* tile = job.tile;
  for (int64_t k0 = begin; k0 < end; k0 += Source::kChunk) {
    const int64_t k1 = Min(end, k0 + Source::kChunk);
    __m512 partial[kRows][2];
    for (auto& row : partial) row[0] = row[1] = _mm512_setzero_ps();
    for (int64_t k = k0; k < k1; ++k, tile += kPanelOutputs) {
      const __m512 w0 = _mm512_load_ps(tile);
      const __m512 w1 = _mm512_load_ps(tile + 16);
#pragma GCC unroll 6
      for (int r = 0; r < kRows; ++r) {
        const __m512 value = _mm512_set1_ps(x[r][k]);
        partial[r][0] = _mm512_fmadd_ps(value, w0, partial[r][0]);
        partial[r][1] = _mm512_fmadd_ps(value, w1, partial[r][1]);
      }
    }
    // Keeps the totals in memory between chunks: the partial sums need the registers.
    asm volatile("" : : : "memory");
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      float* sum = total[r];
      _mm512_store_ps(sum, AddChunk<Source>(scales, k0, 0, partial[r][0], _mm512_load_ps(sum)));
      _mm512_store_ps(sum + 16,
                      AddChunk<Source>(scales, k0, 1, partial[r][1], _mm512_load_ps(sum + 16)));
    }
  }
  const bool round = job.round && end == job.depth;
  for (int r = 0; r < kRows; ++r) {
    const __m512 low = _mm512_load_ps(total[r]);
    const __m512 high = _mm512_load_ps(total[r] + 16);
    float* row = y + r * job.y_stride;
    _mm512_mask_storeu_ps(row, mask0, round ? RoundBf16(low) : low);
    _mm512_mask_storeu_ps(row + 16, mask1, round ? RoundBf16(high) : high);
  }
}

constexpr int kMaxRows = 6;

// The kernel of `rows` rows, 1..kMaxRows.
template <class Source, int kRows = kMaxRows>
void SomeRows(const PanelJob& job, int64_t rows, int64_t panel, int64_t r0, int64_t begin,
              int64_t end) {
  if (rows == kRows) return TileRows<Source, kRows>(job, panel, r0, begin, end);
  if constexpr (kRows > 1) SomeRows<Source, kRows - 1>(job, rows, panel, r0, begin, end);
}

template <class Source>
void Tiled(const PanelJob& job) {
  // Even groups: a group of one or two rows would wait for its few sums.
  const int64_t groups = (job.rows + kMaxRows - 1) / kMaxRows;
  // With few rows a short tile lets the expansion of the next overlap the products of this one.
  const int64_t depth = job.rows <= 16 ? 128 : kPanelTileDepth;
  for (int64_t panel = 0; panel < job.panels; ++panel) {
    for (int64_t begin = 0; begin < job.depth; begin += depth) {
      const int64_t end = Min(job.depth, begin + depth);
      const uint8_t* weights =
          job.weights + panel * job.panel_bytes + begin / Source::kUnit * Source::kUnitBytes;
      ExpandTile<Source>(weights, end - begin, job.tile);
      const int64_t bytes = depth / Source::kUnit * Source::kUnitBytes;
      for (int64_t line = 0; line < bytes; line += 64) {
        _mm_prefetch(weights + bytes + line, _MM_HINT_T1);
      }
      int64_t r = 0;
      for (int64_t group = 1; group <= groups; ++group) {
        const int64_t next = job.rows * group / groups;
        SomeRows<Source>(job, next - r, panel, r, begin, end);
        r = next;
      }
    }
  }
}

// Rows r0 .. r0+rows-1 of `count` (1 or 2) panels; up to three rows have few enough sums for two
// panels at once, and need them to cover the latency of the multiply-add.
template <class Source, int kRows = 8>
void DirectRows(const PanelJob& job, int64_t rows, int64_t panel, int64_t count, int64_t r0) {
  if (rows < kRows) {
    if constexpr (kRows > 1) DirectRows<Source, kRows - 1>(job, rows, panel, count, r0);
  } else if constexpr (kRows <= 3) {
    if (count == 2) return Direct<Source, kRows, 2>(job, panel, r0);
    Direct<Source, kRows, 1>(job, panel, r0);
  } else {
    for (int64_t p = 0; p < count; ++p) Direct<Source, kRows, 1>(job, panel + p, r0);
  }
}

template <class Source>
void RunPanels(const PanelJob& job) {
  if (job.rows > Source::kDirectRows) return Tiled<Source>(job);
  const int64_t groups = (job.rows + 7) / 8;
  for (int64_t panel = 0; panel < job.panels; panel += 2) {
    const int64_t count = Min(2, job.panels - panel);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t r0 = job.rows * group / groups;
      DirectRows<Source>(job, job.rows * (group + 1) / groups - r0, panel, count, r0);
    }
  }
}

void Panel(const PanelJob& job) {
  switch (job.format) {
    case WeightFormat::kF32: return RunPanels<F32Source>(job);
    case WeightFormat::kBF16: return RunPanels<Bf16Source>(job);
    case WeightFormat::kFp8Block128: return RunPanels<Fp8Source>(job);
    case WeightFormat::kFp4Block32: return RunPanels<Fp4Source>(job);
  }
}

void Round(const float* x, int64_t channels, int64_t padded, float* out) {
  for (int64_t i = 0; i < padded; i += 16) {
    const __mmask16 in = HalfMask(channels - i, 0);
    const __m512 v = RoundBf16(_mm512_maskz_loadu_ps(in, x + i));
    _mm512_mask_storeu_ps(out + i, HalfMask(padded - i, 0), v);
  }
}

// e4m3(v) as a value, |v| <= 448: three mantissa bits, or a multiple of 2^-9 below 2^-6.
inline __m512 RoundE4m3(__m512 v) {
  const __m512 sign = _mm512_and_ps(v, _mm512_set1_ps(-0.0f));
  const __m512 m =
      _mm512_min_ps(_mm512_set1_ps(448.0f), _mm512_andnot_ps(_mm512_set1_ps(-0.0f), v));
  const __m512i bits = _mm512_castps_si512(m);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff)));
  const __m512i normal = _mm512_and_si512(up, _mm512_set1_epi32(-(1 << 20)));
  const __m512 magic = _mm512_set1_ps(16384.0f);  // its last mantissa bit is 2^-9
  const __m512 small = _mm512_sub_ps(_mm512_add_ps(m, magic), magic);
  const __mmask16 subnormal = _mm512_cmp_ps_mask(m, _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
  return _mm512_or_ps(sign, _mm512_mask_mov_ps(_mm512_castsi512_ps(normal), subnormal, small));
}

void Quantise(const float* x, int64_t channels, int64_t padded, float* out) {
  for (int64_t block = 0; block < padded; block += 128) {
    __m512 v[8];
    __m512 a = _mm512_set1_ps(1e-4f);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      v[i] = _mm512_maskz_loadu_ps(HalfMask(channels - block - 16 * i, 0), x + block + 16 * i);
      a = _mm512_max_ps(_mm512_andnot_ps(_mm512_set1_ps(-0.0f), v[i]), a);
    }
    const float scale = ScaleOf(_mm512_reduce_max_ps(a));
    const __m512 s = _mm512_set1_ps(scale);
    const __m512 inverse = _mm512_set1_ps(1.0f / scale);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const __m512 q = _mm512_mul_ps(RoundE4m3(_mm512_mul_ps(v[i], inverse)), s);
      _mm512_mask_storeu_ps(out + block + 16 * i, HalfMask(padded - block - 16 * i, 0), q);
    }
  }
}

}  // namespace

const LinearKernels kLinearAvx512 = {Panel, Quantise, Round};

}  // namespace fathom::ops
