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

  // How to sample the token after `tokens` (prompt, then generated) from row `row` of the logits.
  // `end_token` and the request's stop tokens are banned until min_tokens. The result refers to the
  // request and to this sampler, until the next call.
  ops::SamplingRow Next(const Request& request, std::span<const TokenId> tokens,
                        int64_t prompt_tokens, TokenId end_token, int32_t row);

 private:
  void Count(TokenId token, bool generated);

  // Penalties need to know how often each token has occurred; kept up to date token by token, and
  // only for requests that use a penalty.
  bool counting_;
  int64_t counted_ = 0;  // tokens seen by Count
  std::vector<ops::TokenCount> counts_;
  std::vector<TokenId> banned_;
  std::unordered_map<TokenId, size_t> index_;  // into counts_
};

}  // namespace fathom
