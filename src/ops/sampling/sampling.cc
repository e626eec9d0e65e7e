#include "ops/sampling/sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/status.h"
#include "ops/sampling/philox.h"
#include "ops/sampling/ranking.h"
#include "ops/sampling/rules.h"
#include "ops/sampling/scan.h"

namespace fathom::ops {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool InVocabulary(TokenId token, std::span<const float> logits) {
  return token >= 0 && static_cast<size_t>(token) < logits.size();
}

void Penalise(const SamplingArgs& args) {
  const SamplingParams& params = *args.params;
  for (const auto& [token, bias] : params.logit_bias) {
    if (InVocabulary(token, args.logits)) args.logits[token] += bias;
  }
  const float repetition = params.repetition_penalty;
  const bool penalised =
      repetition != 1.0f || params.presence_penalty != 0.0f || params.frequency_penalty != 0.0f;
  if (penalised) {
    for (const TokenCount& count : args.counts) {
      if (!InVocabulary(count.token, args.logits)) continue;
      float& logit = args.logits[count.token];
      if (repetition != 1.0f && (count.in_prompt > 0 || count.in_generated > 0)) {
        logit = logit > 0 ? logit / repetition : logit * repetition;
      }
      if (count.in_generated > 0) {
        logit -= params.frequency_penalty * static_cast<float>(count.in_generated);
        logit -= params.presence_penalty;
      }
    }
  }
  for (const TokenId token : args.banned) {
    if (InVocabulary(token, args.logits)) args.logits[token] = -kInfinity;
  }
}

struct Candidate {
  RankedToken ranked;
  int32_t weight;
};

// u / 2^64 of `total`, rounded down.
uint64_t Draw(uint64_t bits, uint64_t total) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(bits) * total) >> 64);
}

uint64_t TotalWeight(std::span<const Candidate> candidates) {
  uint64_t total = 0;
  for (const Candidate& c : candidates) total += static_cast<uint64_t>(c.weight);
  return total;
}

// Least weight that reaches `top_p` of `total`; at least 1, so that one token stays.
uint64_t Share(float top_p, uint64_t total) {
  if (!(top_p < 1.0f)) return total;
  const double wanted = std::ceil(static_cast<double>(top_p) * static_cast<double>(total));
  return std::clamp<uint64_t>(wanted > 0 ? static_cast<uint64_t>(wanted) : 0, 1, total);
}

// Buckets of weights, a larger weight never in a lower one: exponent and five mantissa bits.
constexpr int kBuckets = 31 << 5;

int Bucket(int32_t weight) {
  return static_cast<int>((std::bit_cast<uint32_t>(static_cast<float>(weight)) >> 18) -
                          (127u << 5));
}

// The last token of the shortest prefix, in order of likelihood, whose weight reaches `wanted`
// (1 <= wanted <= total weight). A histogram finds the bucket it lies in, a quickselect the token.
RankedToken LastOfPrefix(std::span<const Candidate> candidates, uint64_t wanted) {
  uint64_t mass[kBuckets] = {};
  for (const Candidate& c : candidates) mass[Bucket(c.weight)] += static_cast<uint64_t>(c.weight);
  int bucket = kBuckets - 1;
  for (; mass[bucket] < wanted; --bucket) wanted -= mass[bucket];

  thread_local std::vector<Candidate> undecided;
  undecided.clear();
  for (const Candidate& c : candidates) {
    if (Bucket(c.weight) == bucket) undecided.push_back(c);
  }
  auto before = [](const Candidate& a, const Candidate& b) { return a.ranked < b.ranked; };
  size_t begin = 0;
  size_t end = undecided.size();
  while (end - begin > 1) {
    const size_t middle = begin + (end - begin) / 2;
    std::nth_element(undecided.begin() + begin, undecided.begin() + middle, undecided.begin() + end,
                     before);
    const uint64_t upper = TotalWeight({undecided.data() + begin, middle - begin});
    if (upper >= wanted) {
      end = middle;
    } else {
      wanted -= upper;
      begin = middle;
    }
  }
  return undecided[begin].ranked;
}

// Draws from the shortest prefix that weighs `wanted`. Candidates in id order, of positive weight.
TokenId DrawFrom(std::vector<Candidate>& candidates, uint64_t wanted, uint64_t bits) {
  uint64_t total = TotalWeight(candidates);
  if (wanted < total) {
    const RankedToken last = LastOfPrefix(candidates, wanted);
    std::erase_if(candidates, [&](const Candidate& c) { return last < c.ranked; });
    total = TotalWeight(candidates);
  }
  uint64_t rest = Draw(bits, total);
  for (const Candidate& c : candidates) {
    if (rest < static_cast<uint64_t>(c.weight)) return c.ranked.token;
    rest -= static_cast<uint64_t>(c.weight);
  }
  FATHOM_CHECK(false);
  return 0;
}

// One of the tokens at +inf, all alike.
TokenId DrawInfinite(const SamplingArgs& args, uint64_t bits) {
  const int64_t top_k = args.params->top_k;
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < args.logits.size(); ++i) {
    if (LogitKey(args.logits[i]) != kPlusInfinityKey) continue;
    candidates.push_back({{kPlusInfinityKey, static_cast<TokenId>(i)}, kUnitWeight});
    if (static_cast<int64_t>(candidates.size()) == top_k) break;  // ties go to the lower id
  }
  return DrawFrom(candidates, Share(args.params->top_p, TotalWeight(candidates)), bits);
}

