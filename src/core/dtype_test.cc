#include "core/dtype.h"

#include <gtest/gtest.h>

#include <cmath>

namespace fathom {
namespace {

TEST(DType, EveryE4m3CodeSurvivesARoundTrip) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    EXPECT_EQ(F32ToE4m3(E4m3ToF32(static_cast<uint8_t>(code))), code);
  }
}

TEST(DType, E4m3RoundsToNearestEven) {
  for (int code = 0; code < 0x7e; ++code) {
    const float low = E4m3ToF32(static_cast<uint8_t>(code));
    const float high = E4m3ToF32(static_cast<uint8_t>(code + 1));
    const float middle = (low + high) / 2;
    EXPECT_EQ(F32ToE4m3(middle), (code & 1) ? code + 1 : code) << middle;
    EXPECT_EQ(F32ToE4m3(std::nextafterf(middle, 0)), code);
    EXPECT_EQ(F32ToE4m3(std::nextafterf(middle, 1e9f)), code + 1);
  }
  EXPECT_EQ(F32ToE4m3(448.0f), 0x7e);
  EXPECT_EQ(F32ToE4m3(1e9f), 0x7e);
  EXPECT_EQ(F32ToE4m3(-1e9f), 0xfe);
}

TEST(DType, E2m1TiesGoToTheEvenCode) {
  const float ties[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  const float want[] = {0.0f, 1.0f, 1.0f, 2.0f, 2.0f, 4.0f, 4.0f};
  for (int i = 0; i < 7; ++i) {
    EXPECT_EQ(E2m1ToF32(F32ToE2m1(ties[i])), want[i]);
    EXPECT_EQ(E2m1ToF32(F32ToE2m1(-ties[i])), -want[i]);
  }
}

TEST(DType, Bf16RoundsToNearestEven) {
  EXPECT_EQ(RoundBf16(1.0f + 0x1p-8f), 1.0f);
  EXPECT_EQ(RoundBf16(1.0f + 0x1p-8f + 0x1p-20f), 1.0f + 0x1p-7f);
  EXPECT_EQ(RoundBf16(1.0f + 3 * 0x1p-8f), 1.0f + 0x1p-6f);
  EXPECT_TRUE(std::isnan(RoundBf16(std::nanf(""))));
}

TEST(DType, PowerOfTwoUpIsTheLeastPowerNotBelow) {
  EXPECT_EQ(PowerOfTwoUp(1.0f), 1.0f);
  EXPECT_EQ(PowerOfTwoUp(1.0000001f), 2.0f);
  EXPECT_EQ(PowerOfTwoUp(0.75f), 1.0f);
  EXPECT_EQ(PowerOfTwoByte(0.25f), 125);
  EXPECT_EQ(E8m0ToF32(125), 0.25f);
}

}  // namespace
}  // namespace fathom
