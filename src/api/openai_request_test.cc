// Request validation: every field with every wrong type is a 400 that names the field.
#include "api/openai_request.h"

#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>

#include <sstream>

#include "api/json_text.h"
#include "api/testing_tokenizer.h"
#include "core/log.h"

namespace fathom {
namespace {

using nlohmann::json;

enum class Kind { kBool, kNumber, kInteger, kString, kObject, kIntegers, kStringOrStrings };

struct Field {
  const char* name;
  Kind kind;
  json valid;
  std::vector<json> out_of_range;
};

const std::vector<Field>& SharedFields() {
  static const std::vector<Field> fields = {
      {"model", Kind::kString, "fake", {}},
      {"stream", Kind::kBool, true, {}},
      {"n", Kind::kInteger, 2, {0, -1, 1000, 1.5}},
      {"temperature", Kind::kNumber, 0.5, {-0.1, 2.1, -1e300, 1e300}},
      {"top_p", Kind::kNumber, 0.5, {-0.1, 1.1}},
      {"top_k", Kind::kInteger, 5, {-2, 1.5, int64_t{1} << 40}},
      {"min_p", Kind::kNumber, 0.1, {-1, 2}},
      {"presence_penalty", Kind::kNumber, 1, {-3, 3}},
      {"frequency_penalty", Kind::kNumber, -1, {-3, 3}},
      {"repetition_penalty", Kind::kNumber, 1.1, {0, -1}},
      {"seed", Kind::kInteger, 42, {1.5}},
      {"logit_bias",
       Kind::kObject,
       {{"65", 10}},
       {{{"x", 1}}, {{"65", 101}}, {{"-1", 0}}, {{"99999", 1}}, {{"65", "a"}}}},
      {"stop",
       Kind::kStringOrStrings,
       json::array({"a", "b"}),
       {json::array({1}), json::array({"a", nullptr}), "", json::array({""})}},
      {"stop_token_ids",
       Kind::kIntegers,
       json::array({65}),
       {json::array({-1}), json::array({100000}), json::array({"a"}), json::array({1.5})}},
      {"include_stop_str_in_output", Kind::kBool, true, {}},
      {"skip_special_tokens", Kind::kBool, false, {}},
      {"ignore_eos", Kind::kBool, true, {}},
      {"min_tokens", Kind::kInteger, 1, {-1, 0.5}},
      {"prompt_logprobs", Kind::kInteger, 1, {-1, 21}},
      {"return_tokens_as_token_ids", Kind::kBool, true, {}},
      {"return_token_ids", Kind::kBool, true, {}},
      {"priority", Kind::kInteger, -5, {1.5, int64_t{1} << 40}},
      {"best_of", Kind::kInteger, 1, {0, 2}},
      {"user", Kind::kString, "u", {}},
      {"cache_salt", Kind::kString, "s", {"", std::string(1025, 's')}},
      {"fathom", Kind::kObject, {{"session", "a"}, {"ttl", 60}, {"explain", true}}, {}},
      {"metadata", Kind::kObject, json::object(), {}},
      {"response_format",
       Kind::kObject,
       {{"type", "text"}},
       {{{"type", "json_object"}}, json::object()}},
  };
  return fields;
}

const std::vector<Field>& ChatFields() {
  static const std::vector<Field> fields = {
      {"max_tokens", Kind::kInteger, 5, {0, -1, 2.5}},
      {"max_completion_tokens", Kind::kInteger, 5, {0, -1}},
      {"logprobs", Kind::kBool, true, {}},
      {"top_logprobs", Kind::kInteger, 0, {-1, 21}},
      {"reasoning_effort", Kind::kString, "high", {"enormous"}},
      {"enable_thinking", Kind::kBool, true, {}},
      {"chat_template_kwargs", Kind::kObject, {{"thinking", true}}, {}},
      {"add_generation_prompt", Kind::kBool, true, {}},
      {"continue_final_message", Kind::kBool, false, {true}},
      {"parallel_tool_calls", Kind::kBool, true, {}},
      {"echo", Kind::kBool, false, {true}},
  };
  return fields;
}

const std::vector<Field>& CompletionFields() {
  static const std::vector<Field> fields = {
      {"max_tokens", Kind::kInteger, 5, {0, -1, 2.5}}, {"logprobs", Kind::kInteger, 3, {-1, 21}},
      {"add_special_tokens", Kind::kBool, true, {}},   {"echo", Kind::kBool, true, {}},
      {"suffix", Kind::kString, "", {"tail"}},
  };
  return fields;
}

bool Accepts(Kind kind, const json& value) {
  if (value.is_null()) return true;
  switch (kind) {
    case Kind::kBool: return value.is_boolean();
    case Kind::kNumber:
    case Kind::kInteger: return value.is_number();
    case Kind::kString: return value.is_string();
    case Kind::kObject: return value.is_object();
    case Kind::kIntegers: return value.is_array();
    case Kind::kStringOrStrings: return value.is_string() || value.is_array();
  }
  return false;
}

class OpenAiRequest : public ::testing::Test {
 protected:
  OpenAiRequest() {
    model_.tokenizer = &tokenizer_;
    model_.names = {"fake"};
    model_.max_model_len = 1000;
  }

