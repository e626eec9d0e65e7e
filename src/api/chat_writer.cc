// chat.completion and chat.completion.chunk.
#include <utility>

#include "api/json_text.h"
#include "api/openai_writer.h"

namespace fathom {
namespace {

using nlohmann::ordered_json;

class ChatWriter : public OpenAiWriter {
 public:
  explicit ChatWriter(Generation& generation) : OpenAiWriter(generation, "chat.completion.chunk") {}

  void AppendEvents(std::string* out) override {
    for (size_t i = 0; i < generation_.choices().size(); ++i) AppendChoice(i, out);
    generation_.MarkTaken();
  }

  std::string Body() override;

 private:
  void AppendChoice(size_t index, std::string* out);
  void AppendDelta(size_t index, std::string_view delta, const std::string& logprobs,
                   const std::vector<TokenId>& token_ids, std::string* out) const;
  ordered_json LogprobsJson(const std::vector<ScoredToken>& scored) const;
  ordered_json TokenJson(TokenId token, float logprob) const;
};

ordered_json ChatWriter::TokenJson(TokenId token, float logprob) const {
  ordered_json bytes = ordered_json::array();
  for (const char byte : generation_.model().tokenizer->TokenBytes(token)) {
    bytes.push_back(static_cast<uint8_t>(byte));
  }
  return {{"token", TokenText(token)},
          {"logprob", FiniteLogprob(logprob)},
          {"bytes", std::move(bytes)}};
}

ordered_json ChatWriter::LogprobsJson(const std::vector<ScoredToken>& scored) const {
  ordered_json content = ordered_json::array();
  for (const ScoredToken& token : scored) {
    ordered_json entry = TokenJson(token.token, token.logprob);
    ordered_json top = ordered_json::array();
    for (const ops::TokenLogprob& other : token.top) {
      top.push_back(TokenJson(other.token, other.logprob));
    }
    entry["top_logprobs"] = std::move(top);
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}, {"refusal", nullptr}};
}

void ChatWriter::AppendDelta(size_t index, std::string_view delta, const std::string& logprobs,
                             const std::vector<TokenId>& token_ids, std::string* out) const {
  BeginChunk(out);
  *out += R"({"index":)" + std::to_string(index) + R"(,"delta":{)";
  *out += delta;
  *out += R"(},"logprobs":)" + logprobs + R"(,"finish_reason":null)";
  if (!token_ids.empty()) *out += R"(,"token_ids":)" + ordered_json(token_ids).dump();
  *out += "}";
  EndChunk(out);
}

// Role, then reasoning, then content, then the finish. Log-probabilities and token ids travel with
// the first delta that has text, or in front of the finish.
void ChatWriter::AppendChoice(size_t index, std::string* out) {
  Choice& choice = generation_.choices()[index];
  if (!choice.started || choice.closed) return;
  if (generation_.error() != nullptr && choice.finished()) return;  // AppendError ends the stream
  if (!choice.opened) {
    choice.opened = true;
    AppendDelta(index, R"("role":"assistant","content":"")", "null", {}, out);
    if (generation_.plan().params.return_token_ids && index == 0) {
      out->resize(out->size() - 3);  // "}\n\n"
      *out += R"(,"prompt_token_ids":)" + ordered_json(generation_.prompt(0)).dump() + "}\n\n";
    }
  }
  std::string delta;
  if (!choice.reasoning.empty()) {
    std::string text;
    AppendJsonString(choice.reasoning, &text);
    delta = R"("reasoning_content":)" + text + R"(,"reasoning":)" + text;
  }
  std::string content;
  if (!choice.content.empty()) {
    content = R"("content":)";
    AppendJsonString(choice.content, &content);
  }
  if (delta.empty()) std::swap(delta, content);
  const bool leftover = choice.finished() && (!choice.scored.empty() || !choice.token_ids.empty());
  if (!delta.empty() || leftover) {
    std::string logprobs = "null";
    if (!choice.scored.empty()) logprobs = DumpJson(LogprobsJson(choice.scored));
    AppendDelta(index, delta, logprobs, choice.token_ids, out);
    choice.scored.clear();
    choice.token_ids.clear();
  }
  if (!content.empty()) AppendDelta(index, content, "null", {}, out);
  choice.reasoning.clear();
  choice.content.clear();
  if (!choice.finished()) return;
  choice.closed = true;
  BeginChunk(out);
  *out += R"({"index":)" + std::to_string(index) + R"(,"delta":{},"logprobs":null)";
  *out += R"(,"finish_reason":")" + choice.finish + R"(","stop_reason":)";
  if (!choice.stop_text.empty()) AppendJsonString(choice.stop_text, out);
  else if (choice.stop_token >= 0) *out += std::to_string(choice.stop_token);
  else *out += "null";
  *out += "}";
  EndChunk(out);
}

std::string ChatWriter::Body() {
  const GenerationParams& params = generation_.plan().params;
  ordered_json json = Envelope("chat.completion");
  ordered_json choices = ordered_json::array();
  for (size_t i = 0; i < generation_.choices().size(); ++i) {
    const Choice& choice = generation_.choices()[i];
    ordered_json message = {
        {"role", "assistant"}, {"content", choice.content}, {"refusal", nullptr}};
    if (generation_.plan().thinking || !choice.reasoning.empty()) {
      message["reasoning_content"] = choice.reasoning;
      message["reasoning"] = choice.reasoning;
    }
    ordered_json entry = {{"index", i}, {"message", std::move(message)}};
    entry["logprobs"] = params.logprobs >= 0 ? LogprobsJson(choice.scored) : ordered_json(nullptr);
    entry["finish_reason"] = choice.finish;
    entry["stop_reason"] = nullptr;
    if (!choice.stop_text.empty()) entry["stop_reason"] = choice.stop_text;
    else if (choice.stop_token >= 0) entry["stop_reason"] = choice.stop_token;
    if (params.return_token_ids) entry["token_ids"] = choice.token_ids;
    choices.push_back(std::move(entry));
  }
  json["choices"] = std::move(choices);
  json["usage"] = UsageJson();
  if (params.prompt_logprobs >= 0) {
    json["prompt_logprobs"] = PromptLogprobsJson(generation_.choices().front());
  }
  if (params.return_token_ids) json["prompt_token_ids"] = generation_.prompt(0);
  AddExplanation(&json);
  return DumpJson(json);
}

}  // namespace

std::unique_ptr<ReplyWriter> MakeChatWriter(Generation& generation) {
  return std::make_unique<ChatWriter>(generation);
}

}  // namespace fathom
