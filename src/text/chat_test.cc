#include "text/chat.h"

#include <gmock/gmock.h>
#include <rapidcheck/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "text/testing.h"

namespace fathom {
namespace {

using Role = ChatMessage::Role;
using testing::HasSubstr;

// The demo's tokenizer, and the same with a latest_reminder token.
const Tokenizer& WithReminder() {
  static const std::unique_ptr<Tokenizer> tokenizer = [] {
    std::ifstream file(FATHOM_SOURCE_DIR "/models/demo/tokenizer.json");
    nlohmann::json json = nlohmann::json::parse(file);
    json["added_tokens"].push_back({{"id", 4096}, {"content", "<｜latest_reminder｜>"}});
    auto parsed = Tokenizer::Parse(json.dump(), "demo with latest_reminder");
    if (!parsed) ADD_FAILURE() << parsed.error().message;
    return std::move(*parsed);
  }();
  return *tokenizer;
}

ChatMessage Message(Role role, std::string content, std::string reasoning = {}) {
  return {.role = role, .content = std::move(content), .reasoning = std::move(reasoning)};
}

// The rendering with B, E, U, A, R for the markers.
std::string Shorthand(std::string text) {
  const std::pair<const char*, const char*> kNames[] = {{"<｜begin▁of▁sentence｜>", "[B]"},
                                                        {"<｜end▁of▁sentence｜>", "[E]"},
                                                        {"<｜User｜>", "[U]"},
                                                        {"<｜Assistant｜>", "[A]"},
                                                        {"<｜latest_reminder｜>", "[R]"}};
  for (auto [name, brief] : kNames) {
    for (size_t at; (at = text.find(name)) != std::string::npos;) {
      text.replace(at, std::string(name).size(), brief);
    }
  }
  return text;
}

std::string Render(const std::vector<ChatMessage>& messages, ChatOptions options,
                   const Tokenizer& tokenizer = WithReminder()) {
  auto encoder = ChatEncoder::Make(tokenizer);
  auto ids = encoder->Encode(messages, options);
  if (!ids) return "error: " + ids.error().message;
  return Shorthand(tokenizer.Decode(*ids, {}));
}

constexpr ChatOptions kPlain = {};
constexpr ChatOptions kThinking = {.thinking = true};
constexpr ChatOptions kKeep = {.thinking = true, .drop_thinking = false};

TEST(Chat, OneQuestion) {
  const std::vector<ChatMessage> messages = {Message(Role::kSystem, "Be brief."),
                                             Message(Role::kUser, "Hi")};
  EXPECT_EQ(Render(messages, kPlain), "[B]Be brief.[U]Hi[A]</think>");
  EXPECT_EQ(Render(messages, kThinking), "[B]Be brief.[U]Hi[A]<think>");
  EXPECT_EQ(Render(messages, {.add_generation_prompt = false}), "[B]Be brief.[U]Hi");
}

TEST(Chat, HistoryAndDroppedThinking) {
  const std::vector<ChatMessage> messages = {
      Message(Role::kUser, "q1"), Message(Role::kAssistant, "a1", "r1"), Message(Role::kUser, "q2"),
      Message(Role::kAssistant, "a2", "r2")};
  EXPECT_EQ(Render(messages, {.add_generation_prompt = false}),
            "[B][U]q1[A]</think>a1[E][U]q2[A]</think>a2[E]");
  ChatOptions options = kThinking;
  options.add_generation_prompt = false;
  EXPECT_EQ(Render(messages, options), "[B][U]q1[A]</think>a1[E][U]q2[A]<think>r2</think>a2[E]");
  options.drop_thinking = false;
  EXPECT_EQ(Render(messages, options),
            "[B][U]q1[A]<think>r1</think>a1[E][U]q2[A]<think>r2</think>a2[E]");
}

TEST(Chat, UserTurnsAndToolResultsFuse) {
  EXPECT_EQ(
      Render({Message(Role::kUser, "a"), Message(Role::kUser, "b"), Message(Role::kAssistant, "c"),
              Message(Role::kTool, "r1"), Message(Role::kTool, "r2"), Message(Role::kUser, "d")},
             kPlain),
      "[B][U]a\n\nb[A]</think>c[E][U]<tool_result>r1</tool_result>\n\n"
      "<tool_result>r2</tool_result>\n\nd[A]</think>");
}

TEST(Chat, DevelopersBeforeTheLastUserTurnGoWithTheThinking) {
  const std::vector<ChatMessage> messages = {
      Message(Role::kDeveloper, "d1"), Message(Role::kUser, "q1"), Message(Role::kAssistant, "a1"),
      Message(Role::kDeveloper, "d2")};
  EXPECT_EQ(Render(messages, kThinking), "[B][U]q1[A]</think>a1[E][U]d2[A]<think>");
  EXPECT_EQ(Render(messages, kKeep), "[B][U]d1[U]q1[A]<think></think>a1[E][U]d2[A]<think>");
  EXPECT_EQ(Render(messages, kPlain), "[B][U]d1[U]q1[A]</think>a1[E][U]d2[A]</think>");
  EXPECT_THAT(Render({Message(Role::kUser, "x"), Message(Role::kDeveloper, "")}, kPlain),
              HasSubstr("messages[1].content"));
}

TEST(Chat, ASystemMessageAfterTheLastUserTurnComesBeforeTheHandOff) {
  std::vector<ChatMessage> messages = {Message(Role::kSystem, "s"), Message(Role::kUser, "q"),
                                       Message(Role::kSystem, "reply in French")};
  EXPECT_EQ(Render(messages, kPlain), "[B]s[U]q[R]reply in French[A]</think>");
  EXPECT_EQ(Render(messages, kThinking), "[B]s[U]q[R]reply in French[A]<think>");
  EXPECT_EQ(Render(messages, kPlain, DemoTokenizer()), "[B]s[U]q\n\nreply in French[A]</think>");
  // The next turn's prompt begins with this one.
  messages.push_back(Message(Role::kAssistant, "Oui"));
  messages.push_back(Message(Role::kUser, "q2"));
  EXPECT_EQ(Render(messages, kPlain),
            "[B]s[U]q[R]reply in French[A]</think>Oui[E][U]q2[A]</think>");
  EXPECT_EQ(Render({Message(Role::kUser, "q"), Message(Role::kAssistant, "a"),
                    Message(Role::kSystem, "x"), Message(Role::kSystem, "y")},
                   kPlain),
            "[B][U]q[A]</think>a[E][R]x[R]y[A]</think>");
}

TEST(Chat, LatestReminder) {
  EXPECT_EQ(Render({Message(Role::kSystem, "s"), Message(Role::kLatestReminder, "date"),
                    Message(Role::kUser, "q")},
                   kPlain),
            "[B]s[R]date[U]q[A]</think>");
  EXPECT_EQ(Render({Message(Role::kUser, "q"), Message(Role::kLatestReminder, "date")}, kPlain),
            "[B][U]q[A]</think>[R]date");
  EXPECT_THAT(Render({Message(Role::kLatestReminder, "date")}, kPlain, DemoTokenizer()),
              HasSubstr("messages[0].role"));
}

TEST(Chat, OpenLastTurn) {
  const std::vector<ChatMessage> messages = {Message(Role::kUser, "q"),
                                             Message(Role::kAssistant, "The answer is")};
  EXPECT_EQ(Render(messages, {.add_generation_prompt = false, .continue_final_message = true}),
            "[B][U]q[A]</think>The answer is");
  EXPECT_EQ(Render(messages, {.add_generation_prompt = false}),
            "[B][U]q[A]</think>The answer is[E]");
  EXPECT_EQ(Render(messages, {.add_generation_prompt = true}),
            "[B][U]q[A]</think>The answer is[E][A]</think>");
  EXPECT_THAT(Render(messages, {.add_generation_prompt = true, .continue_final_message = true}),
              HasSubstr("continue_final_message and add_generation_prompt"));
  EXPECT_THAT(Render({Message(Role::kUser, "q")},
                     {.add_generation_prompt = false, .continue_final_message = true}),
              HasSubstr("messages[0] is not an assistant message"));
}

TEST(Chat, OpenLastTurnInThinkingMode) {
  const ChatOptions options = {
      .thinking = true, .add_generation_prompt = false, .continue_final_message = true};
  EXPECT_EQ(Render({Message(Role::kUser, "q"), Message(Role::kAssistant, "", "Let me")}, options),
            "[B][U]q[A]<think>Let me");
  EXPECT_EQ(Render({Message(Role::kUser, "q"), Message(Role::kAssistant, "It", "ok")}, options),
            "[B][U]q[A]<think>ok</think>It");
}

TEST(Chat, GenerationStartsBehindAHandOffWhateverComesLast) {
  EXPECT_EQ(Render({Message(Role::kSystem, "s")}, kPlain), "[B]s[A]</think>");
  EXPECT_EQ(Render({Message(Role::kAssistant, "a")}, kPlain), "[B]a[E][A]</think>");
  EXPECT_THAT(Render({}, kPlain), HasSubstr("messages must not be empty"));
}

TEST(Chat, NamesTheControlTokenAVocabularyLacks) {
  std::ifstream file(FATHOM_SOURCE_DIR "/models/demo/tokenizer.json");
  nlohmann::json json = nlohmann::json::parse(file);
  json["added_tokens"].erase(5);
  auto tokenizer = Tokenizer::Parse(json.dump(), "test.json");
  ASSERT_TRUE(tokenizer.has_value());
  auto encoder = ChatEncoder::Make(**tokenizer);
  ASSERT_FALSE(encoder.has_value());
  EXPECT_THAT(encoder.error().message, HasSubstr("'<think>'"));
}

// The rendering with a bar at every boundary.
std::string RenderBoundaries(const std::vector<ChatMessage>& messages, ChatOptions options) {
  const Tokenizer& tokenizer = WithReminder();
  const ChatPrompt prompt = *ChatEncoder::Make(tokenizer)->EncodePrompt(messages, options);
  std::string text;
  auto from = prompt.ids.begin();
  for (const int64_t boundary : prompt.boundaries) {
    const auto to = prompt.ids.begin() + boundary;
    text += tokenizer.Decode({from, to}, {}) + "|";
    from = to;
  }
  return Shorthand(text + tokenizer.Decode({from, prompt.ids.end()}, {}));
}

TEST(Chat, BoundariesStandWhereOtherPromptsPart) {
  const std::vector<ChatMessage> messages = {
      Message(Role::kSystem, "s"), Message(Role::kSystem, "t"), Message(Role::kUser, "u"),
      Message(Role::kAssistant, "a", "r"), Message(Role::kUser, "v")};
  EXPECT_EQ(RenderBoundaries(messages, kPlain), "[B]st|[U]u[A]</think>a[E]|[U]v[A]</think>");
  EXPECT_EQ(RenderBoundaries(messages, kThinking), "[B]st|[U]u[A]</think>a[E]|[U]v[A]<think>");
  EXPECT_EQ(RenderBoundaries(messages, kKeep), "[B]st|[U]u[A]<think>r</think>a[E]|[U]v[A]<think>");
}

TEST(Chat, BoundariesAreDistinctAndMoreThanBos) {
  EXPECT_EQ(RenderBoundaries({Message(Role::kUser, "u")}, kPlain), "[B][U]u[A]</think>");
  EXPECT_EQ(RenderBoundaries({Message(Role::kSystem, ""), Message(Role::kUser, "u")}, kPlain),
            "[B][U]u[A]</think>");
  EXPECT_EQ(RenderBoundaries({Message(Role::kSystem, "s"), Message(Role::kUser, "u")}, kPlain),
            "[B]s|[U]u[A]</think>");
}

TEST(Chat, NoBoundaryWhereTextRunsOn) {
  const ChatOptions open = {.add_generation_prompt = false};
  EXPECT_EQ(RenderBoundaries({Message(Role::kSystem, "s"), Message(Role::kAssistant, "a")}, open),
            "[B]sa[E]");
}

std::vector<ChatMessage> GenMessages() {
  static const std::vector<std::string> kTexts = {"",         "hi",       "<｜User｜>",
                                                  "</think>", "<think>",  "<｜end▁of▁sentence｜>",
                                                  "｜DSML｜", "漢字 \n\n"};
  std::vector<ChatMessage> messages;
  const int count = *rc::gen::inRange(1, 8);
  for (int i = 0; i < count; ++i) {
    auto role = static_cast<Role>(*rc::gen::inRange(0, 6));
    std::string content = *rc::gen::elementOf(kTexts);
    if (role == Role::kDeveloper) content += "x";
    messages.push_back(Message(role, content, *rc::gen::elementOf(kTexts)));
  }
  return messages;
}

RC_GTEST_PROP(Chat, TextsNeverBecomeControlTokens, ()) {
  const std::vector<ChatMessage> messages = GenMessages();
  ChatOptions options = {.thinking = *rc::gen::arbitrary<bool>(),
                         .drop_thinking = *rc::gen::arbitrary<bool>(),
                         .add_generation_prompt = *rc::gen::arbitrary<bool>()};
  std::vector<ChatMessage> harmless = messages;
  for (ChatMessage& message : harmless) {
    message.content = "x";
    message.reasoning = "y";
  }
  const Tokenizer& tokenizer = WithReminder();
  const ChatEncoder encoder = *ChatEncoder::Make(tokenizer);
  auto controls = [&](const std::vector<ChatMessage>& list) {
    std::vector<TokenId> ids = *encoder.Encode(list, options);
    RC_ASSERT(ids[0] == encoder.bos());
    RC_ASSERT(std::count(ids.begin(), ids.end(), encoder.bos()) == 1);
    std::erase_if(ids, [&](TokenId id) { return !tokenizer.is_added(id); });
    return ids;
  };
  RC_ASSERT(controls(messages) == controls(harmless));
}

RC_GTEST_PROP(Chat, APromptWithHandOffEndsInAnOpenAssistantTurn, ()) {
  const std::vector<ChatMessage> messages = GenMessages();
  const ChatOptions options = {.thinking = *rc::gen::arbitrary<bool>(),
                               .drop_thinking = *rc::gen::arbitrary<bool>()};
  const ChatEncoder encoder = *ChatEncoder::Make(WithReminder());
  const std::vector<TokenId> ids = *encoder.Encode(messages, options);
  const TokenId marker = options.thinking ? encoder.think_begin() : encoder.think_end();
  auto last = std::find(ids.rbegin(), ids.rend(), encoder.assistant());
  RC_ASSERT(last != ids.rend());
  RC_ASSERT(last != ids.rbegin());
  RC_ASSERT(*(last - 1) == marker);
  if (messages.back().role != Role::kLatestReminder) RC_ASSERT(last - 1 == ids.rbegin());
}

RC_GTEST_PROP(Chat, PromptsAgreeUpToTheirBoundaries, ()) {
  const std::vector<ChatMessage> messages = GenMessages();
  const ChatOptions options = {.thinking = *rc::gen::arbitrary<bool>(),
                               .drop_thinking = *rc::gen::arbitrary<bool>()};
  const ChatEncoder encoder = *ChatEncoder::Make(WithReminder());
  const ChatPrompt prompt = *encoder.EncodePrompt(messages, options);
  RC_ASSERT(prompt.ids == *encoder.Encode(messages, options));
  RC_ASSERT(std::is_sorted(prompt.boundaries.begin(), prompt.boundaries.end()));
  RC_ASSERT(std::adjacent_find(prompt.boundaries.begin(), prompt.boundaries.end()) ==
            prompt.boundaries.end());
  for (const int64_t boundary : prompt.boundaries) {
    RC_ASSERT(boundary > 1 && boundary < static_cast<int64_t>(prompt.ids.size()));
  }
  const auto agrees = [&](const std::vector<ChatMessage>& others, int64_t boundary) {
    const ChatPrompt other = *encoder.EncodePrompt(others, options);
    return static_cast<int64_t>(other.ids.size()) >= boundary &&
           std::equal(prompt.ids.begin(), prompt.ids.begin() + boundary, other.ids.begin());
  };
  if (messages.back().role != Role::kUser || prompt.boundaries.empty()) return;
  // Neighbouring user messages are one turn: the change is behind its beginning.
  std::vector<ChatMessage> changed = messages;
  changed.back().content = "another question";
  RC_ASSERT(agrees(changed, prompt.boundaries.back()));
}

}  // namespace
}  // namespace fathom