TokenId DrawTopK(const SamplingArgs& args, const Ranking& ranking, const WeightRule& rule,
                 uint64_t bits) {
  const float max = args.logits[ranking.first().token];
  thread_local std::vector<RankedToken> top;
  thread_local std::vector<float> logits;
  thread_local std::vector<int32_t> weights;
  thread_local std::vector<uint64_t> sums;
  thread_local std::vector<Candidate> candidates;
  ranking.Top(args.params->top_k, top);
  std::sort(top.begin(), top.end(),
            [](const RankedToken& a, const RankedToken& b) { return a.token < b.token; });
  logits.resize(top.size());
  weights.resize(top.size());
  sums.resize(top.size() / kScanChunk + 1);
  for (size_t i = 0; i < top.size(); ++i) logits[i] = args.logits[top[i].token];
  CpuScan().weights(logits.data(), static_cast<int64_t>(top.size()), max, rule.inverse, rule.floor,
                    weights.data(), sums.data());
  candidates.clear();
  for (size_t i = 0; i < top.size(); ++i) {
    if (weights[i] > 0) candidates.push_back({top[i], weights[i]});
  }
  return DrawFrom(candidates, Share(args.params->top_p, TotalWeight(candidates)), bits);
}

TokenId DrawAll(const SamplingArgs& args, const Ranking& ranking, const WeightRule& rule,
                uint64_t bits) {
  const float max = args.logits[ranking.first().token];
  thread_local std::vector<int32_t> weights;
  thread_local std::vector<uint64_t> sums;
  const int64_t n = static_cast<int64_t>(args.logits.size());
  weights.resize(n);
  sums.resize((n + kScanChunk - 1) / kScanChunk);
  CpuScan().weights(args.logits.data(), n, max, rule.inverse, rule.floor, weights.data(),
                    sums.data());
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  const float top_p = args.params->top_p;
  if (top_p < 1.0f) {
    thread_local std::vector<Candidate> candidates;
    candidates.clear();
    // Tokens below `least` weigh less together than top_p cuts off: none is in the prefix.
    const uint64_t wanted = Share(top_p, total);
    const auto least = static_cast<int32_t>(std::max<uint64_t>(1, (total - wanted) / n));
    for (int64_t begin = 0, chunk = 0; begin < n; begin += kScanChunk, ++chunk) {
      if (sums[chunk] < static_cast<uint64_t>(least)) continue;
      const int64_t end = std::min<int64_t>(n, begin + kScanChunk);
      for (int64_t i = begin; i < end; ++i) {
        if (weights[i] < least) continue;
        const auto token = static_cast<TokenId>(i);
        candidates.push_back({{LogitKey(args.logits[i]), token}, weights[i]});
      }
    }
    return DrawFrom(candidates, wanted, bits);
  }
  uint64_t rest = Draw(bits, total);
  size_t chunk = 0;
  for (; rest >= sums[chunk]; ++chunk) rest -= sums[chunk];
  int64_t i = static_cast<int64_t>(chunk) * kScanChunk;
  for (; rest >= static_cast<uint64_t>(weights[i]); ++i) rest -= static_cast<uint64_t>(weights[i]);
  return static_cast<TokenId>(i);
}

}  // namespace

TokenId LowestFree(std::span<const TokenId> banned, int64_t vocabulary) {
  std::vector<TokenId> sorted(banned.begin(), banned.end());
  std::sort(sorted.begin(), sorted.end());
  TokenId free = 0;
  for (const TokenId token : sorted) {
    if (token == free) ++free;
  }
  return free < vocabulary ? free : 0;
}

WeightRule MakeWeightRule(const SamplingParams& params) {
  const float inverse = std::min(1.0f / params.temperature, std::numeric_limits<float>::max());
  const float min_p = params.min_p > 0 ? std::min(params.min_p, 1.0f) : 0.0f;
  const double floor = std::ceil(static_cast<double>(min_p) * kUnitWeight);
  return {inverse, static_cast<int32_t>(floor)};
}

TokenId Sample(const SamplingArgs& args) {
  FATHOM_CHECK(!args.logits.empty() && args.params != nullptr);
  const SamplingParams& params = *args.params;
  Penalise(args);
  const Ranking ranking(args.logits);
  const RankedToken best = ranking.first();
  if (best.key == kMinusInfinityKey) return LowestFree(args.banned, std::ssize(args.logits));
  if (!(params.temperature > 0) || params.top_k == 1) return best.token;

  const uint64_t bits = PhiloxBits(params.seed, args.step);
  if (best.key == kPlusInfinityKey) return DrawInfinite(args, bits);
  const WeightRule rule = MakeWeightRule(params);
  if (params.top_k > 0 && static_cast<size_t>(params.top_k) < args.logits.size()) {
    return DrawTopK(args, ranking, rule, bits);
  }
  return DrawAll(args, ranking, rule, bits);
}

}  // namespace fathom::ops
