#include "api/openai_writer.h"

#include <cmath>

#include "api/api_error.h"
#include "api/json_text.h"
#include "api/version.h"

namespace fathom {

using nlohmann::ordered_json;

double FiniteLogprob(float logprob) {
  return std::isfinite(logprob) ? static_cast<double>(logprob) : -9999.0;
}

OpenAiWriter::OpenAiWriter(Generation& generation, std::string_view object)
    : generation_(generation) {
  head_ = R"(data: {"id":)";
  AppendJsonString(generation.id(), &head_);
  head_ += fmt::format(R"(,"object":"{}","created":{},"model":)", object, generation.created());
  AppendJsonString(generation.plan().model, &head_);
  head_ += fmt::format(R"(,"system_fingerprint":"{}","choices":[)", kFingerprint);
}

void OpenAiWriter::EndChunk(std::string* out) const {
  const GenerationParams& params = generation_.plan().params;
  if (params.continuous_usage) *out += R"(],"usage":)" + UsageJson().dump() + "}\n\n";
  else if (params.include_usage) *out += "],\"usage\":null}\n\n";
  else *out += "]}\n\n";
}

void OpenAiWriter::AppendProgress(std::string* out) {
  const Usage usage = generation_.usage();
  BeginChunk(out);
  *out += fmt::format(R"(],"prompt_progress":{{"total":{},"cache":{},"processed":{}}}}})",
                      usage.prompt, usage.cached, generation_.prefilled());
  *out += "\n\n";
}

void OpenAiWriter::AppendEnd(std::string* out) {
  const GenerationParams& params = generation_.plan().params;
  if (params.include_usage || params.explain) {
    BeginChunk(out);
    *out += "]";
    if (params.include_usage) *out += R"(,"usage":)" + UsageJson().dump();
    if (params.explain)
      *out += R"(,"fathom":)" + DumpJson(ExplanationJson(generation_.explained()));
    *out += "}\n\n";
  }
  *out += "data: [DONE]\n\n";
}

void OpenAiWriter::AppendError(const Error& error, std::string* out) {
  *out += "data: " + OpenAiErrorBody(ToApiError(error)) + "\n\ndata: [DONE]\n\n";
}

std::string OpenAiWriter::TokenText(TokenId token) const {
  if (generation_.plan().params.tokens_as_ids) return fmt::format("token_id:{}", token);
  return generation_.model().tokenizer->Decode({token}, {});
}

ordered_json OpenAiWriter::UsageJson() const {
  const Usage usage = generation_.usage();
  ordered_json json;
  json["prompt_tokens"] = usage.prompt;
  json["completion_tokens"] = usage.completion;
  json["total_tokens"] = usage.prompt + usage.completion;
  json["prompt_tokens_details"] = {{"cached_tokens", usage.cached}};
  json["completion_tokens_details"] = {{"reasoning_tokens", usage.reasoning}};
  json["prompt_cache_hit_tokens"] = usage.cached;
  json["prompt_cache_miss_tokens"] = usage.prompt - usage.cached;
  return json;
}

void OpenAiWriter::AddExplanation(ordered_json* reply) const {
  if (!generation_.plan().params.explain) return;
  (*reply)["fathom"] = ExplanationJson(generation_.explained());
}

ordered_json OpenAiWriter::PromptLogprobsJson(const Choice& choice) const {
  const int top = generation_.plan().params.prompt_logprobs;
  ordered_json list = ordered_json::array({nullptr});
  for (const auto& row : choice.prompt_logprobs) {
    ordered_json entry = ordered_json::object();
    for (size_t i = 0; i < row.size() && i <= static_cast<size_t>(top); ++i) {
      entry[std::to_string(row[i].token)] = {
          {"logprob", FiniteLogprob(row[i].logprob)},
          {"rank", row[i].rank},
          {"decoded_token", generation_.model().tokenizer->Decode({row[i].token}, {})}};
    }
    list.push_back(std::move(entry));
  }
  return list;
}

ordered_json OpenAiWriter::Envelope(std::string_view object) const {
  ordered_json json;
  json["id"] = generation_.id();
  json["object"] = object;
  json["created"] = generation_.created();
  json["model"] = generation_.plan().model;
  json["system_fingerprint"] = kFingerprint;
  return json;
}

}  // namespace fathom
