// Bodies of the OpenAI-style routes, validated. Pure functions of the body and the served model:
// nothing is tokenised here. Unknown fields are ignored; a wrong type or value is an error whose
// param names the field.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "api/served_model.h"
#include "core/ids.h"
#include "core/status.h"
#include "ops/sampling/sampling.h"
#include "text/chat.h"

namespace fathom {

inline constexpr int kMaxLogprobs = 20;
inline constexpr int kMaxChoices = 128;

// Fields that chat and plain completions share.
struct GenerationParams {
  std::string model;  // empty: the first served name
  bool stream = false;
  bool include_usage = false;     // stream_options
  bool continuous_usage = false;  // usage in every chunk
  bool include_progress = false;  // prompt_progress events while prefilling
  int n = 1;
  std::optional<int64_t> max_tokens;            // absent: up to the context limit
  const char* max_tokens_field = "max_tokens";  // the name the client used
  int64_t min_tokens = 0;
  bool ignore_eos = false;
  ops::SamplingParams sampling;
  bool has_seed = false;
  std::vector<std::string> stop;
  std::vector<TokenId> stop_token_ids;
  bool include_stop_string = false;
  bool skip_special_tokens = true;
  int logprobs = -1;  // -1: none; n: the sampled token and the n most likely
  int prompt_logprobs = -1;
  bool tokens_as_ids = false;  // "token_id:42" in place of token text in logprobs
  bool echo = false;
  bool return_token_ids = false;
  int priority = 0;
  std::string cache_salt;  // prompts with different salts share no cache
  // Of the `fathom` object.
  std::string session;         // what it leaves in the cache is the last to be evicted ...
  int64_t session_ttl = 3600;  // ... for so many seconds
  bool explain = false;        // the reply says where time and bytes went
};

struct ChatRequest {
  GenerationParams params;
  std::vector<ChatMessage> messages;
  ChatOptions options;
  std::string reasoning_effort;  // as given, or empty
};

using Prompt = std::variant<std::string, std::vector<TokenId>>;

struct CompletionRequest {
  GenerationParams params;
  std::vector<Prompt> prompts;
  std::optional<bool> add_special_tokens;
};

struct TokenizeRequest {
  std::string model;
  std::optional<std::string> prompt;  // else messages
  std::vector<ChatMessage> messages;
  ChatOptions options;
  std::optional<bool> add_special_tokens;
  bool return_token_strs = false;
};

struct DetokenizeRequest {
  std::string model;
  std::vector<TokenId> tokens;
};

Expected<ChatRequest> ParseChatRequest(const nlohmann::json& body, const ServedModel& model);
Expected<CompletionRequest> ParseCompletionRequest(const nlohmann::json& body,
                                                   const ServedModel& model);
Expected<TokenizeRequest> ParseTokenizeRequest(const nlohmann::json& body,
                                               const ServedModel& model);
Expected<DetokenizeRequest> ParseDetokenizeRequest(const nlohmann::json& body,
                                                   const ServedModel& model);

// kNotFound with the served names when `name` is none of them; the name to report otherwise.
Expected<std::string> CheckModelName(const std::string& name, const ServedModel& model);

// Whether a list of chat_template_kwargs (or a request's own fields) asks for thinking. Fields:
// thinking, enable_thinking (booleans; thinking also {"type": "enabled" | "disabled"}). Two that
// disagree are an error.
Expected<std::optional<bool>> ThinkingSwitch(const nlohmann::json& object, std::string prefix);

}  // namespace fathom
