// quantise on the device: a warp holds one row in registers and rounds, encodes or decodes it.
// Byte-equal with the scalar forms of quantise.h.
//
// A row of 32*N channels (N = 16: 512 channels, N = 4: 128) is spread so that lane l owns the N
// consecutive channels N*l .. N*l + N-1; every lane of the warp must call.
//
//   float v[16];
//   LoadWarpRow(x, v, lane);                                   // x: shared or global memory
//   EncodeWarpRow(rows.format, v, data, scale, lane);          // as EncodeRow
//   DecodeWarpRow(rows.format, data, scale, v, lane);          // as DecodeRow
//   const float k = DecodeChannel(rows.format, data, scale, c);  // one channel, one thread
//
// `data` needs 16-byte alignment, `scale` 4-byte: what PagedRows gives in every cache and in step
// rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cuda/common.cuh"
#include "ops/paged_rows.h"

namespace fathom::ops::cuda {

// Scale of one e4m3 block whose largest magnitude is `amax`.
__device__ inline float E4m3Scale(float amax) {
  return PowerOfTwoUp(fmaxf(amax, 1e-4f) * (1.0f / 448.0f));
}

__device__ inline float Fp4Scale(float amax) {
  return PowerOfTwoUp(fmaxf(amax, 6 * 0x1p-126f) * (1.0f / 6.0f));
}

// Exponent byte of a power of two.
__device__ inline uint8_t ScaleByte(float power) {
  return static_cast<uint8_t>(__float_as_uint(power) >> 23);
}

// Nearest e2m1 code, ties to the even code; beyond 6 saturates.
__device__ inline uint8_t ToE2m1(float value) {
  const float m = fabsf(value);
  const int code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) +
                   (m >= 3.5f) + (m > 5.0f);
  return static_cast<uint8_t>(code | ((__float_as_uint(value) >> 28) & 8u));
}

// 0 .5 1 1.5 2 3 4 6, sign in bit 3.
__device__ inline float FromE2m1(uint8_t code) {
  const int exponent = (code >> 1) & 3;
  const int mantissa = code & 1;
  const float magnitude =
      exponent == 0
          ? 0.5f * mantissa
          : __uint_as_float((126u + exponent) << 23 | static_cast<uint32_t>(mantissa) << 22);
  return (code & 8) ? -magnitude : magnitude;
}

// Largest over the aligned group of `lanes` lanes (a power of two).
__device__ inline float GroupMax(float x, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

template <int N>
__device__ inline float MaxAbs(const float (&v)[N]) {
  float best = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) best = fmaxf(best, fabsf(v[i]));
  return best;
}

template <int N>
__device__ inline void LoadWarpRow(const float* x, float (&v)[N], int lane) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(x + lane * N + i);
    v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
  }
}

template <int N>
__device__ inline void StoreWarpRow(const float (&v)[N], float* x, int lane) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    *reinterpret_cast<float4*>(x + lane * N + i) = {v[i], v[i + 1], v[i + 2], v[i + 3]};
  }
}

__device__ inline float2 Bf16Pair(uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
__device__ inline uint32_t Bf16Word(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <int N>
__device__ inline void LoadWarpRow(const __nv_bfloat16* x, float (&v)[N], int lane) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const uint2 words = *reinterpret_cast<const uint2*>(x + lane * N + i);
    const float2 a = Bf16Pair(words.x), b = Bf16Pair(words.y);
    v[i] = a.x, v[i + 1] = a.y, v[i + 2] = b.x, v[i + 3] = b.y;
  }
}

template <int N>
__device__ inline void StoreWarpRow(const float (&v)[N], __nv_bfloat16* x, int lane) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    *reinterpret_cast<uint2*>(x + lane * N + i) = {Bf16Word(v[i], v[i + 1]),
                                                   Bf16Word(v[i + 2], v[i + 3])};
  }
}

// Four values as e4m3 codes, the first in the low byte.
__device__ inline uint32_t FourE4m3(const float* v, float inverse) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(ToE4m3(v[i] * inverse)) << (8 * i);
  return word;
}

