#include "ops/sampling/sampling.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>

#include "core/cpu_features.h"
#include "ops/sampling/philox.h"

namespace fathom::ops {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> RandomLogits(size_t n, float spread, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> logits(n);
  for (float& l : logits) l = normal(random);
  return logits;
}

TokenId SampleCopy(std::vector<float> logits, const SamplingParams& params, uint64_t step,
                   std::span<const TokenCount> counts = {}, std::span<const TokenId> banned = {}) {
  SamplingArgs args;
  args.logits = logits;
  args.params = &params;
  args.step = step;
  args.counts = counts;
  args.banned = banned;
  return Sample(args);
}

// The distribution of sampling.h in double, by a full sort. Logits finite or -inf.
std::vector<double> Exact(const std::vector<float>& logits, const SamplingParams& params) {
  std::vector<size_t> order;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] > -kInf) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  const double max = logits[order[0]];
  auto weight = [&](size_t i) { return std::exp((logits[i] - max) / params.temperature); };
  while (weight(order.back()) < params.min_p) order.pop_back();
  if (params.top_k > 0 && order.size() > static_cast<size_t>(params.top_k)) {
    order.resize(params.top_k);
  }
  double total = 0;
  for (size_t i : order) total += weight(i);
  if (params.top_p < 1) {
    double sum = 0;
    size_t keep = 0;
    do sum += weight(order[keep++]);
    while (keep < order.size() && sum < params.top_p * total);
    order.resize(keep);
    total = sum;
  }
  std::vector<double> p(logits.size());
  for (size_t i : order) p[i] = weight(i) / total;
  return p;
}

// Draws `draws` times and compares with Exact by chi-square over cells of at least 8 expected hits.
void ExpectDistribution(const std::vector<float>& logits, SamplingParams params, int draws) {
  const std::vector<double> p = Exact(logits, params);
  std::vector<int> hits(p.size());
  params.seed = 7;
  for (int i = 0; i < draws; ++i) ++hits[SampleCopy(logits, params, i)];
  double chi = 0, rest_expected = 0, rest_hits = 0;
  int cells = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    if (p[i] == 0) {
      ASSERT_EQ(hits[i], 0) << "token " << i << " is outside the support";
    }
    const double expected = p[i] * draws;
    if (expected < 8) {
      rest_expected += expected;
      rest_hits += hits[i];
      continue;
    }
    chi += (hits[i] - expected) * (hits[i] - expected) / expected;
    ++cells;
  }
  if (rest_expected > 0.5) {
    chi += (rest_hits - rest_expected) * (rest_hits - rest_expected) / rest_expected;
    ++cells;
  }
  const double freedom = std::max(1, cells - 1);
  // Five standard deviations above the mean of the chi-square distribution.
  EXPECT_LT(chi, freedom + 5 * std::sqrt(2 * freedom)) << cells << " cells";
}

TEST(Philox, MatchesThePublishedVectors) {
  using Block = std::array<uint32_t, 4>;
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Sampling, FollowsTheExactDistribution) {
  const std::vector<float> logits = RandomLogits(500, 2, 1);
  for (const float temperature : {0.3f, 1.0f, 3.0f}) {
    SamplingParams params;
    params.temperature = temperature;
    ExpectDistribution(logits, params, 20000);
    params.top_p = 0.8f;
    ExpectDistribution(logits, params, 20000);
    params.top_k = 20;
    ExpectDistribution(logits, params, 20000);
    params.top_p = 1;
    ExpectDistribution(logits, params, 20000);
    params.min_p = 0.1f;
    ExpectDistribution(logits, params, 20000);
    params.top_k = 0;
    ExpectDistribution(logits, params, 20000);
  }
}

TEST(Sampling, AllEqualLogitsAreUniformAndCutByIdOrder) {
  const std::vector<float> logits(200, -3.5f);
  SamplingParams params;
  ExpectDistribution(logits, params, 20000);
  params.top_k = 5;
  ExpectDistribution(logits, params, 5000);
  params.top_k = 0;
  params.top_p = 0.1f;
  ExpectDistribution(logits, params, 5000);
}

TEST(Sampling, IsTheSameOnEveryInstructionSet) {
  const Isa before = CpuIsa();
  const std::vector<float> logits = RandomLogits(129280, 3, 2);
  for (const float top_p : {1.0f, 0.9f}) {
    for (const int top_k : {0, 50, 3000}) {
      std::map<Isa, std::vector<TokenId>> tokens;
      for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
        if (!SetCpuIsa(isa)) continue;
        SamplingParams params;
        params.top_p = top_p;
        params.top_k = top_k;
        params.seed = 99;
        for (int step = 0; step < 40; ++step) {
          tokens[isa].push_back(SampleCopy(logits, params, step));
        }
        EXPECT_EQ(tokens[isa], tokens.begin()->second) << IsaName(isa);
      }
    }
  }
  SetCpuIsa(before);
}

