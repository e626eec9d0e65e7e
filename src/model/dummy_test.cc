#include "model/dummy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "model/finite_check.h"
#include "model/testing.h"
#include "model/weights.h"

namespace fathom {
namespace {

ModelConfig DemoConfig() {
  auto config = LoadModelConfig(testing::DemoDirectory());
  EXPECT_TRUE(config);
  return *config;
}

std::string Bytes(const TensorInfo& tensor) {
  return {reinterpret_cast<const char*>(tensor.data), static_cast<size_t>(tensor.bytes)};
}

TensorSet Make(ModelConfig config, uint64_t seed, int threads) {
  ThreadPool pool(threads);
  auto set = DummyTensors(config, seed, pool);
  EXPECT_TRUE(set);
  return std::move(*set);
}

TEST(DummyTensors, AreTheSameForAnyNumberOfThreads) {
  const TensorSet one = Make(DemoConfig(), 7, 1);
  for (const int threads : {2, 5}) {
    const TensorSet many = Make(DemoConfig(), 7, threads);
    ASSERT_EQ(one.tensors.size(), many.tensors.size());
    for (const auto& [name, tensor] : one.tensors) {
      ASSERT_EQ(Bytes(tensor), Bytes(many.Get(name))) << name;
    }
  }
}

TEST(DummyTensors, DependOnSeedAndNameAlone) {
  const TensorSet a = Make(DemoConfig(), 7, 2);
  const TensorSet b = Make(DemoConfig(), 8, 2);
  for (const auto& [name, tensor] : a.tensors) {
    if (tensor.bytes >= 64) {
      EXPECT_NE(Bytes(tensor), Bytes(b.Get(name))) << name;
    }
  }
  EXPECT_NE(Bytes(a.Get("layers.0.attn.wq_a.weight")), Bytes(a.Get("layers.1.attn.wq_a.weight")));
  ModelConfig shorter = DemoConfig();
  shorter.num_layers = 3;
  shorter.compress_ratios.resize(3);
  const TensorSet c = Make(shorter, 7, 2);
  for (const auto& [name, tensor] : c.tensors) {
    EXPECT_EQ(Bytes(tensor), Bytes(a.Get(name))) << name;
  }
}

TEST(DummyTensors, HaveTheShapesOfTheRealCheckpoint) {
  ModelConfig config = DemoConfig();
  ThreadPool pool(1);
  const auto real = OpenCheckpoint(testing::DemoDirectory(), config);
  const auto dummy = DummyTensors(config, 0, pool);
  ASSERT_TRUE(real && dummy);
  EXPECT_EQ(real->tensor_count, dummy->tensor_count);
  EXPECT_EQ(real->total_bytes, dummy->total_bytes);
  ASSERT_EQ(real->tensors.size(), dummy->tensors.size());
  for (const auto& [name, tensor] : real->tensors) {
    EXPECT_EQ(tensor.dtype, dummy->Get(name).dtype) << name;
    EXPECT_EQ(tensor.shape, dummy->Get(name).shape) << name;
  }
}

TEST(DummyTensors, AreFiniteAndRouteToDistinctExperts) {
  const ModelConfig config = DemoConfig();
  const TensorSet set = Make(config, 3, 2);
  std::vector<const TensorInfo*> all;
  for (const auto& [name, tensor] : set.tensors) all.push_back(&tensor);
  ThreadPool pool(2);
  EXPECT_TRUE(CheckFinite(all, pool));

  const auto* ids = reinterpret_cast<const int64_t*>(set.Get("layers.1.ffn.gate.tid2eid").data);
  std::vector<int> uses(static_cast<size_t>(config.num_experts));
  for (int64_t token = 0; token < config.vocab_size; ++token) {
    std::set<int64_t> row(ids, ids + config.experts_per_token);
    EXPECT_EQ(static_cast<int>(row.size()), config.experts_per_token);
    for (const int64_t e : row) ++uses.at(static_cast<size_t>(e));
    ids += config.experts_per_token;
  }
  const double mean =
      static_cast<double>(config.vocab_size) * config.experts_per_token / config.num_experts;
  for (const int n : uses) EXPECT_NEAR(n, mean, 0.15 * mean);
}

TEST(DummyTensors, MatricesHaveRmsNearOneOverRootIn) {
  testing::TemporaryDirectory dir;
  testing::WriteAll(dir / "config.json",
                    testing::ReadAll(testing::DemoDirectory() + "/config.json"));
  ModelConfig config = DemoConfig();
  const auto weights = LoadWeights(dir.path(), config, {.format = LoadFormat::kDummy});
  ASSERT_TRUE(weights) << weights.error().message;
  const LayerWeights& layer = weights->layers[1];
  for (const ops::LinearWeight* w :
       {&layer.wq_a, &layer.wq_b, &layer.wo_a, &layer.wo_b, &layer.compressor.wkv, &layer.gate,
        &layer.experts[3].w1, &layer.experts[3].w2, &layer.shared.w2, &weights->head}) {
    double sum = 0;
    for (int64_t o = 0; o < w->out; ++o) {
      for (int64_t i = 0; i < w->in; ++i) {
        const double value = ops::WeightAt(*w, o, i);
        sum += value * value;
      }
    }
    const double rms = std::sqrt(sum / static_cast<double>(w->out * w->in));
    // Scales are powers of two, and half of them one step lower.
    EXPECT_GT(rms * std::sqrt(w->in), 0.45);
    EXPECT_LT(rms * std::sqrt(w->in), 1.45);
  }
  double mean = 0;
  for (const float x : layer.attn_norm) mean += x;
  EXPECT_NEAR(mean / static_cast<double>(layer.attn_norm.size()), 1.0, 0.02);
}

TEST(DummyTensors, CountDraftersWithoutMakingThem) {
  ModelConfig config = testing::TinyConfig();
  config.num_mtp_layers = 1;
  const TensorSet set = Make(config, 0, 1);
  EXPECT_EQ(set.tensor_count, static_cast<int64_t>(set.tensors.size()) + 39 + 6 * 2);
}

}  // namespace
}  // namespace fathom