// RoundKvRow (model.md 4.2 step 6): 64-channel blocks are four lanes; lanes 28..31 hold the rotary
// channels and stay.
__device__ inline void RoundKvWarpRow(float (&v)[16], int lane) {
  const float scale = E4m3Scale(GroupMax(MaxAbs(v), 4));
  const float inverse = 1.0f / scale;  // exact: a power of two
  if (lane >= 28) return;
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] = RoundBf16(FromE4m3(ToE4m3(v[i] * inverse)) * scale);
}

// HadamardRow (model.md 5.6) on 128 channels: the same additions in the same order.
__device__ inline void HadamardWarpRow(float (&v)[4], int lane, bool round) {
  const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
  v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const bool upper = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, v[i], offset);
      v[i] = upper ? other - v[i] : v[i] + other;
    }
  }
  constexpr float kScale = 0.08838834764831845f;  // 128^-0.5
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = RoundIf(v[i] * kScale, round);
}

// RoundFp4Row on 128 channels: 32-channel blocks are eight lanes.
__device__ inline void RoundFp4WarpRow(float (&v)[4]) {
  const float scale = Fp4Scale(GroupMax(MaxAbs(v), 8));
  const float inverse = 1.0f / scale;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = RoundBf16(FromE2m1(ToE2m1(v[i] * inverse)) * scale);
}

// One 128-channel block of QuantiseActivationRow, which is RoundFp8IndexRow too; lanes past a short
// block's end pass zeros.
__device__ inline void RoundFp8WarpBlock(float (&v)[4]) {
  const float scale = E4m3Scale(WarpMax(MaxAbs(v)));
  const float inverse = 1.0f / scale;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = FromE4m3(ToE4m3(v[i] * inverse)) * scale;
}

template <int N>
__device__ inline void EncodeWarpRow(RowFormat format, const float (&v)[N], std::byte* data,
                                     std::byte* scale, int lane) {
  static_assert(N == 16 || N == 4);
  if (format == RowFormat::kF32) {
    StoreWarpRow(v, reinterpret_cast<float*>(data), lane);
  } else if (format == RowFormat::kBf16) {
    StoreWarpRow(v, reinterpret_cast<__nv_bfloat16*>(data), lane);
  } else if constexpr (N == 16) {  // kFp8Main
    const float s = E4m3Scale(GroupMax(MaxAbs(v), 4));
    const float inverse = 1.0f / s;
    if (lane < 28) {
      uint4 codes;
      codes.x = FourE4m3(v, inverse);
      codes.y = FourE4m3(v + 4, inverse);
      codes.z = FourE4m3(v + 8, inverse);
      codes.w = FourE4m3(v + 12, inverse);
      *reinterpret_cast<uint4*>(data + lane * 16) = codes;
    } else {
      auto* rope = reinterpret_cast<__nv_bfloat16*>(data + kNopeDim);
      StoreWarpRow(v, rope, lane - 28);
    }
    if (lane % 4 == 0) {
      reinterpret_cast<uint8_t*>(scale)[lane / 4] = lane < 28 ? ScaleByte(s) : uint8_t{0};
    }
  } else if (format == RowFormat::kFp8Index) {
    const float s = E4m3Scale(WarpMax(MaxAbs(v)));
    reinterpret_cast<uint32_t*>(data)[lane] = FourE4m3(v, 1.0f / s);
    if (lane == 0) *reinterpret_cast<float*>(scale) = s;
  } else {  // kFp4Index
    const float s = Fp4Scale(GroupMax(MaxAbs(v), 8));
    const float inverse = 1.0f / s;
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      codes |= static_cast<uint32_t>(ToE2m1(v[i] * inverse)) << (4 * i);
    }
    reinterpret_cast<uint16_t*>(data)[lane] = static_cast<uint16_t>(codes);
    if (lane % 8 == 0) reinterpret_cast<uint8_t*>(scale)[lane / 8] = ScaleByte(s);
  }
}

