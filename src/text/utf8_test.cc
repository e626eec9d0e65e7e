#include "text/utf8.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "text/testing.h"

namespace fathom {
namespace {

#define FFFD "\xEF\xBF\xBD"

TEST(Utf8, RepairReplacesMaximalSubparts) {
  // The Unicode standard's own examples, tables 3-8 to 3-11.
  EXPECT_EQ(RepairUtf8("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"),
            FFFD FFFD FFFD FFFD FFFD FFFD FFFD FFFD "A");
  EXPECT_EQ(RepairUtf8("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"),
            FFFD FFFD FFFD FFFD FFFD FFFD FFFD FFFD "A");
  EXPECT_EQ(RepairUtf8("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"),
            FFFD FFFD FFFD FFFD FFFD "A" FFFD FFFD "B");
  EXPECT_EQ(RepairUtf8("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), FFFD FFFD FFFD FFFD "A");
}

TEST(Utf8, EveryCodePointRoundTrips) {
  for (uint32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    AppendUtf8(text, c);
    ASSERT_TRUE(IsValidUtf8(text)) << c;
    CodePoint decoded = DecodeValidUtf8(text.data());
    ASSERT_EQ(decoded.value, c);
    ASSERT_EQ(decoded.length, text.size());
    for (size_t n = 1; n < text.size(); ++n) {
      ASSERT_EQ(UnfinishedTail("a" + text.substr(0, n)), n) << c;
    }
    ASSERT_EQ(UnfinishedTail(text), 0u) << c;
  }
}

RC_GTEST_PROP(Utf8, RepairedIsValidAndValidIsUntouched, ()) {
  const std::string bytes = *GenBytes();
  const std::string repaired = RepairUtf8(bytes);
  RC_ASSERT(IsValidUtf8(repaired));
  RC_ASSERT(IsValidUtf8(bytes) == (repaired == bytes));
}

RC_GTEST_PROP(Utf8, RepairInTwoStepsAtTheUnfinishedTailIsRepairAtOnce, ()) {
  const std::string bytes = *GenBytes();
  const size_t cut = *rc::gen::inRange<size_t>(0, bytes.size() + 1);
  const std::string_view head = std::string_view(bytes).substr(0, cut);
  const size_t whole = head.size() - UnfinishedTail(head);
  RC_ASSERT(RepairUtf8(bytes.substr(0, whole)) + RepairUtf8(bytes.substr(whole)) ==
            RepairUtf8(bytes));
}

}  // namespace
}  // namespace fathom
