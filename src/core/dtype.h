// Element types of checkpoints and caches, and the scalar conversions every op's rounding rests on.
// Rounding is to nearest, ties to even, throughout (design: model.md 0.2).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace fathom {

enum class DType : uint8_t {
  kF32,
  kF16,
  kBF16,
  kF8E4M3,  // float8_e4m3fn: largest 448, no infinity
  kF8E8M0,  // exponent only: value 2^(byte-127)
  kI8,      // in checkpoints: two packed e2m1 values per byte, even element in the low nibble
  kI32,
  kI64,
};

// Bytes of one stored element (of one packed pair for kI8 holding FP4).
constexpr int64_t ElementBytes(DType type) {
  switch (type) {
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kF16:
    case DType::kBF16: return 2;
    case DType::kI64: return 8;
    default: return 1;
  }
}

std::string_view DTypeName(DType type);  // "F32", "BF16", "F8_E4M3", ... as safetensors spells it

// bfloat16 is held as its 16 bits.
using bf16_t = uint16_t;

inline float Bf16ToF32(bf16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline bf16_t F32ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16_t>((bits >> 16) | 0x40u);
  return static_cast<bf16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// rn_bf16 of model.md: the float32 value of x rounded to bfloat16.
inline float RoundBf16(float value) {
  return Bf16ToF32(F32ToBf16(value));
}

// e4m3 byte to float32, subnormals (multiples of 2^-9) included. 0x7f and 0xff are NaN.
inline float E4m3ToF32(uint8_t byte) {
  const uint32_t sign = static_cast<uint32_t>(byte & 0x80u) << 24;
  const uint32_t magnitude = byte & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 8) {
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

// float32 to e4m3. Values beyond 448 saturate, as the clamp before every use requires.
inline uint8_t F32ToE4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const float magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
  if (magnitude != magnitude) return sign | 0x7fu;
  if (magnitude >= 448.0f) return sign | 0x7eu;
  if (magnitude < 0x1p-6f) {  // subnormal: round to a multiple of 2^-9 (8 is the least normal)
    return sign | static_cast<uint8_t>(std::nearbyintf(magnitude * 512.0f));
  }
  const uint32_t m = std::bit_cast<uint32_t>(magnitude);
  const uint32_t rounded = m + 0x7ffffu + ((m >> 20) & 1u);
  const uint32_t code = (rounded >> 20) - (120u << 3);
  return sign | static_cast<uint8_t>(code > 0x7e ? 0x7e : code);
}

inline float E8m0ToF32(uint8_t byte) {
  return byte == 0 ? 0x1p-127f : std::bit_cast<float>(static_cast<uint32_t>(byte) << 23);
}

// e2m1 code (sign bit 8, magnitude 0..7) to float32: 0 .5 1 1.5 2 3 4 6.
inline float E2m1ToF32(uint8_t code) {
  constexpr float kValue[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return (code & 8) ? -kValue[code & 7] : kValue[code & 7];
}

// float32 to e2m1, nearest, ties to the even code; beyond 6 saturates.
inline uint8_t F32ToE2m1(float value) {
  const uint8_t sign = std::signbit(value) ? 8 : 0;
  const float m = std::fabs(value);
  uint8_t code = 7;
  if (m <= 0.25f) code = 0;
  else if (m < 0.75f) code = 1;
  else if (m <= 1.25f) code = 2;
  else if (m < 1.75f) code = 3;
  else if (m <= 2.5f) code = 4;
  else if (m < 3.5f) code = 5;
  else if (m <= 5.0f) code = 6;
  return sign | code;
}

// Smallest power of two >= x for x > 0, from the bits (model.md 0.2).
inline float PowerOfTwoUp(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1u : 0u);
  return std::bit_cast<float>(exponent << 23);
}

// Exponent byte (ue8m0) of a power of two.
inline uint8_t PowerOfTwoByte(float power) {
  return static_cast<uint8_t>(std::bit_cast<uint32_t>(power) >> 23);
}

}  // namespace fathom
