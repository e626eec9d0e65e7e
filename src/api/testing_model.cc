#include "api/testing_model.h"

#include <algorithm>

#include "engine/testing_executor.h"

namespace fathom::testing {
namespace {

constexpr TokenId kUser = 258, kAssistant = 259;

// Where generation began: behind the last assistant marker and its think marker, or behind the last
// '>' of a plain prompt.
size_t PromptEnd(std::span<const TokenId> history) {
  for (size_t i = history.size(); i-- > 0;) {
    if (history[i] == kAssistant) return i + 2;
  }
  for (size_t i = history.size(); i-- > 0;) {
    if (history[i] == '>') return i + 1;
  }
  return history.size();
}

// The last user turn's text, then the end.
TokenId EchoUser(std::span<const TokenId> history) {
  const size_t end = PromptEnd(history);
  size_t begin = std::min(end, history.size());
  while (begin > 0 && history[begin - 1] != kUser) --begin;
  const size_t at = begin + (history.size() - end);
  return at < history.size() && history[at] < 256 ? history[at] : 257;
}

}  // namespace

NextToken FakeModel::Say(const std::string& text) {
  const std::vector<TokenId> reply = ByteTokenizer().Encode(text, AddedTokens::kMatch);
  return [reply](std::span<const TokenId> history) {
    const size_t end = PromptEnd(history);
    const size_t at = history.size() - std::min(end, history.size());
    return at < reply.size() ? reply[at] : TokenId{257};
  };
}

FakeModel::FakeModel(FakeModelOptions options) {
  Expected<ChatEncoder> made = ChatEncoder::Make(tokenizer);
  FATHOM_CHECK(made.has_value());
  encoder = std::make_unique<ChatEncoder>(std::move(*made));
  ScriptedOptions script;
  script.geometry = ScriptedGeometry();
  script.vocab_size = tokenizer.vocab_size();
  script.limits.max_step_tokens = options.engine.max_num_batched_tokens;
  script.limits.max_logit_rows = std::max(64, options.engine.max_num_seqs);
  script.next_token = [next = options.next_token ? options.next_token : EchoUser](
                          RequestId, std::span<const TokenId> history) { return next(history); };
  if (options.on_step) {
    script.on_step = [step = options.on_step](const StepPlan&) { return step(); };
  }
  options.engine.eos_token = encoder->eos();
  if (options.engine.max_model_len == 0) options.engine.max_model_len = 65536;
  auto started = Engine::Start(options.engine, script.geometry, MakeScriptedExecutor(script));
  FATHOM_CHECK(started.has_value());
  engine = std::move(*started);
  served.engine = engine.get();
  served.tokenizer = &tokenizer;
  served.encoder = encoder.get();
  served.names = {"fake", "alias"};
  served.root = "/models/fake";
  served.max_model_len = options.engine.max_model_len;
}

}  // namespace fathom::testing
