// The golden runs of tests/golden on the device.
#include <algorithm>

#include "cuda/device_memory.h"
#include "golden/checks.h"

namespace fathom::golden {
namespace {

TEST(GoldenCuda, DemoReferenceMatchesTransformersForEveryChunkSize) {
  FATHOM_NEEDS_DEVICE();
  CheckReference(Demo(Device::kCuda), 0.0);
}

TEST(GoldenCuda, RandomProReferenceMatchesTransformersForEveryChunkSize) {
  FATHOM_NEEDS_DEVICE();
  Model* model = RandomPro(Device::kCuda);
  if (model == nullptr) GTEST_SKIP() << "shared fixture models/random-pro is not here";
  CheckReference(*model, 0.05);
}

TEST(GoldenCuda, ProductModeGivesTheSameGreedyTextWithEveryCache) {
  FATHOM_NEEDS_DEVICE();
  CheckGreedyText(Demo(Device::kCuda));
}

TEST(GoldenCuda, DemoRowsStatesAndLogitsAreBitIdenticalForEveryChunking) {
  FATHOM_NEEDS_DEVICE();
  Model& model = Demo(Device::kCuda);
  std::vector<TokenId> ids = model.prompts[3].prompt;  // past 4 * top_k, so selection is at work
  ids.resize(std::min<size_t>(ids.size(), 1371));
  CheckChunkIndependence(model, ids);
}

TEST(GoldenCuda, RandomProRowsStatesAndLogitsAreBitIdenticalForEveryChunking) {
  FATHOM_NEEDS_DEVICE();
  Model* model = RandomPro(Device::kCuda);
  if (model == nullptr) GTEST_SKIP() << "shared fixture models/random-pro is not here";
  CheckChunkIndependence(*model, model->prompts.back().prompt);
}

TEST(GoldenCuda, StaleCacheMemoryIsNeverRead) {
  FATHOM_NEEDS_DEVICE();
  CheckStaleMemory(Demo(Device::kCuda));
}

}  // namespace
}  // namespace fathom::golden
