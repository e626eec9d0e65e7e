// Replies from engine outputs: streamed and plain text agree however the tokens arrive, nothing
// follows a stop string, counts add up, events come in order.
#include "api/generation.h"

#include <gtest/gtest.h>

#include <random>

#include "api/json_text.h"
#include "api/reply_writer.h"
#include "api/testing_client.h"
#include "api/testing_model.h"

namespace fathom {
namespace {

using nlohmann::json;
using testing::EventData;
using testing::FakeModel;

class GenerationTest : public ::testing::Test {
 protected:
  GenerationPlan Plan(json body, bool chat = true) {
    if (chat && !body.contains("messages")) {
      body["messages"] = json::array({{{"role", "user"}, {"content", "q"}}});
    }
    auto plan = chat ? PrepareChat(body.dump(), model_.served)
                     : PrepareCompletion(body.dump(), model_.served);
    EXPECT_TRUE(plan) << plan.error().message;
    return std::move(*plan);
  }

  // Outputs of one choice: `text` cut into steps of 1 to `step` tokens, then the end.
  std::vector<Output> Script(const std::string& text, size_t step, bool logprobs = false) {
    const auto tokens = model_.tokenizer.Encode(text, AddedTokens::kMatch);
    std::vector<Output> outputs;
    for (size_t at = 0; at < tokens.size();) {
      const size_t count = std::min<size_t>(tokens.size() - at, 1 + random_() % step);
      Output output;
      output.tokens.assign(tokens.begin() + at, tokens.begin() + at + count);
      for (const TokenId token : output.tokens) {
        if (logprobs) output.logprobs.push_back({{token, -0.5f, 1}, {token, -0.5f, 1}});
      }
      at += count;
      outputs.push_back(std::move(output));
    }
    Output end;
    end.finish = FinishReason::kStop;
    end.stop_token = model_.eos();
    outputs.push_back(end);
    return outputs;
  }

  struct Result {
    std::string reasoning, content, finish;
    json usage, stop_reason, chunks = json::array();
    size_t scored = 0;
  };

  // Streams choice 0 with a random number of outputs between writes and checks the order (I4).
  Result RunStream(const json& body, const std::vector<Output>& outputs) {
    json streamed = body;
    streamed["stream"] = true;
    streamed["stream_options"] = {{"include_usage", true}};
    Generation generation(Plan(streamed), model_.served, "id", 0);
    const auto writer = MakeChatWriter(generation);
    std::string stream;
    for (const Output& output : outputs) {
      generation.Accept(0, output);
      if (random_() % 3 != 0) writer->AppendEvents(&stream);
    }
    writer->AppendEvents(&stream);
    writer->AppendEnd(&stream);
    const auto events = EventData(stream);
    Result result;
    EXPECT_EQ(events.back(), "[DONE]");
    for (size_t i = 0; i + 1 < events.size(); ++i) {
      const json chunk = json::parse(events[i]);
      result.chunks.push_back(chunk);
      if (i + 2 == events.size()) {
        EXPECT_TRUE(chunk["choices"].empty());
        result.usage = chunk["usage"];
        continue;
      }
      EXPECT_TRUE(chunk["usage"].is_null());
      const json& choice = chunk["choices"][0];
      const json& delta = choice["delta"];
      EXPECT_EQ(delta.contains("role"), i == 0);
      EXPECT_TRUE(result.finish.empty()) << "a chunk after the finish";
      if (delta.contains("content")) result.content += delta["content"].get<std::string>();
      if (delta.contains("reasoning")) {
        EXPECT_EQ(delta["reasoning"], delta["reasoning_content"]);
        EXPECT_TRUE(result.content.empty());
        result.reasoning += delta["reasoning"].get<std::string>();
      }
      if (choice["logprobs"].is_object()) result.scored += choice["logprobs"]["content"].size();
      if (choice["finish_reason"].is_string()) {
        result.finish = choice["finish_reason"];
        result.stop_reason = choice["stop_reason"];
      }
    }
    return result;
  }