TEST(Sampling, DrawsOfOneSeedArePinned) {
  std::vector<float> logits(1000);
  for (int i = 0; i < 1000; ++i) logits[i] = static_cast<float>((i * 37) % 101) * 0.0625f;
  SamplingParams params;
  params.seed = 1234;
  std::vector<TokenId> tokens;
  for (int step = 0; step < 8; ++step) tokens.push_back(SampleCopy(logits, params, step));
  EXPECT_EQ(tokens, (std::vector<TokenId>{857, 117, 988, 139, 924, 199, 666, 434}));
}

TEST(Sampling, GreedyIsTheFirstMaximumOfThePenalisedLogits) {
  std::vector<float> logits = RandomLogits(129280, 1, 3);
  logits[70000] = logits[70001] = logits[129279] = 9;
  SamplingParams params;
  for (const float temperature : {0.0f, -1.0f, kNan, 1e-30f}) {
    params.temperature = temperature;
    const TokenId token = SampleCopy(logits, params, 0);
    if (temperature == 1e-30f) {
      EXPECT_TRUE(token == 70000 || token == 70001 || token == 129279);
    } else {
      EXPECT_EQ(token, 70000);
    }
  }
  params.temperature = 0;
  params.logit_bias = {{123, 100.0f}};
  EXPECT_EQ(SampleCopy(logits, params, 0), 123);
  params.logit_bias = {{70000, -100.0f}, {-5, 100.0f}, {129280, 100.0f}};
  EXPECT_EQ(SampleCopy(logits, params, 0), 70001);
  const TokenId banned[] = {70000, 70001, -1, 129280};
  params.logit_bias = {{70000, 100.0f}};  // a ban outweighs a bias
  EXPECT_EQ(SampleCopy(logits, params, 0, {}, banned), 129279);
}

TEST(Sampling, PenaltiesFollowTheirFormulas) {
  std::vector<float> logits{2.0f, -2.0f, 2.0f, 2.0f};
  SamplingParams params;
  params.temperature = 0;
  params.repetition_penalty = 2.0f;
  params.frequency_penalty = 0.25f;
  params.presence_penalty = 0.5f;
  const TokenCount counts[] = {{0, 3, 0}, {1, 0, 2}, {2, 0, 0}};
  SamplingArgs args;
  args.logits = logits;
  args.params = &params;
  args.counts = counts;
  EXPECT_EQ(Sample(args), 2);
  EXPECT_EQ(logits, (std::vector<float>{1.0f, -5.0f, 2.0f, 2.0f}));
}

TEST(Sampling, TopPZeroAndTopKOneAndMinPOneAreArgMax) {
  const std::vector<float> logits = RandomLogits(3000, 1, 4);
  const auto best =
      static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  for (int step = 0; step < 50; ++step) {
    SamplingParams params;
    params.temperature = 50;
    params.top_p = 0;
    EXPECT_EQ(SampleCopy(logits, params, step), best);
    params.top_p = 1;
    params.top_k = 1;
    EXPECT_EQ(SampleCopy(logits, params, step), best);
    params.top_k = 0;
    params.min_p = 1;
    EXPECT_EQ(SampleCopy(logits, params, step), best);
  }
}

TEST(Sampling, ExtremeTemperaturesStayInTheSupport) {
  std::vector<float> logits = RandomLogits(300, 1, 5);
  for (size_t i = 100; i < logits.size(); ++i) logits[i] = i % 2 ? -kInf : kNan;
  for (const float temperature : {1e-45f, 1e-38f, 1e-3f, 1e3f, 1e38f, kInf}) {
    for (const int top_k : {0, 7, 1000}) {
      for (int step = 0; step < 30; ++step) {
        SamplingParams params;
        params.temperature = temperature;
        params.top_k = top_k;
        params.top_p = step % 2 ? 1.0f : 0.9f;
        EXPECT_LT(SampleCopy(logits, params, step), 100);
      }
    }
  }
  SamplingParams params;  // an infinite temperature is uniform over what is left
  params.temperature = kInf;
  std::vector<int> hits(100);
  for (int step = 0; step < 5000; ++step) ++hits[SampleCopy(logits, params, step)];
  EXPECT_GT(*std::min_element(hits.begin(), hits.end()), 15);
}

