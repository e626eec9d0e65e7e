#include "ops/quantise/quantise.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/dtype.h"
#include "core/status.h"
#include "ops/numerics.h"

namespace fathom::ops {
namespace {

float MaxAbs(const float* x, int64_t n) {
  float best = 0.0f;
  for (int64_t i = 0; i < n; ++i) best = std::max(best, std::fabs(x[i]));
  return best;
}

// Scale of one e4m3 block whose largest magnitude is `amax`.
float E4m3Scale(float amax) {
  return PowerOfTwoUp(std::max(amax, 1e-4f) * (1.0f / 448.0f));
}

float Fp4Scale(float amax) {
  return PowerOfTwoUp(std::max(amax, 6 * 0x1p-126f) * (1.0f / 6.0f));
}

constexpr int kKvBlock = 64;
constexpr int kFp4Block = 32;

}  // namespace

void QuantiseActivationRow(float* x, int64_t channels) {
  for (int64_t begin = 0; begin < channels; begin += 128) {
    const int64_t n = std::min<int64_t>(128, channels - begin);
    const float scale = E4m3Scale(MaxAbs(x + begin, n));
    const float inverse = 1.0f / scale;  // exact: a power of two
    for (int64_t i = begin; i < begin + n; ++i) x[i] = E4m3ToF32(F32ToE4m3(x[i] * inverse)) * scale;
  }
}

void RoundKvRow(float* x) {
  for (int begin = 0; begin < kNopeDim; begin += kKvBlock) {
    const float scale = E4m3Scale(MaxAbs(x + begin, kKvBlock));
    const float inverse = 1.0f / scale;
    for (int i = begin; i < begin + kKvBlock; ++i) {
      x[i] = RoundBf16(E4m3ToF32(F32ToE4m3(x[i] * inverse)) * scale);
    }
  }
}

void HadamardRow(float* x, bool round) {
  // Fast Walsh-Hadamard transform in Sylvester order: strides 1, 2, 4, ... 64.
  for (int stride = 1; stride < kIndexDim; stride *= 2) {
    for (int begin = 0; begin < kIndexDim; begin += 2 * stride) {
      for (int i = begin; i < begin + stride; ++i) {
        const float a = x[i];
        const float b = x[i + stride];
        x[i] = a + b;
        x[i + stride] = a - b;
      }
    }
  }
  constexpr float kScale = 0.08838834764831845f;  // 128^-0.5
  for (int i = 0; i < kIndexDim; ++i) x[i] = round ? RoundBf16(x[i] * kScale) : x[i] * kScale;
}

void RoundFp4Row(float* x) {
  for (int begin = 0; begin < kIndexDim; begin += kFp4Block) {
    const float scale = Fp4Scale(MaxAbs(x + begin, kFp4Block));
    const float inverse = 1.0f / scale;
    for (int i = begin; i < begin + kFp4Block; ++i) {
      x[i] = RoundBf16(E2m1ToF32(F32ToE2m1(x[i] * inverse)) * scale);
    }
  }
}

void RoundFp8IndexRow(float* x) {
  const float scale = E4m3Scale(MaxAbs(x, kIndexDim));
  const float inverse = 1.0f / scale;
  for (int i = 0; i < kIndexDim; ++i) x[i] = E4m3ToF32(F32ToE4m3(x[i] * inverse)) * scale;
}

void EncodeRow(RowFormat format, int channels, const float* x, std::byte* data, std::byte* scale) {
  auto* bytes = reinterpret_cast<uint8_t*>(data);
  auto* scales = reinterpret_cast<uint8_t*>(scale);
  switch (format) {
    case RowFormat::kF32: std::memcpy(data, x, sizeof(float) * channels); return;
    case RowFormat::kBf16: {
      auto* out = reinterpret_cast<bf16_t*>(data);
      for (int i = 0; i < channels; ++i) out[i] = F32ToBf16(x[i]);
      return;
    }
    case RowFormat::kFp8Main: {
      FATHOM_CHECK(channels == kHeadDim);
      for (int block = 0; block < kNopeDim / kKvBlock; ++block) {
        const float* in = x + block * kKvBlock;
        const float s = E4m3Scale(MaxAbs(in, kKvBlock));
        const float inverse = 1.0f / s;
        for (int i = 0; i < kKvBlock; ++i) bytes[block * kKvBlock + i] = F32ToE4m3(in[i] * inverse);
        scales[block] = PowerOfTwoByte(s);
      }
      scales[7] = 0;
      auto* rope = reinterpret_cast<bf16_t*>(bytes + kNopeDim);
      for (int i = 0; i < kRopeDim; ++i) rope[i] = F32ToBf16(x[kNopeDim + i]);
      return;
    }
    case RowFormat::kFp8Index: {
      FATHOM_CHECK(channels == kIndexDim);
      const float s = E4m3Scale(MaxAbs(x, kIndexDim));
      const float inverse = 1.0f / s;
      for (int i = 0; i < kIndexDim; ++i) bytes[i] = F32ToE4m3(x[i] * inverse);
      std::memcpy(scale, &s, sizeof(s));
      return;
    }
    case RowFormat::kFp4Index: {
      FATHOM_CHECK(channels == kIndexDim);
      for (int block = 0; block < kIndexDim / kFp4Block; ++block) {
        const float* in = x + block * kFp4Block;
        const float s = Fp4Scale(MaxAbs(in, kFp4Block));
        const float inverse = 1.0f / s;
        for (int i = 0; i < kFp4Block; i += 2) {
          bytes[(block * kFp4Block + i) / 2] = static_cast<uint8_t>(
              F32ToE2m1(in[i] * inverse) | (F32ToE2m1(in[i + 1] * inverse) << 4));
        }
        scales[block] = PowerOfTwoByte(s);
      }
      return;
    }
  }
}

void DecodeRow(RowFormat format, int channels, const std::byte* data, const std::byte* scale,
               float* x) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(data);
  const auto* scales = reinterpret_cast<const uint8_t*>(scale);
  switch (format) {
    case RowFormat::kF32: std::memcpy(x, data, sizeof(float) * channels); return;
    case RowFormat::kBf16: {
      const auto* in = reinterpret_cast<const bf16_t*>(data);
      for (int i = 0; i < channels; ++i) x[i] = Bf16ToF32(in[i]);
      return;
    }
    case RowFormat::kFp8Main: {
      for (int i = 0; i < kNopeDim; ++i)
        x[i] = E4m3ToF32(bytes[i]) * E8m0ToF32(scales[i / kKvBlock]);
      const auto* rope = reinterpret_cast<const bf16_t*>(bytes + kNopeDim);
      for (int i = 0; i < kRopeDim; ++i) x[kNopeDim + i] = Bf16ToF32(rope[i]);
      return;
    }
    case RowFormat::kFp8Index: {
      float s = 0.0f;
      std::memcpy(&s, scale, sizeof(s));
      for (int i = 0; i < kIndexDim; ++i) x[i] = E4m3ToF32(bytes[i]) * s;
      return;
    }
    case RowFormat::kFp4Index: {
      for (int i = 0; i < kIndexDim; ++i) {
        const uint8_t code = (i & 1) ? bytes[i / 2] >> 4 : bytes[i / 2] & 15;
        x[i] = E2m1ToF32(code) * E8m0ToF32(scales[i / kFp4Block]);
      }
      return;
    }
  }
}

}  // namespace fathom::ops