  Result RunPlain(const json& body, const std::vector<Output>& outputs) {
    Generation generation(Plan(body), model_.served, "id", 0);
    for (const Output& output : outputs) generation.Accept(0, output);
    EXPECT_TRUE(generation.finished());
    const json reply = json::parse(MakeChatWriter(generation)->Body());
    const json& choice = reply["choices"][0];
    Result result;
    result.content = choice["message"]["content"];
    result.reasoning = choice["message"].value("reasoning_content", "");
    EXPECT_EQ(result.reasoning, choice["message"].value("reasoning", ""));
    result.finish = choice["finish_reason"];
    result.stop_reason = choice["stop_reason"];
    result.usage = reply["usage"];
    if (choice["logprobs"].is_object()) result.scored = choice["logprobs"]["content"].size();
    return result;
  }

  FakeModel model_;
  std::mt19937 random_{7};
};

TEST_F(GenerationTest, StreamEqualsPlainForAnyDelivery) {
  const std::string texts[] = {"hello world",
                               "a\n\nb",
                               "안녕 👩‍👩‍👧 漢字",
                               "thoughts</think>the answer",
                               "x</think>",
                               "",
                               "</think>",
                               "one END two",
                               "plain 2 < 3 and <"};
  const json bodies[] = {json::object(),
                         {{"thinking", true}},
                         {{"stop", json::array({"END", "\n\n", "think"})}},
                         {{"thinking", true}, {"stop", "END"}},
                         {{"stop", "two"}, {"include_stop_str_in_output", true}},
                         {{"logprobs", true}, {"top_logprobs", 1}}};
  for (const std::string& text : texts) {
    for (const json& body : bodies) {
      for (const size_t step : {1, 3, 100}) {
        SCOPED_TRACE(text + " / " + body.dump() + " / " + std::to_string(step));
        const bool logprobs = body.contains("logprobs");
        const Result plain = RunPlain(body, Script(text, 1, logprobs));
        const Result stream = RunStream(body, Script(text, step, logprobs));
        EXPECT_EQ(stream.content, plain.content);
        EXPECT_EQ(stream.reasoning, plain.reasoning);
        EXPECT_EQ(stream.finish, plain.finish);
        EXPECT_EQ(stream.stop_reason, plain.stop_reason);
        EXPECT_EQ(stream.usage, plain.usage);
        EXPECT_EQ(stream.scored, plain.scored);
        EXPECT_EQ(plain.content.find("\xEF\xBF\xBD"), std::string::npos);
        EXPECT_EQ(plain.usage["total_tokens"], plain.usage["prompt_tokens"].get<int>() +
                                                   plain.usage["completion_tokens"].get<int>());
        EXPECT_LE(plain.usage["completion_tokens_details"]["reasoning_tokens"],
                  plain.usage["completion_tokens"]);
      }
    }
  }
}

TEST_F(GenerationTest, NothingAfterAStopStringIsReturnedOrBilled) {
  const Result result = RunPlain({{"stop", json::array({"END"})}}, Script("one END two", 100));
  EXPECT_EQ(result.content, "one ");
  EXPECT_EQ(result.finish, "stop");
  EXPECT_EQ(result.stop_reason, "END");
  EXPECT_EQ(result.usage["completion_tokens"], 7);  // "one END"
}

TEST_F(GenerationTest, AcceptAsksForACancelOnlyWhenTheEngineStillRuns) {
  Generation generation(Plan({{"stop", "b"}}), model_.served, "id", 0);
  Output output;
  output.tokens = {'a', 'b', 'c'};
  EXPECT_TRUE(generation.Accept(0, output));
  EXPECT_TRUE(generation.finished());
  EXPECT_FALSE(generation.Accept(0, output));
}

TEST_F(GenerationTest, ThinkingModeComesFromTheRenderedPrompt) {
  EXPECT_TRUE(Plan({{"thinking", true}}).thinking);
  EXPECT_FALSE(Plan(json::object()).thinking);
  // Text of a user never turns the mode.
  const json quoted = {{"messages", json::array({{{"role", "user"}, {"content", "<think>"}}})}};
  EXPECT_FALSE(Plan(quoted).thinking);
}

TEST_F(GenerationTest, ChoicesGetDistinctSeedsAndLimits) {
  Generation generation(Plan({{"n", 3}, {"seed", 10}, {"max_tokens", 5}}), model_.served, "id", 0);
  const auto requests = generation.MakeRequests(99);
  ASSERT_EQ(requests.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(requests[i].sampling.seed, 10 + i);
    EXPECT_EQ(requests[i].max_tokens, 5);
    EXPECT_EQ(requests[i].prompt, requests[0].prompt);
    EXPECT_FALSE(requests[i].prompt.empty());
  }
}

TEST_F(GenerationTest, TooLongPromptsNameBothNumbers) {
  const json body = {{"prompt", std::string(70000, 'x')}};
  const auto refused = PrepareCompletion(body.dump(), model_.served);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kContextLength);
  EXPECT_EQ(refused.error().param, "prompt");
  EXPECT_NE(refused.error().message.find("65536"), std::string::npos);
  EXPECT_NE(refused.error().message.find("70000"), std::string::npos);
}

TEST_F(GenerationTest, CompletionEchoLogprobsAndTokenIds) {
  const json body = {{"prompt", "ab"},
                     {"echo", true},
                     {"logprobs", 1},
                     {"max_tokens", 5},
                     {"return_token_ids", true}};
  Generation generation(Plan(body, false), model_.served, "id", 0);
  EXPECT_EQ(generation.MakeRequests(0)[0].prompt_logprobs, 1);
  Output first;
  first.prompt_logprobs = {{{'b', -1.0f, 2}, {'z', -0.1f, 1}}};
  generation.Accept(0, first);
  for (const Output& output : Script("cd", 1, true)) generation.Accept(0, output);
  const json choice = json::parse(MakeCompletionWriter(generation)->Body())["choices"][0];
  EXPECT_EQ(choice["text"], "abcd");
  EXPECT_EQ(choice["logprobs"]["tokens"], json::array({"a", "b", "c", "d"}));
  EXPECT_EQ(choice["logprobs"]["text_offset"], json::array({0, 1, 2, 3}));
  EXPECT_TRUE(choice["logprobs"]["token_logprobs"][0].is_null());
  EXPECT_EQ(choice["logprobs"]["top_logprobs"][1].size(), 2u);
  EXPECT_EQ(choice["prompt_token_ids"], json::array({'a', 'b'}));
  EXPECT_EQ(choice["token_ids"].size(), 3u);  // with the end token
}

TEST_F(GenerationTest, EchoWithoutTokensScoresThePrompt) {
  const json body = {{"prompt", "ab"}, {"echo", true}, {"logprobs", 0}, {"max_tokens", 0}};
  Generation generation(Plan(body, false), model_.served, "id", 0);
  EXPECT_EQ(generation.MakeRequests(0)[0].max_tokens, 1);
  Output output;
  output.prompt_logprobs = {{{'b', -1.0f, 1}}};
  output.tokens = {'x'};
  output.logprobs = {{{'x', -1.0f, 1}}};
  output.finish = FinishReason::kLength;
  generation.Accept(0, output);
  const json reply = json::parse(MakeCompletionWriter(generation)->Body());
  EXPECT_EQ(reply["choices"][0]["text"], "ab");
  EXPECT_EQ(reply["choices"][0]["logprobs"]["tokens"].size(), 2u);
  EXPECT_EQ(reply["usage"]["completion_tokens"], 0);
}

TEST_F(GenerationTest, EngineErrorsEndTheStreamWithAnErrorEvent) {
  Generation generation(Plan({{"stream", true}}), model_.served, "id", 0);
  const auto writer = MakeChatWriter(generation);
  Output output;
  output.tokens = {'a'};
  generation.Accept(0, output);
  output.tokens.clear();
  output.finish = FinishReason::kError;
  output.error = {Code::kInternal, "the step failed", {}};
  generation.Accept(0, output);
  ASSERT_NE(generation.error(), nullptr);
  std::string stream;
  writer->AppendError(*generation.error(), &stream);
  const auto events = EventData(stream);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(json::parse(events[0])["error"]["message"], "the step failed");
  EXPECT_EQ(events[1], "[DONE]");
}

}  // namespace
}  // namespace fathom
