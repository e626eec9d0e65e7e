#include "core/amounts.h"

#include <gtest/gtest.h>

namespace fathom {
namespace {

TEST(Amounts, ThousandsAreSeparatedInAnyLocale) {
  EXPECT_EQ(Grouped(0), "0");
  EXPECT_EQ(Grouped(999), "999");
  EXPECT_EQ(Grouped(1000), "1,000");
  EXPECT_EQ(Grouped(-999), "-999");
  EXPECT_EQ(Grouped(-1000), "-1,000");
  EXPECT_EQ(Grouped(10'326'376'448), "10,326,376,448");
  EXPECT_EQ(Grouped(INT64_MIN), "-9,223,372,036,854,775,808");
}

TEST(Amounts, BytesComeInTheLargestBinaryUnit) {
  EXPECT_EQ(Amount(1023), "1023 B");
  EXPECT_EQ(Amount(1024), "1.000 KiB");
  EXPECT_EQ(Amount(5'174'272), "4.935 MiB");
  EXPECT_EQ(Amount(10'326'376'448), "9.617 GiB");
  EXPECT_EQ(Gib(90'060'095'488), "83.875");
  EXPECT_EQ(BytesAndAmount(5'174'272), "5,174,272 B (4.935 MiB)");
  EXPECT_EQ(BytesAndAmount(12), "12 B");
}

}  // namespace
}  // namespace fathom
