// text_completion, streamed and whole.
#include <utility>

#include "api/json_text.h"
#include "api/openai_writer.h"

namespace fathom {
namespace {

using nlohmann::ordered_json;

int64_t CountCharacters(std::string_view text) {
  int64_t count = 0;
  for (const char c : text) count += (static_cast<uint8_t>(c) & 0xc0) != 0x80;
  return count;
}

class CompletionWriter : public OpenAiWriter {
 public:
  explicit CompletionWriter(Generation& generation) : OpenAiWriter(generation, "text_completion") {}

  void AppendEvents(std::string* out) override {
    for (size_t i = 0; i < generation_.choices().size(); ++i) AppendChoice(i, out);
    generation_.MarkTaken();
  }

  std::string Body() override;

 private:
  void AppendChoice(size_t index, std::string* out);
  // OpenAI's four parallel lists, of the prompt as well when it is echoed and not yet handed out.
  // Offsets count characters of the returned text.
  ordered_json TakeLogprobs(Choice& choice);
  void AddToken(ordered_json& json, Choice& choice, TokenId token, ordered_json logprob,
                ordered_json top);
  ordered_json TopJson(TokenId token, float logprob,
                       const std::vector<ops::TokenLogprob>& top) const;
};

ordered_json CompletionWriter::TopJson(TokenId token, float logprob,
                                       const std::vector<ops::TokenLogprob>& top) const {
  ordered_json json = ordered_json::object();
  for (const ops::TokenLogprob& other : top) {
    json[TokenText(other.token)] = FiniteLogprob(other.logprob);
  }
  json[TokenText(token)] = FiniteLogprob(logprob);
  return json;
}

void CompletionWriter::AddToken(ordered_json& json, Choice& choice, TokenId token,
                                ordered_json logprob, ordered_json top) {
  json["text_offset"].push_back(choice.text_offset);
  json["token_logprobs"].push_back(std::move(logprob));
  json["tokens"].push_back(TokenText(token));
  json["top_logprobs"].push_back(std::move(top));
  choice.text_offset += CountCharacters(generation_.model().tokenizer->Decode({token}, {}));
}

ordered_json CompletionWriter::TakeLogprobs(Choice& choice) {
  const GenerationParams& params = generation_.plan().params;
  if (params.logprobs < 0) return nullptr;
  ordered_json json = {{"text_offset", ordered_json::array()},
                       {"token_logprobs", ordered_json::array()},
                       {"tokens", ordered_json::array()},
                       {"top_logprobs", ordered_json::array()}};
  if (params.echo && !choice.opened) {
    const std::vector<TokenId>& prompt = generation_.prompt(choice.prompt_index);
    for (size_t i = 0; i < prompt.size(); ++i) {
      if (i == 0 || i - 1 >= choice.prompt_logprobs.size()) {
        AddToken(json, choice, prompt[i], nullptr, nullptr);
        continue;
      }
      const std::vector<ops::TokenLogprob>& row = choice.prompt_logprobs[i - 1];
      std::vector<ops::TokenLogprob> top(row.begin() + 1, row.end());
      if (top.size() > static_cast<size_t>(params.logprobs)) top.resize(params.logprobs);
      AddToken(json, choice, prompt[i], FiniteLogprob(row.front().logprob),
               TopJson(prompt[i], row.front().logprob, top));
    }
  }
  for (const ScoredToken& scored : choice.scored) {
    AddToken(json, choice, scored.token, FiniteLogprob(scored.logprob),
             TopJson(scored.token, scored.logprob, scored.top));
  }
  choice.scored.clear();
  return json;
}

void CompletionWriter::AppendChoice(size_t index, std::string* out) {
  Choice& choice = generation_.choices()[index];
  if (!choice.started || choice.closed) return;
  if (generation_.error() != nullptr && choice.finished()) return;
  if (choice.content.empty() && !choice.finished()) return;
  const GenerationParams& params = generation_.plan().params;
  BeginChunk(out);
  *out += R"({"index":)" + std::to_string(index) + R"(,"text":)";
  AppendJsonString(choice.content, out);
  *out += R"(,"logprobs":)";
  *out += params.logprobs >= 0 ? DumpJson(TakeLogprobs(choice)) : "null";
  *out += R"(,"finish_reason":)";
  if (choice.finished()) {
    choice.closed = true;
    *out += '"' + choice.finish + '"';
    *out += R"(,"stop_reason":)";
    if (!choice.stop_text.empty()) AppendJsonString(choice.stop_text, out);
    else if (choice.stop_token >= 0) *out += std::to_string(choice.stop_token);
    else *out += "null";
  } else {
    *out += "null";
  }
  if (params.return_token_ids) {
    if (!choice.opened) {
      *out +=
          R"(,"prompt_token_ids":)" + ordered_json(generation_.prompt(choice.prompt_index)).dump();
    }
    *out += R"(,"token_ids":)" + ordered_json(choice.token_ids).dump();
    choice.token_ids.clear();
  }
  *out += "}";
  EndChunk(out);
  choice.opened = true;
  choice.content.clear();
}

std::string CompletionWriter::Body() {
  const GenerationParams& params = generation_.plan().params;
  ordered_json json = Envelope("text_completion");
  ordered_json choices = ordered_json::array();
  for (size_t i = 0; i < generation_.choices().size(); ++i) {
    Choice& choice = generation_.choices()[i];
    ordered_json entry = {{"index", i}, {"text", choice.content}};
    entry["logprobs"] = TakeLogprobs(choice);
    entry["finish_reason"] = choice.finish;
    entry["stop_reason"] = nullptr;
    if (!choice.stop_text.empty()) entry["stop_reason"] = choice.stop_text;
    else if (choice.stop_token >= 0) entry["stop_reason"] = choice.stop_token;
    if (params.prompt_logprobs >= 0) entry["prompt_logprobs"] = PromptLogprobsJson(choice);
    if (params.return_token_ids) {
      entry["prompt_token_ids"] = generation_.prompt(choice.prompt_index);
      entry["token_ids"] = choice.token_ids;
    }
    choices.push_back(std::move(entry));
  }
  json["choices"] = std::move(choices);
  json["usage"] = UsageJson();
  AddExplanation(&json);
  return DumpJson(json);
}

}  // namespace

std::unique_ptr<ReplyWriter> MakeCompletionWriter(Generation& generation) {
  return std::make_unique<CompletionWriter>(generation);
}

}  // namespace fathom
