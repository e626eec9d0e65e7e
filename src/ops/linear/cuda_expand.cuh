// Weights and activations as the tensor cores take them: bf16 words in registers.
//
// Order of inputs. Within a unit of 128 inputs, quarter-lane q (lane & 3) of a warp takes 32
// inputs, as 4 chunks of 8 consecutive ones; chunk e begins at UnitChunk<F>(q, e). The chunks are
// chosen so that one 16-byte load of a weight row per lane covers whole 64-byte pieces. mma number
// 2e+i of the unit contracts words 2i, 2i+1 of chunk e, of weight and activation alike.
#pragma once

#include "ops/cuda/common.cuh"
#include "ops/linear/cuda.h"
#include "ops/linear/fp4_words.h"
#include "ops/linear/fp8_words.h"

namespace fathom::ops::cuda {

inline constexpr int kUnit = static_cast<int>(kCudaUnit);
inline constexpr int kSegments = 8;

using Format = WeightFormat;

// Inputs per 16-byte load.
template <Format F>
inline constexpr int kLoadInputs = F == Format::kFp4Block32    ? 32
                                   : F == Format::kFp8Block128 ? 16
                                                               : 8;

// Bytes of one unit of a weight row.
template <Format F>
inline constexpr int kUnitBytes = kUnit * 16 / kLoadInputs<F>;

// Order of weights, F32 ones apart: tiles of 16 outputs, in a tile one piece of 64 bytes of every
// row after the other. A tile's unit lies together, as does what comes next: memory gives pieces of
// 64 bytes of 16 rows at half of its rate.
inline constexpr int kTile = static_cast<int>(kCudaTile);
inline constexpr int kPieceBytes = static_cast<int>(kCudaPiece);
inline constexpr int kTilePieceBytes = kTile * kPieceBytes;
template <Format F>
inline constexpr int kUnitPieces = kUnitBytes<F> / kPieceBytes;

// Where a row's piece begins, of `pieces` in a row; in pieces.
__device__ inline int64_t PieceOf(int64_t row, int piece, int pieces) {
  return (row / kTile * pieces + piece) * kTile + row % kTile;
}

template <Format F>
__device__ constexpr int UnitChunk(int q, int e) {
  constexpr int c = kLoadInputs<F>;
  return 4 * c * (8 * e / c) + c * q + 8 * e % c;
}

__device__ inline uint32_t MultiplyBf16x2(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// The scale of a chunk as factors of raw words, in which a stored exponent field stands in bf16's:
// too small by 2^120 (e4m3, bias 7) or 2^126 (e2m1, bias 1). bf16 ends at 2^127, so a large scale
// needs a second factor.
struct ChunkScale {
  uint32_t factor;
  uint32_t second;
};

// wide: whether the second factor may be another one than 1.
template <Format F>
__device__ inline ChunkScale MakeScale(uint32_t ue8m0, bool wide) {
  const uint32_t field = ue8m0 + (F == Format::kFp4Block32 ? 126u : 120u);
  const uint32_t first = wide ? min(field, 254u) : field;
  return {(first << 7) * 0x00010001u, ((127u + field - first) << 7) * 0x00010001u};
}

__device__ inline void ApplyScale(const ChunkScale& scale, bool wide, uint32_t word[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = MultiplyBf16x2(word[i], scale.factor);
  if (!wide) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = MultiplyBf16x2(word[i], scale.second);
}

// The eight e4m3 codes of two words.
__device__ inline void ExpandFp8(uint32_t low, uint32_t high, const ChunkScale& scale, bool wide,
                                 uint32_t word[4]) {
  Fp8Pairs(low, word);
  Fp8Pairs(high, word + 2);
  ApplyScale(scale, wide, word);
}

// The eight e2m1 codes of a word.
__device__ inline void ExpandFp4(uint32_t codes, const ChunkScale& scale, bool wide,
                                 uint32_t word[4]) {
  Fp4Pairs(codes, word);
  ApplyScale(scale, wide, word);
}

// The stored weight times its scale, for the float kernels.
__device__ inline float WeightValue(const CudaWeightView& w, int row, int k) {
  const int units = w.depth / kUnit;
  // The byte that holds the weight.
  const auto at = [&](int bits) {
    const int byte = k * bits / 8, pieces = w.depth / 8 * bits / kPieceBytes;
    return PieceOf(row, byte / kPieceBytes, pieces) * kPieceBytes + byte % kPieceBytes;
  };
  switch (w.format) {
    case Format::kF32: return reinterpret_cast<const float*>(w.data)[int64_t{row} * w.depth + k];
    case Format::kBF16:
      return __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(w.data + at(16)));
    case Format::kFp8Block128: {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(w.data + at(8) / 4 * 4);
      return FromE4m3(static_cast<uint8_t>(Fp8Code(word, k % 4))) *
             FromE8m0(w.scale[int64_t{row >> 7} * units + k / kUnit]);
    }
    case Format::kFp4Block32: {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(w.data + at(4) / 4 * 4);
      const uint32_t code = Fp4Code(word, k % 8);
      // 0 .5 1 1.5 2 3 4 6, doubled, one per nibble.
      const float magnitude = 0.5f * static_cast<float>((0xc8643210u >> (4 * (code & 7u))) & 15u);
      const float scale = FromE8m0(w.scale[PieceOf(row, k / kUnit, units) * 4 + k % kUnit / 32]);
      return ((code & 8u) != 0 ? -magnitude : magnitude) * scale;
    }
  }
  return 0;
}

// d += a b: a [16 outputs, 16 inputs], b [16 inputs, 8 rows].
__device__ inline void Mma(float d[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                           uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The first unit of segment s of `units`.
__device__ inline int SegmentBegin(int s, int units) {
  return s * units / kSegments;
}

}  // namespace fathom::ops::cuda
