// Sampler: the sampling state of one sequence around ops/sampling.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/ids.h"
#include "engine/request.h"
#include "ops/sampling/sampling.h"

namespace fathom {

class Sampler {
 public:
  explicit Sampler(const Request& request);

  struct Result {
    TokenId token = 0;
    std::vector<ops::TokenLogprob> logprobs;  // empty unless asked for
  };

  // Samples the token after `tokens` (prompt, then generated). `logits` [V] are changed in place.
  // Log-probabilities are those of the model's own logits, before bias, penalties and bans (vLLM's
  // raw_logprobs). `end_token` and the request's stop tokens are banned until min_tokens.
  Result Sample(const Request& request, std::span<const TokenId> tokens, int64_t prompt_tokens,
                TokenId end_token, std::span<float> logits);

 private:
  void Count(TokenId token, bool generated);

  // Penalties need to know how often each token has occurred; kept up to date token by token, and
  // only for requests that use a penalty.
  bool counting_;
  bool changes_logits_;
  int64_t counted_ = 0;  // tokens seen by Count
  std::vector<ops::TokenCount> counts_;
  std::unordered_map<TokenId, size_t> index_;  // into counts_
};

}  // namespace fathom
