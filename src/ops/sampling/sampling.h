// sampling: one token from one row of logits.
//
// Order (vLLM's): logit_bias, then repetition / presence / frequency penalties, then temperature,
// min_p, top_k, top_p on the softmax, then one draw. temperature 0 is arg-max of the penalised
// logits, ties to the lower id. The draw uses Philox(seed, step): the same seed, step and logits
// give the same token whatever else is in the batch.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/ids.h"

namespace fathom::ops {

struct SamplingParams {
  float temperature = 1.0f;
  float top_p = 1.0f;
  int top_k = 0;  // 0 or -1: off
  float min_p = 0.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  float repetition_penalty = 1.0f;
  uint64_t seed = 0;
  std::vector<std::pair<TokenId, float>> logit_bias;
};

// How often each token has occurred; sparse, sorted by first use is not required.
struct TokenCount {
  TokenId token;
  int32_t in_prompt;     // repetition_penalty looks at both
  int32_t in_generated;  // presence and frequency look at this one
};

struct SamplingArgs {
  std::span<float> logits;  // [V], changed in place by bias and penalties
  const SamplingParams* params = nullptr;
  std::span<const TokenCount> counts;
  std::span<const TokenId> banned;  // set to -inf (min_tokens, ignore_eos)
  uint64_t step = 0;                // index of the token being sampled
};

struct TokenLogprob {
  TokenId token = 0;
  float logprob = 0;
  int rank = 0;  // 1 = most likely
};

// Samples; logits are left penalised.
TokenId Sample(const SamplingArgs& args);

// Natural-log probabilities under softmax(logits) before temperature: the sampled token first,
// then the `top` most likely ones in descending order (ties to the lower id).
std::vector<TokenLogprob> Logprobs(std::span<const float> logits, TokenId token, int top);

}  // namespace fathom::ops