  Status Parse(bool chat, const json& body) const {
    if (chat) return ParseChatRequest(body, model_).map([](auto&&) {});
    return ParseCompletionRequest(body, model_).map([](auto&&) {});
  }
  static json Base(bool chat) {
    if (!chat) return {{"prompt", "p"}};
    return {{"messages", json::array({{{"role", "user"}, {"content", "hi"}}})}};
  }
  void ExpectRefusal(bool chat, const json& body, const std::string& param) const {
    const Status status = Parse(chat, body);
    ASSERT_FALSE(status) << body;
    EXPECT_TRUE(status.error().code == Code::kInvalidArgument ||
                status.error().code == Code::kUnimplemented)
        << body;
    EXPECT_EQ(status.error().param, param) << body << ": " << status.error().message;
    EXPECT_NE(status.error().message.find(param), std::string::npos) << status.error().message;
  }
  void CheckField(bool chat, const Field& field) const {
    const json wrong[] = {true, 7, 0.5, "text", json::array({json::object()}), {{"k", 1}}};
    for (const json& value : wrong) {
      if (Accepts(field.kind, value)) continue;
      json body = Base(chat);
      body[field.name] = value;
      ExpectRefusal(chat, body, field.name);
    }
    for (const json& value : field.out_of_range) {
      json body = Base(chat);
      body[field.name] = value;
      ExpectRefusal(chat, body, field.name);
    }
    for (const json& value : {field.valid, json(nullptr)}) {
      json body = Base(chat);
      body[field.name] = value;
      const Status status = Parse(chat, body);
      EXPECT_TRUE(status) << body << ": " << status.error().message;
    }
  }

