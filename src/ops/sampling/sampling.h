// sampling: one token from one row of logits.
//
// Order (vLLM's): logit_bias, then repetition / presence / frequency penalties, then banned tokens,
// then temperature, min_p, top_k, top_p on the softmax, then one draw. temperature 0 is arg-max of
// the penalised logits, ties to the lower id. The draw uses Philox(seed, step): the same seed, step
// and logits give the same token whatever else is in the batch, and on every machine: each weight
// is an integer made by a fixed sequence of IEEE operations, and all sums are integer sums.
//
// Exactly:
//   logit    l += bias (several entries of one token add up). For a token of `counts` that has
//            occurred at all: l > 0 ? l / repetition : l * repetition; then, for one that was
//            generated: l -= frequency * in_generated, l -= presence. Banned: l = -inf.
//   order    "most likely first": larger logit first, ties to the lower id; -0 equals +0 and NaN
//            counts as -inf. A token at -inf is never drawn.
//   weight   round(2^30 * exp((l - max) / temperature)): relative to the most likely token,
//            probabilities below 2^-31 are 0. When max is +inf, the tokens at +inf weigh the same
//            and the others nothing.
//   min_p    keeps weights >= min_p * 2^30 (<= 0: off; above 1 counts as 1).
//   top_k    keeps the first k (0 or less, or k >= V: off).
//   top_p    keeps the shortest prefix, at least one token, whose weight reaches top_p of the
//            weight that is left (>= 1: off).
//   draw     r = floor(u * total / 2^64), u the first 64 bits of Philox4x32-10 with key = seed and
//            counter = step; the token, in id order, at which the running sum exceeds r.
// temperature <= 0 or NaN is 0. Ids outside [0, V) in bias, counts and bans are ignored.
// When no logit is above -inf: the lowest id that is not banned, or 0 when all are.
//
// Thread safety: these functions may run on several threads at once (scratch is thread-local).
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/ids.h"
#include "core/matrix.h"
#include "core/thread_pool.h"

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

// How often each token has occurred; one entry per token, in any order.
struct TokenCount {
  TokenId token;
  int32_t in_prompt;     // repetition_penalty looks at both
  int32_t in_generated;  // presence and frequency look at this one
};

struct SamplingArgs {
  std::span<float> logits;  // [V], changed in place by bias, penalties and bans
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

// Samples; logits are left penalised. V >= 1.
TokenId Sample(const SamplingArgs& args);

// A row of a batch.
struct SamplingRow {
  int32_t row = 0;  // of the logits
  const SamplingParams* params = nullptr;
  std::span<const TokenCount> counts;
  std::span<const TokenId> banned;
  uint64_t step = 0;
};

struct SampledToken {
  TokenId token = 0;
  float logit = 0;  // after bias, penalties and bans
};

// Rows of one step at once, each as by Sample.
struct SampleBatchArgs {
  MatrixView logits;                  // [R, V] f32; what is sampled holds anything afterwards
  std::span<const SamplingRow> rows;  // each row of the logits at most once
  SampledToken* out = nullptr;        // [rows.size()], in host memory
};

void SampleBatchReference(const SampleBatchArgs& args);
void SampleBatchCpu(const SampleBatchArgs& args, ThreadPool& pool);

// Natural-log probabilities under softmax(logits) before temperature: the sampled token first,
// then the `top` most likely ones in descending order (ties to the lower id; fewer when V is).
// The log-probability of a token at -inf or NaN is -inf.
std::vector<TokenLogprob> Logprobs(std::span<const float> logits, TokenId token, int top);

}  // namespace fathom::ops
