#include "text/output_parser.h"

#include <gmock/gmock.h>
#include <rapidcheck/gtest.h>

#include "text/testing.h"

namespace fathom {
namespace {

using testing::Not;

const ChatEncoder& Encoder() {
  static const ChatEncoder encoder = *ChatEncoder::Make(DemoTokenizer());
  return encoder;
}

std::vector<TokenId> Ids(std::string_view text) {
  return DemoTokenizer().Encode(text, AddedTokens::kMatch);
}

// Ids of the single bytes of `text`: the finest way a model could say it.
std::vector<TokenId> ByteIds(std::string_view text) {
  std::vector<TokenId> ids;
  for (char c : text) {
    for (TokenId id = 0; id < DemoTokenizer().vocab_size(); ++id) {
      if (DemoTokenizer().TokenBytes(id) != std::string_view(&c, 1)) continue;
      ids.push_back(id);
      break;
    }
  }
  return ids;
}

struct Reply {
  std::string reasoning, content;
  bool stopped = false;
  std::string stop_string;
  bool operator==(const Reply&) const = default;
};

void PrintTo(const Reply& r, std::ostream* out) {
  *out << "{" << r.reasoning << " | " << r.content << " | " << r.stopped << " " << r.stop_string
       << "}";
}

Reply Parse(const std::vector<TokenId>& ids, OutputParserOptions options,
            int64_t* reasoning_tokens = nullptr) {
  OutputParser parser(DemoTokenizer(), Encoder(), std::move(options));
  Reply reply;
  auto add = [&reply](const OutputDelta& delta) {
    EXPECT_TRUE(IsValidUtf8(delta.reasoning));
    EXPECT_TRUE(IsValidUtf8(delta.content));
    EXPECT_FALSE(reply.stopped && !delta.content.empty()) << "text after a stop string";
    reply.reasoning += delta.reasoning;
    reply.content += delta.content;
    reply.stopped |= delta.stopped;
    reply.stop_string = delta.stop_string;
  };
  for (TokenId id : ids) add(parser.Push(id));
  add(parser.Finish());
  if (reasoning_tokens != nullptr) *reasoning_tokens = parser.reasoning_tokens();
  return reply;
}

TEST(OutputParser, SplitsReasoningFromContent) {
  EXPECT_EQ(Parse(Ids("I think</think>Yes"), {.thinking = true}), (Reply{"I think", "Yes"}));
  EXPECT_EQ(Parse(Ids("Yes"), {}), (Reply{"", "Yes"}));
  EXPECT_EQ(Parse(Ids("never ends"), {.thinking = true}), (Reply{"never ends", ""}));
  EXPECT_EQ(Parse(Ids("a</think>b</think>c"), {.thinking = true}), (Reply{"a", "bc"}));
  EXPECT_EQ(Parse(Ids("<think>a</think>b"), {.thinking = true}), (Reply{"a", "b"}));
  // Thinking that nobody asked for is still not content.
  EXPECT_EQ(Parse(Ids("<think>a</think>b"), {}), (Reply{"a", "b"}));
  EXPECT_EQ(Parse(Ids("x<think>b"), {}), (Reply{"", "xb"}));
}

TEST(OutputParser, CountsReasoningTokensWithTheirEnd) {
  int64_t count = 0;
  const size_t reasoning = Ids("I think so").size();
  Parse(Ids("I think so</think>Yes"), {.thinking = true}, &count);
  EXPECT_EQ(count, static_cast<int64_t>(reasoning) + 1);
  Parse(Ids("Yes"), {}, &count);
  EXPECT_EQ(count, 0);
  Parse(Ids("I think so<｜end▁of▁sentence｜>"), {.thinking = true}, &count);
  EXPECT_EQ(count, static_cast<int64_t>(reasoning));
}

TEST(OutputParser, TheEndOfThinkingMayBeSpelled) {
  EXPECT_EQ(Parse(ByteIds("a </think>b"), {.thinking = true}), (Reply{"a ", "b"}));
  EXPECT_EQ(Parse(ByteIds("a </thin"), {.thinking = true}), (Reply{"a </thin", ""}));
  EXPECT_EQ(Parse(ByteIds("a </thin</think>b"), {.thinking = true}), (Reply{"a </thin", "b"}));
  EXPECT_EQ(Parse(ByteIds("say </think>"), {}), (Reply{"", "say </think>"}));  // prose
}

TEST(OutputParser, EndsAtTheFirstEos) {
  EXPECT_EQ(Parse(Ids("ans<｜end▁of▁sentence｜>wer<｜end▁of▁sentence｜>x"), {}),
            (Reply{"", "ans"}));
  EXPECT_EQ(Parse(Ids("<｜end▁of▁sentence｜>x"), {}), (Reply{"", ""}));
  EXPECT_EQ(Parse(Ids("ans<｜end▁of▁sentence｜>wer"), {.ignore_eos = true}), (Reply{"", "answer"}));
}

TEST(OutputParser, ControlTokensAreInNoField) {
  const std::string text =
      "a<｜begin▁of▁sentence｜>b<｜User｜>c<｜Assistant｜>d<｜▁pad▁｜>e<think>f｜DSML｜g";
  EXPECT_EQ(Parse(Ids(text), {}), (Reply{"", "abcdefg"}));
  EXPECT_EQ(Parse(Ids(text + "</think>h"), {.thinking = true}), (Reply{"abcdefg", "h"}));
  EXPECT_EQ(Parse(Ids(text + "</think>h"), {.plain_text = true}), (Reply{"", "abcdefgh"}));
  // Plain text with special tokens asked for shows what was generated, up to the end.
  EXPECT_EQ(Parse(Ids(text + "<｜end▁of▁sentence｜>"),
                  {.plain_text = true, .skip_special_tokens = false}),
            (Reply{"", text}));
  EXPECT_EQ(Parse(Ids("a<｜User｜>b<｜▁pad▁｜>"), {.skip_special_tokens = false}),
            (Reply{"", "ab<｜▁pad▁｜>"}));
}

TEST(OutputParser, StopStringsApplyToContentOnly) {
  const std::vector<std::string> stop = {"END", "\n\n", "think"};
  EXPECT_EQ(Parse(Ids("END\n\nthink</think>abc END def"), {.thinking = true, .stop = stop}),
            (Reply{"END\n\nthink", "abc ", true, "END"}));
  EXPECT_EQ(Parse(Ids("E</think>ND."), {.thinking = true, .stop = stop}), (Reply{"E", "ND."}));
  EXPECT_EQ(Parse(ByteIds("abc END def"), {.stop = stop}), (Reply{"", "abc ", true, "END"}));
  EXPECT_EQ(Parse(ByteIds("abc END def"), {.stop = stop, .include_stop_string = true}),
            (Reply{"", "abc END", true, "END"}));
  EXPECT_EQ(Parse(ByteIds("abc EN"), {.stop = stop}), (Reply{"", "abc EN"}));
  EXPECT_EQ(Parse(Ids("a</think>b\n\nc"), {.plain_text = true, .stop = stop}),
            (Reply{"", "ab", true, "\n\n"}));
}

TEST(OutputParser, MultibyteTextByteByByte) {
  const std::string text = "안녕 👩‍👩‍👧 漢字";
  EXPECT_EQ(Parse(ByteIds(text), {}), (Reply{"", text}));
  EXPECT_EQ(Parse(ByteIds(text), {.stop = {"漢"}}),
            (Reply{"", "안녕 👩‍👩‍👧 ", true, "漢"}));
  EXPECT_EQ(Parse(ByteIds("a\xE6\xBC"), {}), (Reply{"", "a\uFFFD"}));
}

RC_GTEST_PROP(OutputParser, TheReplyDependsOnTheTextNotOnItsTokens, ()) {
  static const std::vector<std::string> kParts = {
      "a", "E", "N", "D", "END", "\n", "</th", "ink>", "漢", "</think>", " ", "<", "x"};
  const auto parts = *rc::gen::container<std::vector<std::string>>(rc::gen::elementOf(kParts));
  std::string text;
  for (const std::string& part : parts) text += part;
  OutputParserOptions options = {.thinking = *rc::gen::arbitrary<bool>(),
                                 .stop = {"END", "DE", "\n\n", "漢E"},
                                 .include_stop_string = *rc::gen::arbitrary<bool>()};
  const Reply fine = Parse(ByteIds(text), options);
  const Reply usual = Parse(DemoTokenizer().Encode(text, AddedTokens::kInert), options);
  std::vector<TokenId> mixed;
  for (const std::string& part : parts) {
    const auto ids = DemoTokenizer().Encode(part, AddedTokens::kInert);
    mixed.insert(mixed.end(), ids.begin(), ids.end());
  }
  RC_ASSERT(fine == usual);
  RC_ASSERT(fine == Parse(mixed, options));

  // And it is what the definition says of the whole text.
  std::string content = text, reasoning;
  if (options.thinking) {
    const size_t end = text.find("</think>");
    reasoning = text.substr(0, end);
    content = end == std::string::npos ? "" : text.substr(end + 8);
  }
  StopMatcher stops(options.stop);
  std::string expected = stops.Push(content);
  expected += stops.Finish();
  if (stops.stopped() && options.include_stop_string) expected += stops.stop_string();
  RC_ASSERT(fine.reasoning == reasoning);
  RC_ASSERT(fine.content == expected);
}

RC_GTEST_PROP(OutputParser, NoTokenSequenceLeaksAControlToken, ()) {
  const auto ids = *rc::gen::container<std::vector<TokenId>>(
      rc::gen::element<TokenId>(0, 1, 2, 4091, 4092, 4093, 4094, 4095, 37, 100, 250, 1000));
  const Reply reply = Parse(ids, {.thinking = *rc::gen::arbitrary<bool>(),
                                  .plain_text = *rc::gen::arbitrary<bool>(),
                                  .ignore_eos = *rc::gen::arbitrary<bool>()});
  for (const char* control : {"<｜", "｜", "<think>", "</think>"}) {
    RC_ASSERT(reply.content.find(control) == std::string::npos);
    RC_ASSERT(reply.reasoning.find(control) == std::string::npos);
  }
}

}  // namespace
}  // namespace fathom
