#include <array>
#include <string_view>

#include "api/openai_params.h"
#include "api/unsupported_fields.h"

namespace fathom {
namespace {

using nlohmann::json;

constexpr std::array<std::string_view, 7> kEfforts = {"none", "minimal", "low", "medium",
                                                      "high", "xhigh",   "max"};

std::optional<ChatMessage::Role> RoleOf(std::string_view name) {
  using Role = ChatMessage::Role;
  if (name == "system") return Role::kSystem;
  if (name == "developer") return Role::kDeveloper;
  if (name == "user") return Role::kUser;
  if (name == "assistant") return Role::kAssistant;
  if (name == "tool") return Role::kTool;
  if (name == "latest_reminder") return Role::kLatestReminder;
  return std::nullopt;
}

// A string, or a list of text parts joined by an empty line (model.md 10.3).
Status ReadContent(const json& message, const std::string& prefix, bool optional,
                   std::string* out) {
  const auto content = message.find("content");
  const std::string name = prefix + "content";
  if (content == message.end() || content->is_null()) {
    if (optional) return {};
    return FailParam(Code::kInvalidArgument, name, "{} is missing", name);
  }
  if (content->is_string()) {
    *out = content->get_ref<const std::string&>();
    return {};
  }
  if (!content->is_array()) {
    return FailParam(Code::kInvalidArgument, name, "{} must be a string or a list of parts, not {}",
                     name, content->type_name());
  }
  for (size_t j = 0; j < content->size(); ++j) {
    const json& part = (*content)[j];
    const std::string part_name = fmt::format("{}[{}]", name, j);
    if (!part.is_object()) {
      return FailParam(Code::kInvalidArgument, part_name, "{} must be an object, not {}", part_name,
                       part.type_name());
    }
    const auto type = part.find("type");
    if (type == part.end() || !type->is_string()) {
      return FailParam(Code::kInvalidArgument, part_name + ".type", "{}.type must be a string",
                       part_name);
    }
    const std::string& kind = type->get_ref<const std::string&>();
    if (kind != "text" && kind != "input_text" && kind != "output_text") {
      return FailParam(Code::kInvalidArgument, part_name + ".type",
                       "{}.type '{}' is not supported: this model takes text only", part_name,
                       kind);
    }
    const auto text = part.find("text");
    if (text == part.end() || !text->is_string()) {
      return FailParam(Code::kInvalidArgument, part_name + ".text", "{}.text must be a string",
                       part_name);
    }
    if (j > 0) *out += "\n\n";
    *out += text->get_ref<const std::string&>();
  }
  return {};
}

Expected<ChatMessage> ReadMessage(const json& value, size_t index) {
  const std::string name = fmt::format("messages[{}]", index);
  if (!value.is_object()) {
    return FailParam(Code::kInvalidArgument, name, "{} must be an object, not {}", name,
                     value.type_name());
  }
  FieldReader fields(value, name + ".");
  std::string role;
  fields.String("role", &role);
  FATHOM_TRY(fields.status());
  const std::optional<ChatMessage::Role> known = RoleOf(role);
  if (!known) {
    return FailParam(Code::kInvalidArgument, name + ".role",
                     "{}.role must be one of system, developer, user, assistant, tool, "
                     "latest_reminder, not '{}'",
                     name, role);
  }
  ChatMessage message;
  message.role = *known;
  const bool assistant = message.role == ChatMessage::Role::kAssistant;
  FATHOM_TRY(ReadContent(value, name + ".", assistant, &message.content));
  std::string ignored;
  fields.String("name", &ignored);
  if (assistant) {
    fields.String("reasoning", &message.reasoning);
    fields.String("reasoning_content", &message.reasoning);
    if (const json* calls = fields.Array("tool_calls"); calls != nullptr && !calls->empty()) {
      fields.Refuse("tool_calls", "is not offered", Code::kUnimplemented);
    }
    if (fields.Object("function_call") != nullptr) {
      fields.Refuse("function_call", "is not offered", Code::kUnimplemented);
    }
  }
  if (message.role == ChatMessage::Role::kTool)
    fields.String("tool_call_id", &message.tool_call_id);
  FATHOM_TRY(fields.status());
  return message;
}

Status ReadMessages(FieldReader& fields, std::vector<ChatMessage>* messages) {
  const json* list = fields.Array("messages");
  FATHOM_TRY(fields.status());
  if (list == nullptr) {
    return FailParam(Code::kInvalidArgument, "messages", "messages is missing");
  }
  if (list->empty()) {
    return FailParam(Code::kInvalidArgument, "messages", "messages must not be empty");
  }
  messages->reserve(list->size());
  for (size_t i = 0; i < list->size(); ++i) {
    FATHOM_ASSIGN(ChatMessage message, ReadMessage((*list)[i], i));
    messages->push_back(std::move(message));
  }
  return {};
}

Status CheckEffort(const std::string& effort, const std::string& name) {
  if (effort.empty()) return {};
  std::string all;
  for (const std::string_view known : kEfforts) {
    if (known == effort) return {};
    all += (all.empty() ? "" : ", ") + std::string(known);
  }
  return FailParam(Code::kInvalidArgument, name, "{} must be one of {}, not '{}'", name, all,
                   effort);
}

// Thinking is decided by, in this order: thinking / enable_thinking of the request, the same two in
// chat_template_kwargs, reasoning_effort (none is off, anything else is on), the server's default.
Status ReadThinking(const json& body, FieldReader& fields, const ServedModel& model,
                    ChatOptions* options, std::string* effort) {
  fields.String("reasoning_effort", effort);
  fields.MarkRead({"thinking", "enable_thinking"});  // by ThinkingSwitch
  const json* kwargs = fields.Object("chat_template_kwargs");
  FATHOM_TRY(fields.status());
  FATHOM_TRY(CheckEffort(*effort, "reasoning_effort"));
  FATHOM_ASSIGN(std::optional<bool> thinking, ThinkingSwitch(body, ""));
  if (kwargs != nullptr) {
    FieldReader inner(*kwargs, "chat_template_kwargs.");
    std::string inner_effort;
    inner.String("reasoning_effort", &inner_effort);
    inner.Bool("drop_thinking", &options->drop_thinking);
    FATHOM_TRY(inner.status());
    FATHOM_TRY(CheckEffort(inner_effort, "chat_template_kwargs.reasoning_effort"));
    if (effort->empty()) *effort = inner_effort;
    FATHOM_ASSIGN(std::optional<bool> asked, ThinkingSwitch(*kwargs, "chat_template_kwargs."));
    if (!thinking) thinking = asked;
  }
  if (!thinking && !effort->empty()) thinking = *effort != "none";
  options->thinking = thinking.value_or(model.default_thinking);
  return {};
}

// add_generation_prompt (default true) and continue_final_message (default false) contradict each
// other when both are asked for; continue_final_message alone turns the former off.
Status ReadGenerationPrompt(FieldReader& fields, const std::vector<ChatMessage>& messages,
                            ChatOptions* options) {
  std::optional<bool> add;
  bool resume = false;
  fields.Bool("add_generation_prompt", &add);
  fields.Bool("continue_final_message", &resume);
  FATHOM_TRY(fields.status());
  if (resume && add.value_or(false)) {
    return FailParam(Code::kInvalidArgument, "continue_final_message",
                     "continue_final_message and add_generation_prompt cannot both be true");
  }
  if (resume && messages.back().role != ChatMessage::Role::kAssistant) {
    return FailParam(Code::kInvalidArgument, "continue_final_message",
                     "continue_final_message needs an assistant message at the end of messages");
  }
  options->continue_final_message = resume;
  options->add_generation_prompt = add.value_or(!resume);
  return {};
}

void RefuseTools(FieldReader& fields) {
  const json* tools = fields.Array("tools");
  const json* choice = fields.Find("tool_choice");
  if (choice != nullptr && !choice->is_string() && !choice->is_object()) {
    fields.Refuse("tool_choice",
                  fmt::format("must be a string or an object, not {}", choice->type_name()));
  }
  const bool none = choice != nullptr && *choice == "none";
  if (tools != nullptr && !tools->empty() && !none) {
    fields.Refuse("tools", "(tool calling) is not offered", Code::kUnimplemented);
  }
  if (choice != nullptr && !none && *choice != "auto") {
    fields.Refuse("tool_choice", "other than 'none' and 'auto' is not offered",
                  Code::kUnimplemented);
  }
  bool ignored = false;
  fields.Bool("parallel_tool_calls", &ignored);
  if (const json* functions = fields.Array("functions");
      functions != nullptr && !functions->empty()) {
    fields.Refuse("functions", "(tool calling) is not offered", Code::kUnimplemented);
  }
  const json* call = fields.Find("function_call");
  if (call != nullptr && *call != "none" && *call != "auto") {
    fields.Refuse("function_call", "other than 'none' and 'auto' is not offered",
                  Code::kUnimplemented);
  }
}

}  // namespace

Expected<std::optional<bool>> ThinkingSwitch(const json& object, std::string prefix) {
  FieldReader fields(object, prefix);
  std::optional<bool> thinking, enabled;
  if (const json* value = fields.Find("thinking"); value != nullptr && value->is_object()) {
    FieldReader inner(*value, prefix + "thinking.");
    std::string type;
    inner.String("type", &type);
    FATHOM_TRY(inner.status());
    if (type == "enabled") thinking = true;
    else if (type == "disabled") thinking = false;
    else if (type != "auto" && type != "adaptive") {
      inner.Refuse("type",
                   fmt::format("must be enabled, disabled, auto or adaptive, not '{}'", type));
      FATHOM_TRY(inner.status());
    }
  } else {
    fields.Bool("thinking", &thinking);
  }
  fields.Bool("enable_thinking", &enabled);
  FATHOM_TRY(fields.status());
  if (thinking && enabled && *thinking != *enabled) {
    return FailParam(Code::kInvalidArgument, prefix + "enable_thinking",
                     "{0}thinking and {0}enable_thinking contradict each other", prefix);
  }
  return thinking ? thinking : enabled;
}

Expected<ChatRequest> ParseChatRequest(const json& body, const ServedModel& model) {
  ChatRequest request;
  FieldReader fields(body, "");
  FATHOM_TRY(ReadMessages(fields, &request.messages));
  GenerationParams& params = request.params;
  ReadGenerationParams(fields, model, &params);
  const char* limit = fields.Find("max_completion_tokens") ? "max_completion_tokens" : "max_tokens";
  fields.Integer("max_tokens", 1, int64_t{1} << 40, &params.max_tokens);
  fields.Integer("max_completion_tokens", 1, int64_t{1} << 40, &params.max_tokens);
  params.max_tokens_field = limit;
  CheckTokenLimits(fields, limit, &params);
  bool logprobs = false;
  int top = 0;
  fields.Bool("logprobs", &logprobs);
  fields.Integer("top_logprobs", 0, kMaxLogprobs, &top);
  if (logprobs) params.logprobs = top;
  else if (top > 0) fields.Refuse("top_logprobs", "needs logprobs to be true");
  RefuseTools(fields);
  RefuseUnsupportedInChat(fields);
  FATHOM_TRY(fields.status());
  FATHOM_TRY(ReadThinking(body, fields, model, &request.options, &request.reasoning_effort));
  FATHOM_TRY(ReadGenerationPrompt(fields, request.messages, &request.options));
  if (params.echo && !request.options.continue_final_message) {
    fields.Refuse("echo", "is offered in chats only with continue_final_message",
                  Code::kUnimplemented);
    FATHOM_TRY(fields.status());
  }
  LogIgnoredFields(fields);
  if (request.options.thinking && model.thinking_sampling == ThinkingSampling::kIgnore) {
    params.sampling.temperature = model.defaults.temperature;
    params.sampling.top_p = model.defaults.top_p;
    params.sampling.presence_penalty = 0;
    params.sampling.frequency_penalty = 0;
  }
  return request;
}

Expected<TokenizeRequest> ParseTokenizeRequest(const json& body, const ServedModel& model) {
  TokenizeRequest request;
  FieldReader fields(body, "");
  fields.String("model", &request.model);
  fields.Bool("add_special_tokens", &request.add_special_tokens);
  fields.Bool("return_token_strs", &request.return_token_strs);
  FATHOM_TRY(fields.status());
  if (fields.Find("messages") == nullptr) {
    std::string prompt;
    fields.String("prompt", &prompt);
    FATHOM_TRY(fields.status());
    if (fields.Find("prompt") == nullptr) {
      return FailParam(Code::kInvalidArgument, "prompt", "prompt or messages is missing");
    }
    request.prompt = std::move(prompt);
    return request;
  }
  FATHOM_TRY(ReadMessages(fields, &request.messages));
  RefuseTools(fields);
  FATHOM_TRY(fields.status());
  std::string effort;
  FATHOM_TRY(ReadThinking(body, fields, model, &request.options, &effort));
  FATHOM_TRY(ReadGenerationPrompt(fields, request.messages, &request.options));
  return request;
}

}  // namespace fathom
