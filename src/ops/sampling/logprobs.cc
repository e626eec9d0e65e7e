#include <algorithm>
#include <cmath>
#include <limits>

#include "core/status.h"
#include "ops/sampling/ranking.h"
#include "ops/sampling/sampling.h"
#include "ops/sampling/scan.h"

namespace fathom::ops {
namespace {

// log of the denominator of the softmax, as max + log_sum; log-probabilities are differences.
class LogSoftmax {
 public:
  LogSoftmax(std::span<const float> logits, RankedToken best) : best_(best) {
    const int64_t n = static_cast<int64_t>(logits.size());
    if (best.key == kMinusInfinityKey) return;
    max_ = logits[best.token];
    if (best.key == kPlusInfinityKey) {
      log_sum_ = std::log(static_cast<double>(std::count(logits.begin(), logits.end(), max_)));
    } else {
      log_sum_ = std::log(CpuScan().exp_sum(logits.data(), n, max_));
    }
  }

  float operator()(float logit) const {
    const int32_t key = LogitKey(logit);
    if (key == kMinusInfinityKey) return -std::numeric_limits<float>::infinity();
    if (key == best_.key) return static_cast<float>(-log_sum_);
    return static_cast<float>(static_cast<double>(logit) - max_ - log_sum_);
  }

 private:
  RankedToken best_;
  float max_ = 0;
  double log_sum_ = 0;
};

int Rank(std::span<const float> logits, TokenId token) {
  const int32_t key = LogitKey(logits[token]);
  int before = 0;
  for (size_t i = 0; i < static_cast<size_t>(token); ++i) before += LogitKey(logits[i]) >= key;
  for (size_t i = token + 1; i < logits.size(); ++i) before += LogitKey(logits[i]) > key;
  return before + 1;
}

}  // namespace

std::vector<TokenLogprob> Logprobs(std::span<const float> logits, TokenId token, int top) {
  FATHOM_CHECK(token >= 0 && static_cast<size_t>(token) < logits.size());
  const Ranking ranking(logits);
  const LogSoftmax log_softmax(logits, ranking.first());
  std::vector<TokenLogprob> result{{token, log_softmax(logits[token]), Rank(logits, token)}};
  std::vector<RankedToken> first;
  ranking.Top(top, first);
  std::sort(first.begin(), first.end());
  // Top() leaves out tokens at -inf; they follow in id order.
  const size_t wanted = std::min<size_t>(std::max(top, 0), logits.size());
  for (size_t i = 0; first.size() < wanted; ++i) {
    if (LogitKey(logits[i]) == kMinusInfinityKey) {
      first.push_back({kMinusInfinityKey, static_cast<TokenId>(i)});
    }
  }
  for (size_t i = 0; i < first.size(); ++i) {
    result.push_back(
        {first[i].token, log_softmax(logits[first[i].token]), static_cast<int>(i) + 1});
  }
  return result;
}

}  // namespace fathom::ops