  testing::ByteTokenizer tokenizer_;
  ServedModel model_;
};

TEST_F(OpenAiRequest, EveryFieldOfEveryWrongTypeIsRefusedByName) {
  for (const bool chat : {true, false}) {
    for (const Field& field : SharedFields()) CheckField(chat, field);
    for (const Field& field : chat ? ChatFields() : CompletionFields()) CheckField(chat, field);
  }
}

TEST_F(OpenAiRequest, UnknownFieldsAreIgnored) {
  for (const bool chat : {true, false}) {
    json body = Base(chat);
    body["store"] = true;
    body["made_up"] = {{"deep", json::array({1, 2})}};
    EXPECT_TRUE(Parse(chat, body));
  }
}

TEST_F(OpenAiRequest, FieldsThatWouldChangeTheReplyAreRefusedByName) {
  struct Case {
    const char* name;
    json refused, neutral;
    bool completions = true;
  };
  const json ids = json::array({65});
  const json words = json::array({"a"});
  const json none = json::array();
  for (const Case& field : std::vector<Case>{
           {"allowed_token_ids", ids, nullptr},
           {"allowed_token_ids", none, nullptr},  // nothing allowed is not anything allowed
           {"bad_words", words, none},
           {"truncate_prompt_tokens", 0, nullptr},
           {"truncate_prompt_tokens", 16, nullptr},
           {"logits_processors", words, none},
           {"thinking_token_budget", 0, nullptr},
           {"modalities", json::array({"text", "audio"}), json::array({"text"})},
           {"audio", {{"voice", "alloy"}}, nullptr},
           {"prompt_embeds", "AA==", nullptr},
           {"best_of", 2, 1},
           {"guided_json", json::object(), nullptr},
           {"guided_regex", "a*", nullptr},
           {"guided_choice", words, nullptr},
           {"guided_grammar", "root ::= 'a'", nullptr},
           {"guided_json_object", true, false},
           {"structured_outputs", {{"json", json::object()}}, nullptr},
           {"use_beam_search", true, false},
           {"chat_template", "{{ messages }}", "", false},
           {"documents", json::array({json::object()}), none, false},
           {"echo", true, false, false},
           {"add_special_tokens", true, false, false},
           {"include_reasoning", false, true, false},
           {"web_search_options", json::object(), nullptr, false},
           {"functions", json::array({{{"name", "f"}}}), none, false},
           {"function_call", {{"name", "f"}}, "none", false},
           {"function_call", 1, "auto", false},
       }) {
    for (const bool chat : {true, false}) {
      if (!chat && !field.completions) continue;
      json body = Base(chat);
      body[field.name] = field.refused;
      ExpectRefusal(chat, body, field.name);
      EXPECT_EQ(Parse(chat, body).error().code, Code::kUnimplemented) << body;
      for (const json& value : {field.neutral, json(nullptr)}) {
        body[field.name] = value;
        const Status status = Parse(chat, body);
        EXPECT_TRUE(status) << body << ": " << status.error().message;
      }
    }
  }
}

TEST_F(OpenAiRequest, IgnoredFieldsAreLoggedOncePerName) {
  std::ostringstream text;
  const auto sink = std::make_shared<spdlog::sinks::ostream_sink_mt>(text);
  sink->set_pattern("%l %v");
  const auto level = Log().level();
  Log().sinks().push_back(sink);
  Log().set_level(spdlog::level::debug);
  json body = Base(true);
  body.update(
      {{"max_tokenz", 5}, {"a\nb", 1}, {"thinking", true}, {"max_tokens", 5}, {"n", nullptr}});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Parse(true, body));
  EXPECT_TRUE(Parse(false, {{"prompt", "a"}, {"max_tokenz", 5}}));
  Log().set_level(spdlog::level::info);
  EXPECT_TRUE(Parse(false, {{"prompt", "a"}, {"temprature", 5}}));
  Log().set_level(level);
  Log().sinks().pop_back();
  EXPECT_EQ(text.str(), "debug ignored field 'a?b'\ndebug ignored field 'max_tokenz'\n");
}

TEST_F(OpenAiRequest, StreamOptionsNameTheInnerField) {
  for (const char* name : {"include_usage", "continuous_usage_stats", "include_progress"}) {
    for (const json& value : {json(1), json("true"), json::array()}) {
      json body = Base(true);
      body["stream"] = true;
      body["stream_options"] = {{name, value}};
      ExpectRefusal(true, body, std::string("stream_options.") + name);
    }
  }
  json body = Base(true);
  body["stream_options"] = {{"include_usage", true}};
  ExpectRefusal(true, body, "stream_options");
  body["stream_options"] = 3;
  ExpectRefusal(true, body, "stream_options");
}

TEST_F(OpenAiRequest, TheFathomObjectNamesTheInnerField) {
  const std::pair<json, const char*> wrong[] = {
      {{{"session", 7}}, "fathom.session"},
      {{{"session", ""}}, "fathom.session"},
      {{{"session", std::string(1025, 's')}}, "fathom.session"},
      {{{"session", "a"}, {"ttl", "1h"}}, "fathom.ttl"},
      {{{"session", "a"}, {"ttl", -1}}, "fathom.ttl"},
      {{{"session", "a"}, {"ttl", 0.5}}, "fathom.ttl"},
      {{{"session", "a"}, {"ttl", int64_t{1} << 40}}, "fathom.ttl"},
      {{{"ttl", 60}}, "fathom.ttl"},
      {{{"sesion", 7}}, "fathom.sesion"},
      {{{"explain", 1}}, "fathom.explain"},
      {{{"explain", "yes"}}, "fathom.explain"},
  };
  for (const bool chat : {true, false}) {
    for (const auto& [object, param] : wrong) {
      json body = Base(chat);
      body["fathom"] = object;
      ExpectRefusal(chat, body, param);
    }
  }
  json body = Base(true);
  body["cache_salt"] = "tenant";
  body["fathom"] = {{"session", "a"}, {"explain", true}, {"ttl", nullptr}};
  const GenerationParams params = ParseChatRequest(body, model_)->params;
  EXPECT_EQ(params.cache_salt, "tenant");
  EXPECT_EQ(params.session, "a");
  EXPECT_EQ(params.session_ttl, 3600);
  EXPECT_TRUE(params.explain);
}

TEST_F(OpenAiRequest, MessagesNameTheirIndex) {
  const std::vector<std::pair<json, std::string>> cases = {
      {nullptr, "messages"},
      {"hi", "messages"},
      {json::array(), "messages"},
      {json::array({1}), "messages[0]"},
      {json::array({json::object()}), "messages[0].role"},
      {json::array({{{"role", 1}, {"content", "a"}}}), "messages[0].role"},
      {json::array({{{"role", "robot"}, {"content", "a"}}}), "messages[0].role"},
      {json::array({{{"role", "user"}}}), "messages[0].content"},
      {json::array({{{"role", "user"}, {"content", 5}}}), "messages[0].content"},
      {json::array({{{"role", "user"}, {"content", json::array({"x"})}}}),
       "messages[0].content[0]"},
      {json::array({{{"role", "user"}, {"content", json::array({{{"type", "image_url"}}})}}}),
       "messages[0].content[0].type"},
      {json::array({{{"role", "user"},
                     {"content", json::array({{{"type", "text"}, {"text", "a"}},
                                              {{"type", "input_audio"}}})}}}),
       "messages[0].content[1].type"},
      {json::array({{{"role", "user"}, {"content", json::array({{{"type", "text"}}})}}}),
       "messages[0].content[0].text"},
      {json::array({{{"role", "assistant"}, {"reasoning_content", 1}}}),
       "messages[0].reasoning_content"},
      {json::array({{{"role", "assistant"}, {"tool_calls", json::array({json::object()})}}}),
       "messages[0].tool_calls"},
  };
  for (const auto& [messages, param] : cases) ExpectRefusal(true, {{"messages", messages}}, param);
}

TEST_F(OpenAiRequest, ContentPartsAreJoined) {
  const json body = {
      {"messages",
       json::array({{{"role", "user"},
                     {"content", json::array({{{"type", "text"}, {"text", "a"}},
                                              {{"type", "text"}, {"text", "b"}}})}},
                    {{"role", "assistant"}, {"content", nullptr}, {"reasoning", "r"}}})}};
  const auto request = ParseChatRequest(body, model_);
  ASSERT_TRUE(request) << request.error().message;
  EXPECT_EQ(request->messages[0].content, "a\n\nb");
  EXPECT_EQ(request->messages[1].reasoning, "r");
}

TEST_F(OpenAiRequest, PromptForms) {
  const auto parse = [&](const json& prompt) {
    return ParseCompletionRequest({{"prompt", prompt}}, model_);
  };
  EXPECT_EQ(parse("a")->prompts.size(), 1u);
  EXPECT_EQ(parse(json::array({"a", "b"}))->prompts.size(), 2u);
  EXPECT_EQ(std::get<1>(parse(json::array({1, 2, 3}))->prompts[0]).size(), 3u);
  EXPECT_EQ(parse(json::array({json::array({1}), json::array({2, 3})}))->prompts.size(), 2u);
  for (const json& bad :
       {json(5), json(nullptr), json::object(), json::array(), json::array({1, "a"}),
        json::array({"a", 1}), json::array({json::array({"a"})}), json::array({-1}),
        json::array({100000}), json::array({1.5}), json::array({nullptr}), json(true)}) {
    ExpectRefusal(false, {{"prompt", bad}}, "prompt");
  }
}

TEST_F(OpenAiRequest, ThinkingSourcesAndTheirOrder) {
  const auto thinking = [&](json fields) {
    json body = Base(true);
    body.update(fields);
    const auto request = ParseChatRequest(body, model_);
    EXPECT_TRUE(request) << request.error().message;
    return request->options.thinking;
  };
  EXPECT_FALSE(thinking(json::object()));
  EXPECT_TRUE(thinking({{"thinking", true}}));
  EXPECT_TRUE(thinking({{"thinking", {{"type", "enabled"}}}}));
  EXPECT_TRUE(thinking({{"enable_thinking", true}}));
  EXPECT_TRUE(thinking({{"chat_template_kwargs", {{"enable_thinking", true}}}}));
  EXPECT_TRUE(thinking({{"reasoning_effort", "low"}}));
  EXPECT_FALSE(thinking({{"reasoning_effort", "none"}}));
  EXPECT_FALSE(thinking({{"thinking", false}, {"reasoning_effort", "high"}}));
  EXPECT_FALSE(
      thinking({{"enable_thinking", false}, {"chat_template_kwargs", {{"thinking", true}}}}));
  model_.default_thinking = true;
  EXPECT_TRUE(thinking(json::object()));
  EXPECT_FALSE(thinking({{"reasoning_effort", "none"}}));
  EXPECT_FALSE(thinking({{"thinking", {{"type", "disabled"}}}}));
  json body = Base(true);
  body["thinking"] = true;
  body["enable_thinking"] = false;
  ExpectRefusal(true, body, "enable_thinking");
  body = Base(true);
  body["thinking"] = "yes";
  ExpectRefusal(true, body, "thinking");
  body["thinking"] = {{"type", "sometimes"}};
  ExpectRefusal(true, body, "thinking.type");
  body = Base(true);
  body["chat_template_kwargs"] = {{"thinking", 1}};
  ExpectRefusal(true, body, "chat_template_kwargs.thinking");
}

TEST_F(OpenAiRequest, ThinkingSamplingSwitch) {
  json body = Base(true);
  body.update({{"thinking", true}, {"temperature", 2}, {"presence_penalty", 2}, {"seed", 1}});
  EXPECT_EQ(ParseChatRequest(body, model_)->params.sampling.temperature, 2.0f);
  model_.thinking_sampling = ThinkingSampling::kIgnore;
  const auto ignored = ParseChatRequest(body, model_);
  EXPECT_EQ(ignored->params.sampling.temperature, model_.defaults.temperature);
  EXPECT_EQ(ignored->params.sampling.presence_penalty, 0.0f);
  body["thinking"] = false;
  EXPECT_EQ(ParseChatRequest(body, model_)->params.sampling.temperature, 2.0f);
}

TEST_F(OpenAiRequest, ContinueFinalMessageCombinations) {
  json body = {{"messages", json::array({{{"role", "user"}, {"content", "q"}},
                                         {{"role", "assistant"}, {"content", "The answer is"}}})}};
  const auto options = [&](json add, json resume) {
    body["add_generation_prompt"] = add;
    body["continue_final_message"] = resume;
    return ParseChatRequest(body, model_);
  };
  EXPECT_TRUE(options(true, false)->options.add_generation_prompt);
  EXPECT_TRUE(options(false, true)->options.continue_final_message);
  EXPECT_FALSE(options(nullptr, true)->options.add_generation_prompt);
  EXPECT_FALSE(options(false, false)->options.add_generation_prompt);
  ASSERT_FALSE(options(true, true));
  EXPECT_EQ(options(true, true).error().param, "continue_final_message");
}

TEST_F(OpenAiRequest, ToolsAreRefusedUnlessTheyChangeNothing) {
  json body = Base(true);
  body["tools"] = json::array();
  EXPECT_TRUE(Parse(true, body));
  body["tool_choice"] = "auto";
  EXPECT_TRUE(Parse(true, body));
  body["tools"] = json::array({{{"type", "function"}}});
  ExpectRefusal(true, body, "tools");
  body["tool_choice"] = "none";
  EXPECT_TRUE(Parse(true, body));
  body["tools"] = json::array();
  body["tool_choice"] = "required";
  ExpectRefusal(true, body, "tool_choice");
  body["tool_choice"] = {{"type", "function"}};
  ExpectRefusal(true, body, "tool_choice");
  body["tool_choice"] = 5;
  ExpectRefusal(true, body, "tool_choice");
  body["tool_choice"] = nullptr;
  body["tools"] = "x";
  ExpectRefusal(true, body, "tools");
}

TEST_F(OpenAiRequest, DefaultsComeFromTheGenerationConfig) {
  model_.defaults.temperature = 0;
  model_.defaults.top_p = 0.9f;
  auto request = ParseChatRequest(Base(true), model_);
  EXPECT_EQ(request->params.sampling.temperature, 0.0f);
  EXPECT_EQ(request->params.sampling.top_p, 0.9f);
  EXPECT_FALSE(request->params.max_tokens);
  EXPECT_EQ(ParseCompletionRequest(Base(false), model_)->params.max_tokens, 16);
}

TEST_F(OpenAiRequest, TokenizeAndDetokenize) {
  EXPECT_TRUE(ParseTokenizeRequest({{"prompt", "x"}}, model_));
  EXPECT_TRUE(ParseTokenizeRequest(Base(true), model_));
  EXPECT_EQ(ParseTokenizeRequest(json::object(), model_).error().param, "prompt");
  EXPECT_EQ(ParseTokenizeRequest({{"prompt", 1}}, model_).error().param, "prompt");
  EXPECT_EQ(ParseTokenizeRequest({{"prompt", "x"}, {"return_token_strs", 1}}, model_).error().param,
            "return_token_strs");
  EXPECT_TRUE(ParseDetokenizeRequest({{"tokens", json::array({65, 66})}}, model_));
  EXPECT_EQ(ParseDetokenizeRequest(json::object(), model_).error().param, "tokens");
  EXPECT_EQ(ParseDetokenizeRequest({{"tokens", json::array({-1})}}, model_).error().param,
            "tokens");
  EXPECT_EQ(ParseDetokenizeRequest({{"tokens", "ab"}}, model_).error().param, "tokens");
}

TEST_F(OpenAiRequest, UnknownModelNamesTheServedOnes) {
  EXPECT_EQ(*CheckModelName("", model_), "fake");
  const auto missing = CheckModelName("gpt", model_);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  EXPECT_NE(missing.error().message.find("'fake'"), std::string::npos);
}

TEST(GenerationConfig, ReadsDefaultsAndRefusesByKey) {
  const auto greedy = ParseGenerationDefaults(R"({"do_sample":false,"temperature":0.6})", "f");
  EXPECT_EQ(greedy->temperature, 0.0f);
  const auto list = ParseGenerationDefaults(R"({"eos_token_id":[1,2],"top_k":-1})", "f");
  EXPECT_EQ(list->eos_tokens.size(), 2u);
  EXPECT_EQ(list->top_k, 0);
  for (const auto& [text, key] : std::vector<std::pair<const char*, const char*>>{
           {R"({"temperature":"a"})", "temperature"},
           {R"({"top_p":2})", "top_p"},
           {R"({"do_sample":1})", "do_sample"},
           {R"({"eos_token_id":"x"})", "eos_token_id"}}) {
    const auto refused = ParseGenerationDefaults(text, "f");
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().param, key);
  }
  EXPECT_FALSE(ParseGenerationDefaults("[", "f"));
}

}  // namespace
}  // namespace fathom
