#include "engine/sampler.h"

namespace fathom {
namespace {

bool HasPenalty(const ops::SamplingParams& params) {
  return params.presence_penalty != 0.0f || params.frequency_penalty != 0.0f ||
         params.repetition_penalty != 1.0f;
}

}  // namespace

Sampler::Sampler(const Request& request)
    : counting_(HasPenalty(request.sampling)),
      changes_logits_(counting_ || !request.sampling.logit_bias.empty() || request.min_tokens > 0) {
}

void Sampler::Count(TokenId token, bool generated) {
  const auto [entry, is_new] = index_.try_emplace(token, counts_.size());
  if (is_new) counts_.push_back({token, 0, 0});
  ops::TokenCount& count = counts_[entry->second];
  ++(generated ? count.in_generated : count.in_prompt);
}

Sampler::Result Sampler::Sample(const Request& request, std::span<const TokenId> tokens,
                                int64_t prompt_tokens, TokenId end_token, std::span<float> logits) {
  const auto length = static_cast<int64_t>(tokens.size());
  if (counting_) {
    for (; counted_ < length; ++counted_) {
      Count(tokens[static_cast<size_t>(counted_)], counted_ >= prompt_tokens);
    }
  }
  const int64_t generated = length - prompt_tokens;
  std::vector<TokenId> banned;
  if (generated < request.min_tokens) {
    banned = request.stop_tokens;
    if (!request.ignore_eos) banned.push_back(end_token);
  }

  const bool wants_logprobs = request.logprobs >= 0;
  std::vector<float> untouched;
  if (wants_logprobs && changes_logits_) untouched.assign(logits.begin(), logits.end());

  Result result;
  result.token = ops::Sample({.logits = logits,
                              .params = &request.sampling,
                              .counts = counts_,
                              .banned = banned,
                              .step = static_cast<uint64_t>(generated)});
  if (wants_logprobs) {
    const std::span<const float> raw = changes_logits_ ? std::span<const float>(untouched) : logits;
    result.logprobs = ops::Logprobs(raw, result.token, request.logprobs);
  }
  return result;
}

}  // namespace fathom
