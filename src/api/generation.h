// Generation: everything one completion request produces, from prompts to the fields of a reply.
// No sockets and no JSON: connections feed it engine outputs, a ReplyWriter turns what is new into
// events or one body. Streamed and plain replies take the same path, so their text is the same.
//
//   FATHOM_ASSIGN(GenerationPlan plan, PrepareChat(body, model));   // text pool
//   Generation generation(std::move(plan), model, id, created);
//   engine.SubmitAll(generation.MakeRequests(...));
//   if (generation.Accept(choice, std::move(output))) engine.Cancel(...);
//
// Used by one io thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "api/explanation.h"
#include "api/openai_request.h"
#include "api/served_model.h"
#include "engine/request.h"
#include "text/output_parser.h"

namespace fathom {

// A validated and tokenised request.
struct GenerationPlan {
  bool chat = true;
  std::string model;  // the name to report
  GenerationParams params;
  std::vector<std::vector<TokenId>> prompts;  // one for chat
  std::vector<int64_t> boundaries;            // of a chat's prompt: ChatPrompt::boundaries
  // Text put before each prompt's completion: echo.
  std::vector<std::string> echo;
  bool thinking = false;  // generation starts inside <think>
};

// Parse, validate, encode and check against the context limit and the engine's queue: prompt and
// max_tokens beyond the one are kContextLength with the numbers, more choices than the other ever
// holds name `n` or `prompt`. May take seconds for megabytes of text; thread-safe.
Expected<GenerationPlan> PrepareChat(std::string_view body, const ServedModel& model);
Expected<GenerationPlan> PrepareCompletion(std::string_view body, const ServedModel& model);

// Whether a prompt leaves its last turn inside <think>. Message text never becomes a control token,
// so the renderer's and the parser's idea of the mode cannot differ.
bool EndsInsideThinking(const std::vector<TokenId>& prompt, const ChatEncoder& encoder);

// Tokens of a plain prompt.
std::vector<TokenId> EncodePlain(const std::string& text, std::optional<bool> add_special_tokens,
                                 const ServedModel& model);

// A generated token with its log-probability and the likeliest alternatives.
struct ScoredToken {
  TokenId token = 0;
  float logprob = 0;
  std::vector<ops::TokenLogprob> top;
};

// One choice of the reply. The text fields hold what has not been taken by the writer yet.
struct Choice {
  Choice(OutputParser output_parser, size_t prompt)
      : parser(std::move(output_parser)), prompt_index(prompt) {}

  OutputParser parser;
  size_t prompt_index;
  std::string reasoning, content;
  std::vector<ScoredToken> scored;
  std::vector<TokenId> token_ids;
  std::vector<std::vector<ops::TokenLogprob>> prompt_logprobs;  // positions 1..
  int64_t completion_tokens = 0;  // an end token included, nothing after a stop string
  int64_t cached_tokens = 0;
  int64_t prefilled = 0;
  bool started = false;  // something was generated or it has finished
  std::string finish;    // "stop", "length"; empty while it runs
  // The engine's last word; a stop string ends a choice one step earlier.
  std::shared_ptr<const RequestReport> report;
  std::string stop_text;    // the stop string met
  TokenId stop_token = -1;  // the stop token id met, the model's own end tokens excepted
  // The writer's marks.
  bool opened = false, closed = false;
  int64_t text_offset = 0;  // characters handed out, for completion logprobs

  bool finished() const { return !finish.empty(); }
};

struct Usage {
  int64_t prompt = 0, completion = 0, cached = 0, reasoning = 0;
};

class Generation {
 public:
  // `model` must outlive it. Choice i belongs to prompt i / n.
  Generation(GenerationPlan plan, const ServedModel& model, std::string id, int64_t created);

  // One engine request per choice, in order; prompts are moved into the last request that needs
  // them unless the reply shows them. `random_seed` seeds requests that brought none.
  std::vector<Request> MakeRequests(uint64_t random_seed);

  // Takes one step's news about a choice. True when the engine should cancel the branch because a
  // stop string ended it. Of outputs of finished choices only the report counts.
  bool Accept(size_t choice, Output output);

  bool finished() const { return finished_ == choices_.size(); }
  // Finished, and with everything the reply has to tell: explain waits for the engine's reports.
  bool settled() const;
  const Error* error() const { return error_.message.empty() ? nullptr : &error_; }
  void Abort(Error error);  // ends all choices with an error

  Usage usage() const;
  std::vector<ExplainedChoice> explained() const;
  // Bytes of text not yet taken.
  size_t pending_bytes() const { return pending_bytes_; }
  void MarkTaken() { pending_bytes_ = 0; }
  // Prompt tokens computed so far of all prompts.
  int64_t prefilled() const;

  const std::string& id() const { return id_; }
  int64_t created() const { return created_; }
  const GenerationPlan& plan() const { return plan_; }
  const ServedModel& model() const { return model_; }
  std::vector<Choice>& choices() { return choices_; }
  const std::vector<Choice>& choices() const { return choices_; }
  const std::vector<TokenId>& prompt(size_t i) const { return plan_.prompts[i]; }

 private:
  void Finish(Choice& choice, const Output& output);
  void Append(Choice& choice, OutputDelta delta);

  GenerationPlan plan_;
  const ServedModel& model_;
  std::string id_;
  int64_t created_;
  std::vector<int64_t> prompt_tokens_;
  std::vector<Choice> choices_;
  size_t finished_ = 0;
  size_t pending_bytes_ = 0;
  Error error_;
};

}  // namespace fathom
