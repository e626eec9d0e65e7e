// What the API hands to the engine and what it gets back.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/geometry.h"
#include "cache/prefix_report.h"
#include "core/ids.h"
#include "core/status.h"
#include "ops/sampling/sampling.h"

namespace fathom {

using Clock = std::chrono::steady_clock;

enum class FinishReason : uint8_t {
  kStop,    // an end token or a stop token id; the token itself is not delivered
  kLength,  // max_tokens or the context limit
  kCancelled,
  kError,  // Output::error says what
};

// Where a request's time and bytes went; comes with its last Output.
struct RequestReport {
  PrefixReport prefix;
  double queue_seconds = 0;    // arrival to admission
  double prefill_seconds = 0;  // admission to the first token
  double decode_seconds = 0;   // first token to the end
  int64_t preemptions = 0;
  int64_t recomputed_tokens = 0;  // computed again after preemptions
  // Bytes of each cache kind the sequence holds at its end, padding left out (CacheKind's order).
  std::array<int64_t, kCacheKinds> bytes{};
};

// One step's news about one request branch, in order.
struct Output {
  RequestId id;
  std::vector<TokenId> tokens;                           // new tokens; usually one
  std::vector<std::vector<ops::TokenLogprob>> logprobs;  // per token, when asked for
  // Prompt log-probabilities of positions 1.., when asked for; grows with prefill.
  std::vector<std::vector<ops::TokenLogprob>> prompt_logprobs;
  int64_t prefilled = 0;                        // prompt tokens computed or found so far
  int64_t prompt_tokens = 0;                    // of so many
  int64_t cached_tokens = 0;                    // of them found in the prefix cache
  std::shared_ptr<const RequestReport> report;  // with `finish`
  std::optional<FinishReason> finish;
  TokenId stop_token = -1;  // with kStop: which token ended it
  Error error;              // with kError
};

// Where a request's outputs go: one queue per io thread. Deliver is called on the engine thread at
// the end of a step with everything for this queue; it must not block (post to the io loop).
class OutputQueue {
 public:
  virtual ~OutputQueue() = default;
  virtual void Deliver(std::vector<Output> outputs) = 0;
};

struct Request {
  std::vector<TokenId> prompt;   // at least one token
  ops::SamplingParams sampling;  // seed: the caller's, drawn by it when the user gave none
  int64_t max_tokens = 0;        // 0: up to the context limit
  int64_t min_tokens = 0;
  bool ignore_eos = false;           // the end token is delivered like any other (vLLM's rule)
  std::vector<TokenId> stop_tokens;  // besides the model's own end token
  int logprobs = -1;                 // -1 none; n: the sampled token and the n most likely
  int prompt_logprobs = -1;          // as logprobs, of the prompt's tokens from the second on
  int priority = 0;                  // lower runs first (vLLM's rule)
  bool progress = false;             // deliver Outputs without tokens while prefilling
  // Prefix cache. Prompts with different salts share nothing.
  std::string cache_salt;
  // Where messages end, in prompt tokens: windows are saved there, for other requests to go on
  // from.
  std::vector<int64_t> boundaries;
  // A named session: what it leaves in the cache is the last to be evicted for retain_seconds.
  std::string session;
  double retain_seconds = 0;
  std::shared_ptr<OutputQueue> queue;
};

}  // namespace fathom
