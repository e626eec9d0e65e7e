#include "ops/linear/fp4_words.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>

namespace fathom::ops {
namespace {

TEST(Fp4Words, HoldEveryCodeInEveryPlace) {
  std::mt19937 random(1);
  for (int n = 0; n < 100'000; ++n) {
    const auto codes = static_cast<uint32_t>(random());
    const uint32_t word = ToFp4Word(codes);
    for (int j = 0; j < 8; ++j) ASSERT_EQ(Fp4Code(word, j), codes >> 4 * j & 15u) << j;
  }
}

TEST(Fp4Words, PairsAreTheValuesTimesAPowerOfTwo) {
  constexpr float kMagnitude[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const auto value = [](uint32_t half) {  // of bf16
    return std::bit_cast<float>(half << 16);
  };
  std::mt19937 random(2);
  for (int n = 0; n < 100'000; ++n) {
    const auto codes = static_cast<uint32_t>(random());
    uint32_t pair[4];
    Fp4Pairs(ToFp4Word(codes), pair);
    for (int j = 0; j < 8; ++j) {
      const uint32_t code = codes >> 4 * j & 15u;
      const float magnitude = kMagnitude[code & 7u];
      const float want = std::ldexp((code & 8u) != 0 ? -magnitude : magnitude, -126);
      const float got = value(pair[j / 2] >> j % 2 * 16 & 0xffffu);
      ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(want)) << code << " at " << j;
    }
  }
}

}  // namespace
}  // namespace fathom::ops