TEST(Sampling, InfiniteLogitsShareTheProbability) {
  std::vector<float> logits(100, 1.0f);
  logits[17] = logits[40] = logits[90] = kInf;
  std::map<TokenId, int> hits;
  SamplingParams params;
  for (int step = 0; step < 3000; ++step) ++hits[SampleCopy(logits, params, step)];
  EXPECT_EQ(hits.size(), 3u);
  EXPECT_GT(hits[17], 900);
  EXPECT_GT(hits[40], 900);
  EXPECT_GT(hits[90], 900);
  params.top_k = 2;
  for (int step = 0; step < 50; ++step) EXPECT_NE(SampleCopy(logits, params, step), 90);
  params.top_p = 0.4f;
  for (int step = 0; step < 50; ++step) EXPECT_EQ(SampleCopy(logits, params, step), 17);
}

TEST(Sampling, NothingAboveMinusInfinityFallsBack) {
  SamplingParams params;
  const TokenId some[] = {3, 0, 1};
  EXPECT_EQ(SampleCopy(std::vector<float>(5, -kInf), params, 0, {}, some), 2);
  EXPECT_EQ(SampleCopy(std::vector<float>(5, kNan), params, 0), 0);
  const TokenId all[] = {0, 1, 2, 3, 4, 4, 2};
  EXPECT_EQ(SampleCopy(std::vector<float>(5, 1.0f), params, 0, {}, all), 0);
}

RC_GTEST_PROP(Sampling, StaysInTheExactSupport, ()) {
  const auto n = *rc::gen::inRange<size_t>(1, 700);
  std::vector<float> logits(n);
  const int grid = *rc::gen::element(1, 3, 50);  // few values give many ties
  for (float& l : logits) l = static_cast<float>(*rc::gen::inRange(-grid, grid + 1)) * 0.25f;
  SamplingParams params;
  params.temperature = *rc::gen::element(0.5f, 1.0f, 4.0f);
  params.top_k = *rc::gen::inRange(-1, 800);
  params.top_p = *rc::gen::element(0.1f, 0.5f, 0.93f, 1.0f);
  params.min_p = *rc::gen::element(0.0f, 0.03f, 0.5f);
  params.seed = *rc::gen::arbitrary<uint64_t>();
  std::vector<double> p = Exact(logits, params);
  if (params.top_p < 1) {  // the oracle's cut may differ by one token where sums round
    SamplingParams wider = params;
    wider.top_p = params.top_p + 1e-5f;
    p = Exact(logits, wider);
  }
  for (uint64_t step = 0; step < 8; ++step) {
    const TokenId token = SampleCopy(logits, params, step);
    RC_ASSERT(token >= 0 && static_cast<size_t>(token) < n);
    RC_ASSERT(p[token] > 0);
    RC_ASSERT(SampleCopy(logits, params, step) == token);
  }
}

RC_GTEST_PROP(Logprobs, MatchASortInDouble, ()) {
  const auto n = *rc::gen::inRange<size_t>(1, 600);
  std::vector<float> logits(n);
  for (float& l : logits) {
    l = *rc::gen::weightedOneOf<float>(
        {{20, rc::gen::map(rc::gen::inRange(-400, 400), [](int v) { return 0.05f * v; })},
         {1, rc::gen::element(-kInf, kNan)}});
  }
  const auto token = *rc::gen::inRange<TokenId>(0, static_cast<TokenId>(n));
  const int top = *rc::gen::inRange(0, 25);
  const auto result = Logprobs(logits, token, top);

  auto value = [&](size_t i) { return std::isnan(logits[i]) ? -kInf : logits[i]; };
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return value(a) > value(b); });
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += std::exp(double{value(i)} - value(order[0]));
  RC_ASSERT(result.size() == 1 + std::min<size_t>(top, n));
  for (size_t i = 0; i < result.size(); ++i) {
    const auto id = static_cast<size_t>(result[i].token);
    const auto place = std::find(order.begin(), order.end(), id) - order.begin();
    RC_ASSERT(id == (i == 0 ? static_cast<size_t>(token) : order[i - 1]));
    RC_ASSERT(result[i].rank == place + 1);
    if (value(id) == -kInf) {
      RC_ASSERT(result[i].logprob == -kInf);
    } else {
      const double exact = double{value(id)} - value(order[0]) - std::log(sum);
      RC_ASSERT(std::fabs(result[i].logprob - exact) < 2e-6 * (1 + std::fabs(exact)));
    }
  }
}

}  // namespace
}  // namespace fathom::ops
