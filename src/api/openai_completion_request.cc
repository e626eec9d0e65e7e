#include "api/openai_params.h"
#include "api/unsupported_fields.h"

namespace fathom {
namespace {

using nlohmann::json;

constexpr size_t kMaxPrompts = 1024;

// A list of token ids (all its items are integers) as one prompt.
Expected<std::vector<TokenId>> ReadIds(const json& list, const std::string& name, int64_t vocab) {
  std::vector<TokenId> ids;
  ids.reserve(list.size());
  for (const json& item : list) {
    const std::optional<int64_t> id = item.is_number() ? JsonInteger(item) : std::nullopt;
    if (!id) {
      return FailParam(Code::kInvalidArgument, "prompt", "{}[{}] must be a token id, not {}", name,
                       ids.size(), item.type_name());
    }
    if (*id < 0 || *id >= vocab) {
      return FailParam(Code::kInvalidArgument, "prompt",
                       "{}[{}] is {}, outside the vocabulary 0 .. {}", name, ids.size(), *id,
                       vocab - 1);
    }
    ids.push_back(static_cast<TokenId>(*id));
  }
  return ids;
}

// A string, a list of strings, a list of token ids or a list of such lists.
Status ReadPrompts(const FieldReader& fields, int64_t vocab, std::vector<Prompt>* prompts) {
  const json* value = fields.Find("prompt");
  if (value == nullptr) {
    return FailParam(Code::kInvalidArgument, "prompt", "prompt is missing");
  }
  if (value->is_string()) {
    prompts->emplace_back(value->get_ref<const std::string&>());
    return {};
  }
  if (!value->is_array()) {
    return FailParam(Code::kInvalidArgument, "prompt",
                     "prompt must be a string, a list of strings, a list of token ids or a list of "
                     "lists of token ids, not {}",
                     value->type_name());
  }
  if (value->empty()) {
    return FailParam(Code::kInvalidArgument, "prompt", "prompt must not be an empty list");
  }
  if (value->front().is_number()) {
    FATHOM_ASSIGN(std::vector<TokenId> ids, ReadIds(*value, "prompt", vocab));
    prompts->emplace_back(std::move(ids));
    return {};
  }
  if (value->size() > kMaxPrompts) {
    return FailParam(Code::kInvalidArgument, "prompt",
                     "prompt holds {} prompts; at most {} are allowed", value->size(), kMaxPrompts);
  }
  for (size_t i = 0; i < value->size(); ++i) {
    const json& item = (*value)[i];
    if (item.is_string()) {
      prompts->emplace_back(item.get_ref<const std::string&>());
    } else if (item.is_array()) {
      FATHOM_ASSIGN(std::vector<TokenId> ids, ReadIds(item, fmt::format("prompt[{}]", i), vocab));
      prompts->emplace_back(std::move(ids));
    } else {
      return FailParam(Code::kInvalidArgument, "prompt",
                       "prompt[{}] must be a string or a list of token ids, not {}", i,
                       item.type_name());
    }
  }
  return {};
}

}  // namespace

Expected<CompletionRequest> ParseCompletionRequest(const json& body, const ServedModel& model) {
  CompletionRequest request;
  FieldReader fields(body, "");
  FATHOM_TRY(ReadPrompts(fields, model.tokenizer->vocab_size(), &request.prompts));
  GenerationParams& params = request.params;
  ReadGenerationParams(fields, model, &params);
  params.max_tokens = 16;  // OpenAI's default of this route
  // With echo, 0 scores the prompt and generates nothing.
  fields.Integer("max_tokens", params.echo ? 0 : 1, int64_t{1} << 40, &params.max_tokens);
  if (fields.Find("max_tokens") == nullptr && params.min_tokens > *params.max_tokens) {
    params.max_tokens = params.min_tokens;
  }
  CheckTokenLimits(fields, "max_tokens", &params);
  fields.Integer("logprobs", 0, kMaxLogprobs, &params.logprobs);
  fields.Bool("add_special_tokens", &request.add_special_tokens);
  std::string suffix;
  fields.String("suffix", &suffix);
  if (!suffix.empty()) fields.Refuse("suffix", "is not offered", Code::kUnimplemented);
  FATHOM_TRY(fields.status());
  LogIgnoredFields(fields);
  return request;
}

Expected<DetokenizeRequest> ParseDetokenizeRequest(const json& body, const ServedModel& model) {
  DetokenizeRequest request;
  FieldReader fields(body, "");
  fields.String("model", &request.model);
  fields.TokenIds("tokens", model.tokenizer->vocab_size(), &request.tokens);
  if (fields.Find("tokens") == nullptr) fields.Refuse("tokens", "is missing");
  FATHOM_TRY(fields.status());
  return request;
}

}  // namespace fathom
