#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "ops/sampling/sampling.h"

namespace fathom::ops {
namespace {

constexpr int64_t kRows = 40, kVocabulary = 500;

std::vector<float> RandomRows(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(kRows * kVocabulary);
  for (float& l : logits) l = normal(random);
  return logits;
}

TEST(SampleBatch, IsSampleRowByRow) {
  std::vector<SamplingParams> params(kRows);
  std::vector<SamplingRow> rows;
  const std::vector<TokenCount> counts = {{3, 1, 0}, {7, 0, 2}};
  const std::vector<TokenId> banned = {0, 1, 2};
  for (int32_t r = kRows - 1; r >= 0; r -= 2) {  // in any order, not all of them
    SamplingParams& p = params[static_cast<size_t>(r)];
    p.temperature = 0.5f * static_cast<float>(r % 3);
    p.top_p = r % 4 == 0 ? 0.7f : 1.0f;
    p.seed = static_cast<uint64_t>(r);
    p.presence_penalty = r % 5 == 0 ? 1.0f : 0.0f;
    rows.push_back({.row = r, .params = &p, .counts = counts, .banned = banned, .step = 9});
  }
  auto want_logits = RandomRows(1);
  std::vector<SampledToken> want;
  for (const SamplingRow& row : rows) {
    const std::span<float> logits(want_logits.data() + row.row * kVocabulary, kVocabulary);
    const TokenId token = Sample({logits, row.params, row.counts, row.banned, row.step});
    want.push_back({token, logits[static_cast<size_t>(token)]});
  }
  ThreadPool pool(3);
  for (const bool reference : {true, false}) {
    auto logits = RandomRows(1);
    std::vector<SampledToken> got(rows.size());
    const SampleBatchArgs args{F32Matrix(logits.data(), kRows, kVocabulary), rows, got.data()};
    if (reference) SampleBatchReference(args);
    else SampleBatchCpu(args, pool);
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(got[i].token, want[i].token) << i;
      EXPECT_EQ(got[i].logit, want[i].logit) << i;
    }
  }
}

TEST(SampleBatch, NoRowsAreNone) {
  ThreadPool pool(2);
  auto logits = RandomRows(2);
  SampleBatchCpu({F32Matrix(logits.data(), kRows, kVocabulary), {}, nullptr}, pool);
  EXPECT_EQ(logits, RandomRows(2));
}

}  // namespace
}  // namespace fathom::ops
