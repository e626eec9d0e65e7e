#include "model/weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "core/thread_pool.h"

namespace fathom {
namespace {

std::string Demo() {
  return FATHOM_SOURCE_DIR "/models/demo";
}

std::string Shared(const std::string& path) {
  const char* shared = std::getenv("FATHOM_SHARED");
  return std::string(shared ? shared : FATHOM_SOURCE_DIR "/../shared") + "/" + path;
}

Weights Load(const std::string& directory, const LoadOptions& options = {}) {
  auto config = LoadModelConfig(directory);
  EXPECT_TRUE(config) << config.error().message;
  auto weights = LoadWeights(directory, *config, options);
  EXPECT_TRUE(weights) << weights.error().message;
  return std::move(*weights);
}

TEST(LoadWeights, BindsEveryTensorOfTheDemoCheckpoint) {
  Weights w = Load(Demo());
  EXPECT_EQ(w.tensor_count, 509);
  EXPECT_EQ(w.total_bytes, 21272124);
  ASSERT_EQ(w.layers.size(), 6u);
  EXPECT_EQ(w.head.out, 4096);
  EXPECT_EQ(w.head.in, 256);
  EXPECT_EQ(w.norm.size(), 256u);
  EXPECT_EQ(w.hc_head.site.mixes, 4);
  EXPECT_EQ(w.layers[0].compressor.wkv.data, nullptr);
  EXPECT_EQ(w.layers[1].compressor.ape.size(), 4u * 1024);
  EXPECT_EQ(w.layers[2].compressor.ape.size(), 128u * 512);
  EXPECT_EQ(w.layers[1].index_wq_b.out, 8 * 128);
  EXPECT_NE(w.layers[1].tid2eid, nullptr);
  EXPECT_EQ(w.layers[2].tid2eid, nullptr);
  EXPECT_EQ(w.layers[2].gate_bias.size(), 8u);
  EXPECT_EQ(w.layers[5].experts[7].w2.format, ops::WeightFormat::kFp4Block32);
  EXPECT_EQ(w.layers[5].experts[7].w2.in, 256);
  EXPECT_EQ(w.layers[5].shared.w1.format, ops::WeightFormat::kFp8Block128);
}

TEST(LoadWeights, BindsEveryTensorOfTheProLikeCheckpoint) {
  Weights w = Load(Shared("models/random-pro"));
  EXPECT_EQ(w.tensor_count, 762);
  EXPECT_EQ(w.total_bytes, 26238176);
  EXPECT_EQ(w.layers[0].wo_a.out, 4 * 96);
  EXPECT_EQ(w.layers[0].wo_a.in, 1024);
}

}  // namespace
}  // namespace fathom
