#include "api/json_text.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace fathom {
namespace {

std::string Quote(std::string_view text) {
  std::string out;
  AppendJsonString(text, &out);
  return out;
}

TEST(JsonText, EscapesWhatJsonAndLineSplittersNeed) {
  EXPECT_EQ(Quote("a\"b\\c\n\r\t\x01"), R"("a\"b\\c\n\r\t\u0001")");
  EXPECT_EQ(Quote("안녕 漢字 👩"), "\"안녕 漢字 👩\"");
  EXPECT_EQ(Quote("\xC2\x85\xE2\x80\xA8\xE2\x80\xA9"), R"("\u0085\u2028\u2029")");
}

TEST(JsonText, InvalidUtf8BecomesReplacementCharacters) {
  EXPECT_EQ(Quote("a\xff"
                  "b"),
            "\"a\xEF\xBF\xBD"
            "b\"");
  EXPECT_EQ(Quote("\xed\xa0\x80"), "\"\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\"");  // surrogate
  EXPECT_EQ(Quote("\xf4\x90\x80\x80").find('\xf4'), std::string::npos);
}

RC_GTEST_PROP(JsonText, AnyBytesGiveOneParsableString, (const std::string& bytes)) {
  const auto parsed = nlohmann::json::parse(Quote(bytes), nullptr, false);
  RC_ASSERT(parsed.is_string());
  // What was valid UTF-8 comes back as it was.
  if (!nlohmann::json(bytes)
           .dump(-1, ' ', false, nlohmann::json::error_handler_t::ignore)
           .empty()) {
    try {
      (void)nlohmann::json(bytes).dump();
      RC_ASSERT(parsed.get<std::string>() == bytes);
    } catch (const nlohmann::json::exception&) {
    }
  }
}

TEST(JsonText, BodiesAreObjectsOfBoundedDepth) {
  EXPECT_TRUE(ParseJsonObject("{}"));
  EXPECT_TRUE(ParseJsonObject(R"({"a": "[[[[{{{{\"[["})"));
  for (const std::string& bad :
       {std::string(""), std::string("[]"), std::string("null"), std::string("{"),
        std::string("{\"a\":1e999}"), std::string("{\"a\":\"\xff\"}"),
        std::string("{\"a\":") + std::string(100000, '[') + std::string(100000, ']') + "}",
        std::string("{\"a\": \"\\ud800\"}"), std::string("{} {}"), std::string("\xef\xbb\xbf[")}) {
    const auto parsed = ParseJsonObject(bad);
    ASSERT_FALSE(parsed) << bad.substr(0, 40);
    EXPECT_EQ(parsed.error().code, Code::kInvalidArgument);
  }
}

TEST(JsonText, ParseErrorsSayWhatAndWhere) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"{", "unexpected end of input; expected string literal at byte 2"},
      {"{\"a\": 1,}", "unexpected '}'; expected string literal at byte 9"},
      {"{\"a\": nul}", "invalid literal at byte 10"},
      {"{\"a\": 1e999}", "number overflow parsing '1e999'"},
      {"{} {}", "unexpected '{'; expected end of input at byte 4"},
      {"{\"a\": \"\xff\"}", "invalid string: ill-formed UTF-8 byte at byte 8"},
  };
  for (const auto& [body, cause] : cases) {
    const auto parsed = ParseJsonObject(body);
    ASSERT_FALSE(parsed) << body;
    EXPECT_EQ(parsed.error().message, "the body is not JSON: " + cause);
  }
}

}  // namespace
}  // namespace fathom
