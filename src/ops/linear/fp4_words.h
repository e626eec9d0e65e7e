// FP4 (e2m1) codes as the device keeps them. Eight codes of a row lie in a 32-bit word; a product
// wants them as bf16 pairs (2i, 2i + 1), sign in bit 15, exponent and fraction in bits 8 to 6 of a
// half. Stored in ascending order, as in a checkpoint, each pair would take two shifts, two masks
// and an exchange. Here half h holds the pairs' elements h, and within it the first pair lies where
// it is wanted, the second one shift below: 11 instructions.
#pragma once

#include <cstdint>

#include "ops/linear/host_device.h"

namespace fathom::ops {

// Bits of a half: the sign of pair i's code, and the lowest of its other three.
FATHOM_HOST_DEVICE constexpr int Fp4SignBit(int i) {
  return i == 0 ? 15 : i == 1 ? 12 : i == 2 ? 14 : 13;
}
FATHOM_HOST_DEVICE constexpr int Fp4LowBit(int i) {
  return i == 0 ? 6 : i == 1 ? 3 : i == 2 ? 9 : 0;
}

// From the checkpoint's order, the first code in the low nibble.
FATHOM_HOST_DEVICE constexpr uint32_t ToFp4Word(uint32_t codes) {
  uint32_t word = 0;
  for (int j = 0; j < 8; ++j) {
    const uint32_t code = codes >> 4 * j & 15u;
    const int half = j % 2 * 16, i = j / 2;
    word |= (code >> 3) << (half + Fp4SignBit(i)) | (code & 7u) << (half + Fp4LowBit(i));
  }
  return word;
}

// Code j of a word.
FATHOM_HOST_DEVICE constexpr uint32_t Fp4Code(uint32_t word, int j) {
  const uint32_t half = word >> j % 2 * 16;
  const int i = j / 2;
  return (half >> Fp4SignBit(i) & 1u) << 3 | (half >> Fp4LowBit(i) & 7u);
}

// Codes 2i and 2i + 1 as bf16 in the low and high half of pair[i], 2^126 too small: the exponent
// has e2m1's bias of 1, not bf16's of 127. Zeros and the subnormal code come out right.
FATHOM_HOST_DEVICE constexpr void Fp4Pairs(uint32_t word, uint32_t pair[4]) {
  pair[0] = word & 0x81c081c0u;
  pair[1] = word << 3 & 0x81c081c0u;
  pair[2] = (word << 1 & 0x80008000u) | (word >> 3 & 0x01c001c0u);
  pair[3] = (word << 2 & 0x80008000u) | (word << 6 & 0x01c001c0u);
}

}  // namespace fathom::ops
