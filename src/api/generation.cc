#include "api/generation.h"

#include <algorithm>
#include <utility>

#include "api/json_text.h"

namespace fathom {
namespace {

constexpr int64_t kMaxRequestChoices = 1024;  // of all prompts of a request

Status CheckLength(size_t prompt_tokens, const GenerationParams& params, const char* field,
                   const ServedModel& model) {
  const int64_t prompt = static_cast<int64_t>(prompt_tokens);
  if (prompt == 0) {
    return FailParam(Code::kInvalidArgument, field, "{} holds no token", field);
  }
  const int64_t completion = std::max<int64_t>(1, params.max_tokens.value_or(1));
  if (prompt + completion <= model.max_model_len) return {};
  // A prompt that fits by itself leaves max_tokens to be mended.
  const bool fits = params.max_tokens && prompt < model.max_model_len;
  return FailParam(Code::kContextLength, fits ? params.max_tokens_field : field,
                   "this model's maximum context length is {} tokens, but the request needs {}: {} "
                   "in {} and {} to generate",
                   model.max_model_len, prompt + completion, prompt, field, completion);
}

// The choices of a request enter the engine's queue together: more than it ever holds would be
// refused for ever, and that by a status that asks to try again.
Status CheckChoices(size_t prompts, int n, const ServedModel& model) {
  const int64_t queue = model.engine->options().max_waiting;
  const int64_t most = std::min<int64_t>(kMaxRequestChoices, queue);
  const auto count = static_cast<int64_t>(prompts);
  if (count * n <= most) return {};
  const std::string limit = most < queue ? fmt::format("a request may have {}", most)
                                         : fmt::format("the queue holds {} (--max-waiting)", most);
  if (count > most) {
    return FailParam(Code::kInvalidArgument, "prompt", "prompt holds {} prompts, but {}", count,
                     limit);
  }
  if (count == 1) return FailParam(Code::kInvalidArgument, "n", "n is {}, but {}", n, limit);
  return FailParam(Code::kInvalidArgument, "n", "{} prompts times n = {} are {} choices, but {}",
                   count, n, count * n, limit);
}

}  // namespace

bool EndsInsideThinking(const std::vector<TokenId>& prompt, const ChatEncoder& encoder) {
  for (auto token = prompt.rbegin(); token != prompt.rend(); ++token) {
    if (*token == encoder.think_begin()) return true;
    if (*token == encoder.think_end() || *token == encoder.eos()) return false;
  }
  return false;
}

std::vector<TokenId> EncodePlain(const std::string& text, std::optional<bool> add_special_tokens,
                                 const ServedModel& model) {
  std::vector<TokenId> ids = model.tokenizer->Encode(text, AddedTokens::kMatch);
  if (model.add_bos && add_special_tokens.value_or(true)) {
    ids.insert(ids.begin(), model.encoder->bos());
  }
  return ids;
}

Expected<GenerationPlan> PrepareChat(std::string_view body, const ServedModel& model) {
  FATHOM_ASSIGN(const nlohmann::json json, ParseJsonObject(body));
  FATHOM_ASSIGN(ChatRequest request, ParseChatRequest(json, model));
  GenerationPlan plan;
  FATHOM_ASSIGN(plan.model, CheckModelName(request.params.model, model));
  FATHOM_TRY(CheckChoices(1, request.params.n, model));
  FATHOM_ASSIGN(ChatPrompt prompt, model.encoder->EncodePrompt(request.messages, request.options));
  FATHOM_TRY(CheckLength(prompt.ids.size(), request.params, "messages", model));
  plan.thinking = EndsInsideThinking(prompt.ids, *model.encoder);
  plan.prompts.push_back(std::move(prompt.ids));
  plan.boundaries = std::move(prompt.boundaries);
  plan.params = std::move(request.params);
  // vLLM's echo: an open last turn is given back in front of its continuation.
  plan.echo.emplace_back();
  if (plan.params.echo && request.options.continue_final_message) {
    plan.echo.back() = std::move(request.messages.back().content);
  }
  return plan;
}

Expected<GenerationPlan> PrepareCompletion(std::string_view body, const ServedModel& model) {
  FATHOM_ASSIGN(const nlohmann::json json, ParseJsonObject(body));
  FATHOM_ASSIGN(CompletionRequest request, ParseCompletionRequest(json, model));
  GenerationPlan plan;
  plan.chat = false;
  FATHOM_ASSIGN(plan.model, CheckModelName(request.params.model, model));
  FATHOM_TRY(CheckChoices(request.prompts.size(), request.params.n, model));
  for (Prompt& prompt : request.prompts) {
    std::string echo;
    std::vector<TokenId> ids;
    if (std::string* text = std::get_if<std::string>(&prompt)) {
      ids = EncodePlain(*text, request.add_special_tokens, model);
      if (request.params.echo) echo = std::move(*text);
    } else {
      ids = std::move(std::get<std::vector<TokenId>>(prompt));
      if (request.params.echo) {
        echo = model.tokenizer->Decode(ids, {.skip_special = request.params.skip_special_tokens});
      }
    }
    FATHOM_TRY(CheckLength(ids.size(), request.params, "prompt", model));
    plan.prompts.push_back(std::move(ids));
    plan.echo.push_back(std::move(echo));
  }
  plan.params = std::move(request.params);
  return plan;
}

Generation::Generation(GenerationPlan plan, const ServedModel& model, std::string id,
                       int64_t created)
    : plan_(std::move(plan)), model_(model), id_(std::move(id)), created_(created) {
  const GenerationParams& params = plan_.params;
  for (const auto& prompt : plan_.prompts) {
    prompt_tokens_.push_back(static_cast<int64_t>(prompt.size()));
  }
  for (size_t i = 0; i < plan_.prompts.size() * params.n; ++i) {
    OutputParserOptions options;
    options.thinking = plan_.thinking;
    options.plain_text = !plan_.chat;
    options.stop = params.stop;
    options.include_stop_string = params.include_stop_string;
    options.skip_special_tokens = params.skip_special_tokens;
    options.ignore_eos = params.ignore_eos;
    choices_.emplace_back(OutputParser(*model.tokenizer, *model.encoder, std::move(options)),
                          i / params.n);
    choices_.back().content = plan_.echo[i / params.n];
  }
}

std::vector<Request> Generation::MakeRequests(uint64_t random_seed) {
  const GenerationParams& params = plan_.params;
  const bool shows_prompt = params.return_token_ids || params.prompt_logprobs >= 0 ||
                            (params.echo && params.logprobs >= 0);
  std::vector<Request> requests;
  for (size_t i = 0; i < choices_.size(); ++i) {
    const size_t prompt = i / params.n;
    const int branch = static_cast<int>(i % params.n);
    Request request;
    if (branch + 1 == params.n && !shows_prompt) {
      request.prompt = std::move(plan_.prompts[prompt]);
    } else {
      request.prompt = plan_.prompts[prompt];
    }
    request.sampling = params.sampling;
    if (!params.has_seed) request.sampling.seed = random_seed + prompt * 1'000'003;
    request.sampling.seed += static_cast<uint64_t>(branch);
    // 0 means without limit to the engine; echo with max_tokens 0 runs one step and drops its
    // token.
    request.max_tokens = params.max_tokens ? std::max<int64_t>(1, *params.max_tokens) : 0;
    request.min_tokens = params.min_tokens;
    request.ignore_eos = params.ignore_eos;
    request.stop_tokens = params.stop_token_ids;
    if (!params.ignore_eos) {
      for (const TokenId eos : model_.defaults.eos_tokens) {
        if (eos != model_.encoder->eos()) request.stop_tokens.push_back(eos);
      }
    }
    request.logprobs = params.logprobs;
    request.prompt_logprobs = params.prompt_logprobs;
    if (!plan_.chat && params.echo) {
      request.prompt_logprobs = std::max(params.prompt_logprobs, params.logprobs);
    }
    request.priority = params.priority;
    request.progress = params.include_progress;
    request.cache_salt = params.cache_salt;
    request.boundaries = plan_.boundaries;
    request.session = params.session;
    request.retain_seconds = params.session.empty() ? 0 : static_cast<double>(params.session_ttl);
    requests.push_back(std::move(request));
  }
  return requests;
}

void Generation::Append(Choice& choice, OutputDelta delta) {
  pending_bytes_ += delta.reasoning.size() + delta.content.size();
  choice.reasoning += delta.reasoning;
  choice.content += delta.content;
  if (delta.stopped && !choice.finished()) {
    choice.finish = "stop";
    choice.stop_text = std::move(delta.stop_string);
    ++finished_;
  }
}

bool Generation::Accept(size_t index, Output output) {
  Choice& choice = choices_[index];
  if (output.report != nullptr) choice.report = output.report;
  if (choice.finished()) return false;
  choice.cached_tokens = std::max(choice.cached_tokens, output.cached_tokens);
  choice.prefilled = std::max(choice.prefilled, output.prefilled);
  for (auto& entry : output.prompt_logprobs) choice.prompt_logprobs.push_back(std::move(entry));
  if (!output.tokens.empty() || output.finish) choice.started = true;
  const bool drops_tokens = plan_.params.max_tokens == 0;
  for (size_t i = 0; i < output.tokens.size() && !drops_tokens; ++i) {
    const TokenId token = output.tokens[i];
    ++choice.completion_tokens;
    if (plan_.params.return_token_ids) choice.token_ids.push_back(token);
    if (plan_.params.logprobs >= 0 && i < output.logprobs.size() && !output.logprobs[i].empty()) {
      std::vector<ops::TokenLogprob>& row = output.logprobs[i];
      ScoredToken scored{row.front().token, row.front().logprob, {}};
      scored.top.assign(row.begin() + 1, row.end());
      choice.scored.push_back(std::move(scored));
      pending_bytes_ += 64 * row.size();
    }
    Append(choice, choice.parser.Push(token));
    if (choice.finished()) return !output.finish.has_value();
  }
  if (output.finish) Finish(choice, output);
  return false;
}

void Generation::Finish(Choice& choice, const Output& output) {
  Append(choice, choice.parser.Finish());
  if (choice.finished()) return;  // the flushed text ended in a stop string
  ++finished_;
  switch (*output.finish) {
    case FinishReason::kStop:
      choice.finish = "stop";
      if (output.stop_token >= 0) {
        if (plan_.params.max_tokens != 0) ++choice.completion_tokens;
        if (plan_.params.return_token_ids) choice.token_ids.push_back(output.stop_token);
        const auto& ends = model_.defaults.eos_tokens;
        const bool own = output.stop_token == model_.encoder->eos() ||
                         std::find(ends.begin(), ends.end(), output.stop_token) != ends.end();
        if (!own) choice.stop_token = output.stop_token;
      }
      break;
    case FinishReason::kLength: choice.finish = "length"; break;
    case FinishReason::kCancelled:
      choice.finish = "abort";
      if (error_.message.empty()) error_ = {Code::kCancelled, "the request was aborted", {}};
      break;
    case FinishReason::kError:
      choice.finish = "error";
      if (error_.message.empty()) error_ = output.error;
      if (error_.message.empty()) error_.message = "the engine failed without saying why";
      break;
  }
}

void Generation::Abort(Error error) {
  for (Choice& choice : choices_) {
    if (choice.finished()) continue;
    choice.finish = "error";
    ++finished_;
  }
  if (error_.message.empty()) error_ = std::move(error);
}

Usage Generation::usage() const {
  Usage usage;
  for (const int64_t tokens : prompt_tokens_) usage.prompt += tokens;
  for (size_t i = 0; i < choices_.size(); ++i) {
    const Choice& choice = choices_[i];
    usage.completion += choice.completion_tokens;
    usage.reasoning += std::min(choice.parser.reasoning_tokens(), choice.completion_tokens);
    if (i % plan_.params.n == 0) usage.cached += choice.cached_tokens;
  }
  return usage;
}

bool Generation::settled() const {
  if (!finished()) return false;
  if (!plan_.params.explain || error() != nullptr) return true;
  return std::all_of(choices_.begin(), choices_.end(),
                     [](const Choice& choice) { return choice.report != nullptr; });
}

std::vector<ExplainedChoice> Generation::explained() const {
  std::vector<ExplainedChoice> list;
  for (const Choice& choice : choices_) {
    list.push_back(
        {choice.finished() ? choice.finish : "abort", choice.completion_tokens, choice.report});
  }
  return list;
}

int64_t Generation::prefilled() const {
  int64_t total = 0;
  for (size_t i = 0; i < choices_.size(); i += plan_.params.n) total += choices_[i].prefilled;
  return total;
}

}  // namespace fathom
