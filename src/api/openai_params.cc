// The fields chat and plain completions share, and what is refused for both.
#include "api/openai_params.h"

#include <charconv>
#include <limits>

#include "api/unsupported_fields.h"

namespace fathom {
namespace {

using nlohmann::json;

constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();
constexpr int64_t kInt64Min = std::numeric_limits<int64_t>::min();
constexpr size_t kMaxNameBytes = 1024;                        // of a salt or session
constexpr int64_t kMaxTtlSeconds = int64_t{366} * 24 * 3600;  // of a session

void ReadLogitBias(FieldReader& fields, int64_t vocab_size, GenerationParams* params) {
  const json* biases = fields.Object("logit_bias");
  if (biases == nullptr) return;
  if (biases->size() > 1024) {
    return fields.Refuse("logit_bias", "holds more than 1024 entries");
  }
  for (const auto& [key, value] : biases->items()) {
    int64_t id = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    if (error != std::errc() || end != key.data() + key.size() || id < 0 || id >= vocab_size) {
      return fields.Refuse("logit_bias", fmt::format("has the key '{}', which is no token id of "
                                                     "the vocabulary 0 .. {}",
                                                     key, vocab_size - 1));
    }
    if (!value.is_number()) {
      return fields.Refuse(
          "logit_bias", fmt::format("of token {} must be a number, not {}", id, value.type_name()));
    }
    const double bias = value.get<double>();
    if (!(bias >= -100 && bias <= 100)) {
      return fields.Refuse(
          "logit_bias", fmt::format("of token {} must lie within -100 .. 100, not {}", id, bias));
    }
    params->sampling.logit_bias.emplace_back(static_cast<TokenId>(id), static_cast<float>(bias));
  }
}

void ReadSeed(FieldReader& fields, GenerationParams* params) {
  const json* seed = fields.Find("seed");
  if (seed == nullptr) return;
  if (seed->is_number_unsigned()) {
    params->sampling.seed = seed->get<uint64_t>();
  } else {
    int64_t value = 0;
    fields.Integer("seed", kInt64Min, kInt64Max, &value);
    params->sampling.seed = static_cast<uint64_t>(value);
  }
  params->has_seed = true;
}

void ReadStreamOptions(FieldReader& fields, GenerationParams* params) {
  const json* options = fields.Object("stream_options");
  if (options == nullptr) return;
  if (!params->stream) {
    return fields.Refuse("stream_options", "is only allowed when stream is true");
  }
  FieldReader inner(*options, "stream_options.");
  inner.Bool("include_usage", &params->include_usage);
  inner.Bool("continuous_usage_stats", &params->continuous_usage);
  inner.Bool("include_progress", &params->include_progress);
  fields.Adopt(inner);
}

// A text that may be left out, but not empty: an empty salt or session would stand for the common
// one without saying so.
void ReadName(FieldReader& fields, const char* key, std::string* out) {
  const json* value = fields.Find(key);
  fields.String(key, out);
  if (value == nullptr || !value->is_string()) return;
  if (out->empty()) return fields.Refuse(key, "must not be empty");
  if (out->size() > kMaxNameBytes) {
    fields.Refuse(
        key, fmt::format("holds {} bytes; at most {} are allowed", out->size(), kMaxNameBytes));
  }
}

// The prefix cache: vLLM's cache_salt, and what is Fathom's own.
void ReadCacheFields(FieldReader& fields, GenerationParams* params) {
  ReadName(fields, "cache_salt", &params->cache_salt);
  const json* own = fields.Object("fathom");
  if (own == nullptr) return;
  FieldReader inner(*own, "fathom.");
  ReadName(inner, "session", &params->session);
  inner.Integer("ttl", 0, kMaxTtlSeconds, &params->session_ttl);
  if (inner.Find("ttl") != nullptr && inner.Find("session") == nullptr) {
    inner.Refuse("ttl", "needs fathom.session");
  }
  inner.Bool("explain", &params->explain);
  // Ours alone: a name we do not know is a mistake, not another engine's.
  for (const auto& [key, value] : own->items()) {
    if (key == "session" || key == "ttl" || key == "explain") continue;
    inner.Refuse(key.c_str(), "is unknown; there are session, ttl and explain");
  }
  fields.Adopt(inner);
}

}  // namespace

void ReadGenerationParams(FieldReader& fields, const ServedModel& model, GenerationParams* params) {
  const GenerationDefaults& defaults = model.defaults;
  const int64_t vocab = model.tokenizer->vocab_size();
  ops::SamplingParams& sampling = params->sampling;
  sampling.temperature = defaults.temperature;
  sampling.top_p = defaults.top_p;
  sampling.top_k = defaults.top_k;
  sampling.min_p = defaults.min_p;
  sampling.repetition_penalty = defaults.repetition_penalty;

  fields.String("model", &params->model);
  fields.Bool("stream", &params->stream);
  ReadStreamOptions(fields, params);
  fields.Integer("n", 1, kMaxChoices, &params->n);
  fields.Number("temperature", 0, 2, &sampling.temperature);
  fields.Number("top_p", 0, 1, &sampling.top_p);
  fields.Integer("top_k", -1, std::numeric_limits<int>::max(), &sampling.top_k);
  if (sampling.top_k < 0) sampling.top_k = 0;
  if (sampling.top_p == 0) {  // the smallest nucleus holds one token
    sampling.top_p = 1;
    sampling.top_k = 1;
  }
  fields.Number("min_p", 0, 1, &sampling.min_p);
  fields.Number("presence_penalty", -2, 2, &sampling.presence_penalty);
  fields.Number("frequency_penalty", -2, 2, &sampling.frequency_penalty);
  fields.Number("repetition_penalty", 0.01, 100, &sampling.repetition_penalty);
  ReadSeed(fields, params);
  ReadLogitBias(fields, vocab, params);

  fields.Strings("stop", 64, &params->stop);
  for (const std::string& stop : params->stop) {
    if (stop.empty()) fields.Refuse("stop", "must not hold an empty string");
  }
  fields.TokenIds("stop_token_ids", vocab, &params->stop_token_ids);
  fields.Bool("include_stop_str_in_output", &params->include_stop_string);
  fields.Bool("skip_special_tokens", &params->skip_special_tokens);
  fields.Bool("ignore_eos", &params->ignore_eos);
  fields.Integer("min_tokens", 0, kInt64Max, &params->min_tokens);
  fields.Integer("prompt_logprobs", 0, kMaxLogprobs, &params->prompt_logprobs);
  if (params->prompt_logprobs >= 0 && params->stream) {
    fields.Refuse("prompt_logprobs", "is not available with stream");
  }
  fields.Bool("return_tokens_as_token_ids", &params->tokens_as_ids);
  fields.Bool("echo", &params->echo);
  fields.Bool("return_token_ids", &params->return_token_ids);
  fields.Integer("priority", std::numeric_limits<int>::min(), std::numeric_limits<int>::max(),
                 &params->priority);
  ReadCacheFields(fields, params);
  std::string ignored;  // accepted for their types; they change nothing here
  fields.String("user", &ignored);
  fields.Object("metadata");
  int best_of = params->n;
  fields.Integer("best_of", 1, kMaxChoices, &best_of);
  if (best_of != params->n) {
    fields.Refuse("best_of", "other than n is not offered", Code::kUnimplemented);
  }
  RefuseUnsupported(fields);
}

void CheckTokenLimits(FieldReader& fields, const char* key, GenerationParams* params) {
  if (params->max_tokens && params->min_tokens > *params->max_tokens) {
    fields.Refuse("min_tokens", fmt::format("is {}, more than {} {}", params->min_tokens, key,
                                            *params->max_tokens));
  }
}

Expected<std::string> CheckModelName(const std::string& name, const ServedModel& model) {
  if (name.empty()) return model.names.front();
  std::string served;
  for (const std::string& known : model.names) {
    if (known == name) return name;
    served += (served.empty() ? "'" : ", '") + known + "'";
  }
  return FailParam(Code::kNotFound, "model", "the model '{}' does not exist; served: {}", name,
                   served);
}

}  // namespace fathom
