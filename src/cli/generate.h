// One generation on a Runtime, for the commands that talk to a terminal.
//
//   auto stats = RunGeneration(*runtime, prompt_ids, {.sampling =
//   DefaultSampling(runtime->defaults)},
//                         {.progress = ..., .text = [](const OutputDelta& delta) { ... }});
//
// Blocks the calling thread; callbacks run on it.
#pragma once

#include <signal.h>

#include <functional>
#include <string>
#include <vector>

#include "cli/runtime.h"
#include "core/status.h"
#include "text/output_parser.h"

namespace fathom {

struct GenerateOptions {
  ops::SamplingParams sampling;
  int64_t max_tokens = 0;   // 0: up to the context limit
  bool thinking = false;    // the prompt ends inside <think>
  bool plain_text = false;  // no chat encoding: nothing is split off as reasoning
};

struct GenerateCallbacks {
  std::function<void(int64_t done, int64_t total)> progress;  // prompt tokens; may be empty
  std::function<void(const OutputDelta&)> text;
};

struct GenerateStats {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t completion_tokens = 0;
  double first_token_seconds = 0;  // from submission
  double total_seconds = 0;
  FinishReason finish = FinishReason::kStop;

  // "24,012 prompt tokens, first token after 18.30 s (1,312 tok/s); 20 tokens at 85.3 tok/s"
  std::string Describe() const;
};

// Fails as Engine::Submit does, or with the engine's error. An interrupt (see InterruptScope) ends
// the generation with FinishReason::kCancelled.
Expected<GenerateStats> RunGeneration(Runtime& runtime, std::vector<TokenId> prompt,
                                      const GenerateOptions& options,
                                      const GenerateCallbacks& callbacks);

ops::SamplingParams DefaultSampling(const GenerationDefaults& defaults);

// While one lives, Ctrl-C ends the running generation instead of the process.
class InterruptScope {
 public:
  InterruptScope();
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;
  static bool interrupted();

 private:
  struct sigaction previous_ = {};
};

}  // namespace fathom
