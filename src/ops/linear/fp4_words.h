// FP4 (e2m1) codes as the device keeps them. Eight codes of a row lie in a 32-bit word; a product
// wants them as bf16 pairs (2i, 2i + 1), sign in bit 15, exponent and fraction in bits 8 to 6 of a
// half. Stored in ascending order, as in a checkpoint, each pair would take two shifts, two masks
// and an exchange. Here half h holds the pairs' elements h, the first pair where it is wanted and
// the others where a shift or two bring them there: 9 instructions.
#pragma once

#include <cstdint>

#include "ops/linear/host_device.h"

namespace fathom::ops {

// Where bit b of code j's four lies in the word. The second pair lies six bits below its place, the
// third six above, around the word's end; of the fourth the lowest bit lies four above, the others
// four below.
FATHOM_HOST_DEVICE constexpr int Fp4Bit(int j, int b) {
  const int place = (b == 3 ? 15 : 6 + b) + j % 2 * 16;
  const int shift = j / 2 == 0 ? 0 : j / 2 == 1 ? -6 : j / 2 == 2 ? 6 : b == 0 ? 4 : -4;
  return (place + shift) % 32;
}

// From the checkpoint's order, the first code in the low nibble.
FATHOM_HOST_DEVICE constexpr uint32_t ToFp4Word(uint32_t codes) {
  uint32_t word = 0;
  for (int j = 0; j < 8; ++j) {
    const uint32_t code = codes >> 4 * j & 15u;
    for (int b = 0; b < 4; ++b) word |= (code >> b & 1u) << Fp4Bit(j, b);
  }
  return word;
}

// Code j of a word.
FATHOM_HOST_DEVICE constexpr uint32_t Fp4Code(uint32_t word, int j) {
  uint32_t code = 0;
  for (int b = 0; b < 4; ++b) code |= (word >> Fp4Bit(j, b) & 1u) << b;
  return code;
}

// Codes 2i and 2i + 1 as bf16 in the low and high half of pair[i], 2^126 too small: the exponent
// has e2m1's bias of 1, not bf16's of 127. Zeros and the subnormal code come out right.
FATHOM_HOST_DEVICE constexpr void Fp4Pairs(uint32_t word, uint32_t pair[4]) {
  pair[0] = word & 0x81c081c0u;
  pair[1] = word << 6 & 0x81c081c0u;
  pair[2] = (word >> 6 | word << 26) & 0x81c081c0u;
  pair[3] = (word << 4 & 0x81808180u) | (word >> 4 & 0x00400040u);
}

}  // namespace fathom::ops
