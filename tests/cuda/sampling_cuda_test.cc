#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "cuda/device_memory.h"
#include "ops/sampling/cuda.h"

namespace fathom::ops {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Rows with settings and lists of their own.
struct Batch {
  int64_t vocabulary;
  std::vector<float> logits;
  std::vector<SamplingParams> params;
  std::vector<std::vector<TokenCount>> counts;
  std::vector<std::vector<TokenId>> banned;
  std::vector<SamplingRow> rows;

  void Add(const SamplingParams& setting) { params.push_back(setting); }

  // After all rows are there: pointers stay.
  void Finish(uint64_t step) {
    counts.resize(params.size());
    banned.resize(params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      rows.push_back({static_cast<int32_t>(params.size() - 1 - i), &params[i], counts[i], banned[i],
                      step + i});
    }
  }
};

// level 0: no two alike; else logits are rounded so that many are.
std::vector<float> Logits(int64_t n, float spread, float level, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> logits(static_cast<size_t>(n));
  for (float& l : logits) {
    l = normal(random);
    if (level > 0) l = std::round(l / level) * level;
  }
  return logits;
}

void ExpectTheSame(const Batch& batch, int64_t at_once) {
  const auto count = std::ssize(batch.rows);
  auto host = batch.logits;
  std::vector<SampledToken> want(batch.rows.size()), got(batch.rows.size());
  SampleBatchReference({F32Matrix(host.data(), count, batch.vocabulary), batch.rows, want.data()});
  const DeviceArray<float> logits(batch.logits);
  const int64_t bytes = SampleCudaScratchBytes(at_once, batch.vocabulary);
  const DeviceArray<uint8_t> scratch(bytes);
  void* pinned = nullptr;
  FATHOM_CUDA_CHECK(cudaMallocHost(&pinned, static_cast<size_t>(bytes)));
  SampleBatchCuda({F32Matrix(logits.data(), count, batch.vocabulary), batch.rows, got.data()},
                  at_once, scratch.data(), pinned, nullptr);
  FATHOM_CUDA_CHECK(cudaFreeHost(pinned));
  for (size_t i = 0; i < got.size(); ++i) {
    const SamplingParams& p = *batch.rows[i].params;
    EXPECT_EQ(got[i].token, want[i].token)
        << "vocabulary " << batch.vocabulary << ", row " << i << ", temperature " << p.temperature
        << ", top_k " << p.top_k << ", top_p " << p.top_p << ", min_p " << p.min_p;
    if (std::isfinite(want[i].logit)) {
      EXPECT_EQ(got[i].logit, want[i].logit) << i;
    } else {
      EXPECT_FALSE(std::isfinite(got[i].logit)) << i;
    }
  }
}

TEST(SamplingCuda, IsTheReferenceForEverySetting) {
  FATHOM_NEEDS_DEVICE();
  for (const int64_t vocabulary : {1, 7, 300, 4096, 129280}) {
    for (const float level : {0.0f, 0.25f, 2.0f}) {
      Batch batch{.vocabulary = vocabulary};
      uint64_t seed = 1;
      for (const float temperature : {0.0f, 0.3f, 1.0f, 5.0f}) {
        for (const int top_k : {0, 1, 2, 50, 100'000}) {
          for (const float top_p : {1.0f, 0.95f, 0.5f, 0.0f}) {
            for (const float min_p : {0.0f, 0.05f}) {
              batch.Add({.temperature = temperature,
                         .top_p = top_p,
                         .top_k = top_k,
                         .min_p = min_p,
                         .seed = seed++});
            }
          }
        }
      }
      batch.logits = Logits(vocabulary * std::ssize(batch.params), 3, level, seed);
      batch.Finish(17);
      ExpectTheSame(batch, 64);  // in several launches
    }
  }
}

// Every pass of the kernel, for few tokens.
TEST(SamplingCuda, SmallVocabulary) {
  FATHOM_NEEDS_DEVICE();
  Batch batch{.vocabulary = 300};
  batch.Add({.temperature = 0.0f, .seed = 1});
  batch.Add({.temperature = 1.0f, .min_p = 0.05f, .seed = 2});
  batch.Add({.temperature = 1.0f, .top_p = 0.9f, .top_k = 20, .seed = 3});
  batch.params.back().logit_bias = {{7, 2.0f}, {7, 1.0f}, {299, -1.0f}};
  batch.params.back().repetition_penalty = 1.3f;
  batch.logits = Logits(300 * std::ssize(batch.params), 2, 0.5f, 3);
  batch.counts = {{}, {}, {{7, 1, 2}, {120, 0, 1}}};
  batch.banned = {{}, {5}, {9, 200}};
  batch.Finish(3);
  ExpectTheSame(batch, 4);
}

TEST(SamplingCuda, BiasPenaltiesAndBansComeInOrder) {
  FATHOM_NEEDS_DEVICE();
  constexpr int64_t kVocabulary = 5'000;
  std::mt19937_64 random(5);
  Batch batch{.vocabulary = kVocabulary};
  for (int i = 0; i < 30; ++i) {
    SamplingParams params{.temperature = i % 3 == 0 ? 0.0f : 1.0f, .top_p = 0.9f};
    params.repetition_penalty = i % 2 == 0 ? 1.3f : 1.0f;
    params.frequency_penalty = i % 5 == 0 ? 0.4f : 0.0f;
    params.presence_penalty = i % 7 == 0 ? -0.7f : 0.0f;
    params.seed = static_cast<uint64_t>(i);
    for (int k = 0; k < 40; ++k) {  // of few tokens, so that some come again; some are outside
      const auto token = static_cast<TokenId>(random() % 20 * 300) - 300;
      params.logit_bias.emplace_back(token, static_cast<float>(random() % 100) / 10 - 5);
    }
    batch.Add(params);
  }
  batch.logits = Logits(kVocabulary * std::ssize(batch.params), 2, 0, 3);
  batch.counts.resize(batch.params.size());
  batch.banned.resize(batch.params.size());
  for (size_t i = 0; i < batch.params.size(); ++i) {
    for (TokenId token = 0; token < kVocabulary + 10; token += 1 + static_cast<TokenId>(i)) {
      batch.counts[i].push_back(
          {token, static_cast<int32_t>(random() % 2), static_cast<int32_t>(random() % 3)});
    }
    for (int k = 0; k < 100; ++k) {
      batch.banned[i].push_back(static_cast<TokenId>(random() % (kVocabulary + 10)));
    }
  }
  batch.Finish(3);
  ExpectTheSame(batch, 64);
}

TEST(SamplingCuda, InfinitiesAndNansAreAsInTheReference) {
  FATHOM_NEEDS_DEVICE();
  constexpr int64_t kVocabulary = 1'000;
  Batch batch{.vocabulary = kVocabulary};
  for (int i = 0; i < 24; ++i) {
    batch.Add({.temperature = i % 2 == 0 ? 1.0f : 0.0f,
               .top_p = i % 3 == 0 ? 0.5f : 1.0f,
               .top_k = i % 4 == 0 ? 3 : 0,
               .seed = static_cast<uint64_t>(i)});
  }
  batch.logits = Logits(kVocabulary * std::ssize(batch.params), 2, 0.5f, 3);
  batch.banned.resize(batch.params.size());
  for (size_t i = 0; i < batch.params.size(); ++i) {
    float* row = batch.logits.data() + (batch.params.size() - 1 - i) * kVocabulary;
    switch (i / 4) {
      case 0: std::fill(row, row + kVocabulary, -kInf); break;
      case 1: std::fill(row, row + kVocabulary, NAN); break;
      case 2:
        for (int k = 0; k < 10; ++k) row[97 * k] = kInf;
        break;
      case 3:
        for (int k = 0; k < kVocabulary; ++k)
          row[k] = k % 3 == 0 ? -kInf : k % 3 == 1 ? NAN : -0.0f;
        break;
      case 4:
        std::fill(row, row + kVocabulary, -kInf);
        row[999] = 1;
        break;
      default: row[500] = NAN; break;
    }
    batch.banned[i] = {0, 1, 3};
  }
  batch.Finish(0);
  ExpectTheSame(batch, 24);
}

}  // namespace
}  // namespace fathom::ops