template <int N>
__device__ inline void DecodeWarpRow(RowFormat format, const std::byte* data,
                                     const std::byte* scale, float (&v)[N], int lane) {
  static_assert(N == 16 || N == 4);
  const auto* scales = reinterpret_cast<const uint8_t*>(scale);
  if (format == RowFormat::kF32) {
    LoadWarpRow(reinterpret_cast<const float*>(data), v, lane);
  } else if (format == RowFormat::kBf16) {
    LoadWarpRow(reinterpret_cast<const __nv_bfloat16*>(data), v, lane);
  } else if constexpr (N == 16) {  // kFp8Main
    if (lane < 28) {
      const uint4 codes = *reinterpret_cast<const uint4*>(data + lane * 16);
      const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
      const float s = FromE8m0(scales[lane / 4]);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        v[i] = FromE4m3(static_cast<uint8_t>(words[i / 4] >> (8 * (i % 4)))) * s;
      }
    } else {
      LoadWarpRow(reinterpret_cast<const __nv_bfloat16*>(data + kNopeDim), v, lane - 28);
    }
  } else if (format == RowFormat::kFp8Index) {
    const uint32_t word = reinterpret_cast<const uint32_t*>(data)[lane];
    const float s = *reinterpret_cast<const float*>(scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = FromE4m3(static_cast<uint8_t>(word >> (8 * i))) * s;
  } else {  // kFp4Index
    const uint32_t word = reinterpret_cast<const uint16_t*>(data)[lane];
    const float s = FromE8m0(scales[lane / 8]);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = FromE2m1(static_cast<uint8_t>((word >> (4 * i)) & 15u)) * s;
  }
}

__device__ inline float DecodeChannel(RowFormat format, const std::byte* data,
                                      const std::byte* scale, int channel) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(data);
  const auto* scales = reinterpret_cast<const uint8_t*>(scale);
  switch (format) {
    case RowFormat::kF32: return reinterpret_cast<const float*>(data)[channel];
    case RowFormat::kBf16:
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(data)[channel]);
    case RowFormat::kFp8Main:
      if (channel >= kNopeDim) {
        return __bfloat162float(
            reinterpret_cast<const __nv_bfloat16*>(data + kNopeDim)[channel - kNopeDim]);
      }
      return FromE4m3(bytes[channel]) * FromE8m0(scales[channel / 64]);
    case RowFormat::kFp8Index:
      return FromE4m3(bytes[channel]) * *reinterpret_cast<const float*>(scale);
    case RowFormat::kFp4Index:
      return FromE2m1((bytes[channel / 2] >> (4 * (channel & 1))) & 15) *
             FromE8m0(scales[channel / 32]);
  }
  return 0.0f;
}

// PagedRows::data and ::scale are host functions; these are the same addresses on the device.
__device__ inline int64_t RowDataBytesOf(RowFormat format, int channels) {
  switch (format) {
    case RowFormat::kF32: return int64_t{channels} * 4;
    case RowFormat::kBf16: return int64_t{channels} * 2;
    case RowFormat::kFp8Main: return 576;
    case RowFormat::kFp8Index: return 128;
    case RowFormat::kFp4Index: return 64;
  }
  return 0;
}
__device__ inline int64_t RowScaleBytesOf(RowFormat format) {
  return format == RowFormat::kFp8Main                                      ? 8
         : format == RowFormat::kFp8Index || format == RowFormat::kFp4Index ? 4
                                                                            : 0;
}
__device__ inline std::byte* RowData(const PagedRows& rows, int32_t block, int32_t row) {
  return rows.base + block * rows.block_stride + row * RowDataBytesOf(rows.format, rows.channels);
}
__device__ inline std::byte* RowScale(const PagedRows& rows, int32_t block, int32_t row) {
  return rows.base + block * rows.block_stride +
         rows.rows_per_page * RowDataBytesOf(rows.format, rows.channels) +
         row * RowScaleBytesOf(rows.format);
}

}  // namespace fathom::ops::cuda
