// FP8 (e4m3) codes as the device keeps them. Four codes of a row lie in a 32-bit word; a product
// wants them as bf16 pairs (0, 1) and (2, 3), sign in bit 15, exponent and fraction in bits 10 to 4
// of a half. Stored in ascending order each pair would take an exchange of bytes, a shift and two
// masks. Here half h holds codes h and 2 + h: the first where it is wanted, the second split around
// it, so that both pairs take 5 instructions.
#pragma once

#include <cstdint>

#include "ops/linear/host_device.h"

namespace fathom::ops {

// From the checkpoint's order, the first code in the low byte.
FATHOM_HOST_DEVICE constexpr uint32_t ToFp8Word(uint32_t codes) {
  uint32_t word = 0;
  for (int h = 0; h < 2; ++h) {
    const uint32_t a = codes >> 8 * h & 255u, b = codes >> (16 + 8 * h) & 255u;
    // Bits 15 and 10-4: the first; 11, 14-12 and 3-0: the second's sign, upper and lower bits.
    word |= ((a >> 7) << 15 | (a & 127u) << 4 | (b >> 7) << 11 | (b >> 4 & 7u) << 12 | (b & 15u))
            << 16 * h;
  }
  return word;
}

// Code j of a word.
FATHOM_HOST_DEVICE constexpr uint32_t Fp8Code(uint32_t word, int j) {
  const uint32_t half = word >> j % 2 * 16;
  return j < 2 ? (half >> 15 & 1u) << 7 | (half >> 4 & 127u)
               : (half >> 11 & 1u) << 7 | (half >> 12 & 7u) << 4 | (half & 15u);
}

// Codes 2i and 2i + 1 as bf16 in the low and high half of pair[i], 2^120 too small: the exponent
// has e4m3's bias of 7, not bf16's of 127. Zeros and subnormal codes come out right.
FATHOM_HOST_DEVICE constexpr void Fp8Pairs(uint32_t word, uint32_t pair[2]) {
  pair[0] = word & 0x87f087f0u;
  pair[1] = (word << 4 & 0x80f080f0u) | (word >> 4 & 0x07000700u);
}

}  // namespace fathom::ops
