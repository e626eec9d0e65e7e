// Golden runs: Fathom against transformers' float32 outputs, for every way of cutting a prompt.
//
// FATHOM_LONG=1 also cuts the two longest prompts into the smallest chunks.
#include <gtest/gtest.h>

#include <algorithm>

#include "golden/checks.h"

namespace fathom::golden {
namespace {

TEST(Golden, DemoReferenceMatchesTransformersForEveryChunkSize) {
  CheckReference(Demo(), 0.0);
}

TEST(Golden, RandomProReferenceMatchesTransformersForEveryChunkSize) {
  Model* model = RandomPro();
  if (model == nullptr) GTEST_SKIP() << "shared fixture models/random-pro is not here";
  CheckReference(*model, 0.05);
}

TEST(Golden, ProductModeGivesTheSameGreedyTextWithEveryCache) {
  CheckGreedyText(Demo());
}

TEST(Golden, DemoRowsStatesAndLogitsAreBitIdenticalForEveryChunking) {
  std::vector<TokenId> ids = Demo().prompts[3].prompt;  // past 4 * top_k, so selection is at work
  ids.resize(std::min<size_t>(ids.size(), 1371));
  CheckChunkIndependence(Demo(), ids);
}

TEST(Golden, RandomProRowsStatesAndLogitsAreBitIdenticalForEveryChunking) {
  Model* model = RandomPro();
  if (model == nullptr) GTEST_SKIP() << "shared fixture models/random-pro is not here";
  CheckChunkIndependence(*model, model->prompts.back().prompt);
}

TEST(Golden, StaleCacheMemoryIsNeverRead) {
  CheckStaleMemory(Demo());
}

}  // namespace
}  // namespace fathom::golden
