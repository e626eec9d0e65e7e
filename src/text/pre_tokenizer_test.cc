#include "text/pre_tokenizer.h"

#include <gmock/gmock.h>
#include <rapidcheck/gtest.h>

#include "text/testing.h"
#include "text/unicode_classes.h"

namespace fathom {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> Pieces(const PreTokenizer& pre_tokenizer, std::string_view text) {
  std::vector<uint32_t> ends;
  pre_tokenizer.Split(text, ends);
  std::vector<std::string> pieces;
  uint32_t begin = 0;
  for (uint32_t end : ends) {
    pieces.emplace_back(text.substr(begin, end - begin));
    begin = end;
  }
  return pieces;
}

std::unique_ptr<PreTokenizer> ByRegex(const std::vector<std::string>& regexes) {
  auto made = MakeRegexPreTokenizer(regexes);
  if (!made) ADD_FAILURE() << made.error().message;
  return std::move(*made);
}

TEST(DeepSeekPreTokenizer, CutsByTheThreeRegexes) {
  auto split = [](std::string_view text) { return Pieces(*MakeDeepSeekPreTokenizer(), text); };
  EXPECT_THAT(split("12345"), ElementsAre("123", "45"));
  EXPECT_THAT(split("Hello, world!\n\nx"), ElementsAre("Hello", ",", " world", "!\n\n", "x"));
  EXPECT_THAT(split("don't (see)"), ElementsAre("don", "'t", " (", "see", ")"));
  EXPECT_THAT(split("a   b \n c"), ElementsAre("a", "  ", " b", " \n", " c"));
  EXPECT_THAT(split("x  5"), ElementsAre("x", "  ", "5"));  // the number ends the blanks' text
  EXPECT_THAT(split("中文 and カタカナ・テスト"),
              ElementsAre("中文", " and", " ", "カタカナ", "・", "テスト"));
  EXPECT_THAT(split("e\u0301\u0301x \u200d\u200d"),
              ElementsAre("e\u0301\u0301x", " ", "\u200d\u200d"));
  EXPECT_THAT(split(""), ElementsAre());
}

RC_GTEST_PROP(DeepSeekPreTokenizer, AgreesWithTheRegexesThemselves, ()) {
  static const auto scanner = MakeDeepSeekPreTokenizer();
  static const auto regexes = ByRegex(DeepSeekRegexes());
  const std::string text = *GenText();
  RC_ASSERT(Pieces(*scanner, text) == Pieces(*regexes, text));
}

TEST(DeepSeekPreTokenizer, AgreesWithTheRegexesOnEveryCodePoint) {
  auto scanner = MakeDeepSeekPreTokenizer();
  auto regexes = ByRegex(DeepSeekRegexes());
  std::string text;
  for (uint32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string s;
    AppendUtf8(s, c);
    text += s + "a " + s + s + "!" + s + "\n" + s + "中" + s + "1" + s;
    if (c % 0x800 != 0x7FF) continue;
    std::vector<uint32_t> ours, theirs;
    scanner->Split(text, ours);
    regexes->Split(text, theirs);
    ASSERT_EQ(ours, theirs) << "up to code point " << c;
    text.clear();
  }
}

TEST(PreTokenizer, IsTheScannerForBothSpellingsOfDeepSeeksRegexes) {
  std::vector<std::string> literal = DeepSeekRegexes();
  for (size_t at; (at = literal[2].find("\\r\\n")) != std::string::npos;) {
    literal[2].replace(at, 4, "\r\n");
  }
  ASSERT_NE(literal, DeepSeekRegexes());
  auto scanner = MakeDeepSeekPreTokenizer();
  for (const auto& regexes : {literal, DeepSeekRegexes()}) {
    auto made = MakePreTokenizer(regexes);
    ASSERT_TRUE(made.has_value());
    const PreTokenizer& a = **made;
    const PreTokenizer& b = *scanner;
    EXPECT_TRUE(typeid(a) == typeid(b));
  }
}

TEST(PreTokenizer, LinearOnLongRuns) {
  // Quadratic work on a megabyte would take minutes.
  auto scanner = MakeDeepSeekPreTokenizer();
  for (const char* run : {"a", " ", "\n", "1", "中", "!", "\u200d", " \n"}) {
    std::string text;
    while (text.size() < (1 << 20)) text += run;
    std::string joined;
    for (const std::string& piece : Pieces(*scanner, text)) joined += piece;
    EXPECT_EQ(joined, text);
  }
}

TEST(RegexPreTokenizer, EmptyMatchesCutAndLookaroundsStayInsideAPiece) {
  EXPECT_THAT(Pieces(*ByRegex({"x*"}), "axxb"), ElementsAre("a", "xx", "b"));
  EXPECT_THAT(Pieces(*ByRegex({"b", "a(?!b)"}), "aab"), ElementsAre("a", "a", "b"));
  EXPECT_THAT(Pieces(*ByRegex({"^x"}), "xx\nx"), ElementsAre("x", "x\n", "x"));
}

TEST(RegexPreTokenizer, KnowsTheReferenceLibrarysUnicode) {
  auto letters = ByRegex({"\\p{L}"});
  EXPECT_THAT(Pieces(*letters, "1\U0002EBF0\U000313501"),  // Unicode 15.1 and 15
              ElementsAre("1", "\U0002EBF0", "\U00031350", "1"));
  EXPECT_THAT(Pieces(*ByRegex({"\\s"}), "1\u180E1"), ElementsAre("1\u180E1"));
  EXPECT_THAT(Pieces(*ByRegex({"[^\\S\\n]"}), "1\u180E1"), ElementsAre("1\u180E1"));
}

TEST(TranslateRegex, RefusesByNameWhatTheEnginesReadDifferently) {
  for (const char* regex : {"\\w", "\\b", "\\h", "[a&&b]", "[[:alpha:]]", "a{1,2}+", "(?m:a)",
                            "\\p{Han}", "\\p{C}", "[\\P{L}]", "\\x41", "(*UTF)", "\\u0041"}) {
    auto result = TranslateRegex(regex);
    ASSERT_FALSE(result.has_value()) << regex;
    EXPECT_EQ(result.error().code, Code::kUnimplemented) << regex;
    EXPECT_THAT(result.error().message, HasSubstr("not supported"));
  }
  for (const char* regex : {"[a", "\\"}) EXPECT_FALSE(TranslateRegex(regex).has_value());
  EXPECT_EQ(*TranslateRegex("(?i:'s)| ?[^\\r\\n]+"), "(?i:'s)| ?[^\\r\\n]+");
  EXPECT_FALSE(MakeRegexPreTokenizer({"(a"}).has_value());
}

}  // namespace
}  // namespace fathom
