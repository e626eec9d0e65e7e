#include "engine/sampler.h"

namespace fathom {
namespace {

bool HasPenalty(const ops::SamplingParams& params) {
  return params.presence_penalty != 0.0f || params.frequency_penalty != 0.0f ||
         params.repetition_penalty != 1.0f;
}

}  // namespace

Sampler::Sampler(const Request& request) : counting_(HasPenalty(request.sampling)) {}

void Sampler::Count(TokenId token, bool generated) {
  const auto [entry, is_new] = index_.try_emplace(token, counts_.size());
  if (is_new) counts_.push_back({token, 0, 0});
  ops::TokenCount& count = counts_[entry->second];
  ++(generated ? count.in_generated : count.in_prompt);
}

ops::SamplingRow Sampler::Next(const Request& request, std::span<const TokenId> tokens,
                               int64_t prompt_tokens, TokenId end_token, int32_t row) {
  const auto length = static_cast<int64_t>(tokens.size());
  if (counting_) {
    for (; counted_ < length; ++counted_) {
      Count(tokens[static_cast<size_t>(counted_)], counted_ >= prompt_tokens);
    }
  }
  const int64_t generated = length - prompt_tokens;
  banned_.clear();
  if (generated < request.min_tokens) {
    banned_ = request.stop_tokens;
    if (!request.ignore_eos) banned_.push_back(end_token);
  }
  return {.row = row,
          .params = &request.sampling,
          .counts = counts_,
          .banned = banned_,
          .step = static_cast<uint64_t>(generated)};
}

}  // namespace fathom
