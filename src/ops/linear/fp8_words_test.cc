#include "ops/linear/fp8_words.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

#include "core/dtype.h"

namespace fathom::ops {
namespace {

TEST(Fp8Words, HoldEveryCodeInEveryPlace) {
  std::mt19937 random(1);
  for (int n = 0; n < 100'000; ++n) {
    const auto codes = static_cast<uint32_t>(random());
    const uint32_t word = ToFp8Word(codes);
    for (int j = 0; j < 4; ++j) ASSERT_EQ(Fp8Code(word, j), codes >> 8 * j & 255u) << j;
  }
}

TEST(Fp8Words, PairsAreTheValuesTimesAPowerOfTwo) {
  for (uint32_t code = 0; code < 256; ++code) {
    if ((code & 127u) == 127u) continue;  // NaN
    const float want = std::ldexp(E4m3ToF32(static_cast<uint8_t>(code)), -120);
    for (int j = 0; j < 4; ++j) {
      uint32_t pair[2];
      Fp8Pairs(ToFp8Word(code << 8 * j), pair);
      const auto got = std::bit_cast<float>((pair[j / 2] >> j % 2 * 16 & 0xffffu) << 16);
      ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(want)) << code << " at " << j;
    }
  }
}

}  // namespace
}  // namespace fathom::ops
