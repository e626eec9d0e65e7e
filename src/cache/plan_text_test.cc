#include "cache/plan_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "cache/plan_testing.h"
#include "cache/what_if.h"

namespace fathom {
namespace {

using ::testing::HasSubstr;
using testing::kMillion;
using ::testing::Not;

class PlanTextTest : public testing::PlanTest {
 protected:
  static std::string Text(const std::string& model, const PlanRequest& request,
                          const std::vector<std::string>& compare = {}) {
    const ModelConfig config = Config(model);
    const MemoryPlan plan = Plan(model, request);
    std::vector<Comparison> comparisons;
    for (const std::string& name : compare) {
      comparisons.push_back(*Compare(name, config, plan.sequence, plan.request.context));
    }
    return PlanText(model, config, plan, comparisons);
  }
};

size_t WidestLine(const std::string& text) {
  std::istringstream lines(text);
  size_t widest = 0;
  for (std::string line; std::getline(lines, line);) widest = std::max(widest, line.size());
  return widest;
}

TEST_F(PlanTextTest, SaysThePublishedNumbersInBytesAndGib) {
  const std::string text = Text(
      "v4-pro", {.cache = {.kv = KvDType::kBf16, .index = IndexDType::kBf16}, .context = kMillion},
      {"v3.2", "mha"});
  for (const char* part :
       {"10,326,376,448 B    9.617 GiB  9848 B a token", "90,060,095,488 B   83.875 GiB",
        "8.71 times (8.72 without windows)", "864,704,792,696 B", "262,144 rows of each CSA layer",
        "0 SWA, 30 CSA/c4a, 31 HCA/c128a"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  // A known wrong derivation (5,120 channels an entry) would print these.
  for (const char* part : {"73.7", "1310", "1,310 GiB", "71.4", "7.66 times"}) {
    EXPECT_THAT(text, Not(HasSubstr(part)));
  }
}

TEST_F(PlanTextTest, EveryLineFitsATerminal) {
  for (const char* model : {"v4-flash", "v4-pro-0813"}) {
    EXPECT_LE(WidestLine(Text(model, {}, {"v3.2", "mha"})), 100u);
    EXPECT_LE(WidestLine(Text(model, {.gpus = 8, .memory = int64_t{80} << 30})), 100u);
    EXPECT_LE(WidestLine(Text(model, {.memory = int64_t{24} << 30})), 100u);
    const WhatIf what_if = *MakeWhatIf(Config(model), {.memory = int64_t{141} << 30});
    EXPECT_LE(WidestLine(WhatIfText(what_if)), 100u);
  }
}

TEST_F(PlanTextTest, SaysWhatIsMissingAndWhatWouldFit) {
  const std::string card = Text("v4-flash", {.memory = int64_t{24} << 30});
  EXPECT_THAT(card, HasSubstr("does not fit: "));
  EXPECT_THAT(card, HasSubstr("would have to be offloaded"));
  EXPECT_THAT(card, HasSubstr("would fit with --gpus 16\n"));
  const std::string cache =
      Text("v4-flash", {.cache = {.kv = KvDType::kBf16, .index = IndexDType::kBf16},
                        .cache_memory = int64_t{6} << 30});
  EXPECT_THAT(cache, HasSubstr("would fit with --kv-cache-dtype fp8"));
  EXPECT_THAT(cache, HasSubstr("--max-model-len "));
  const std::string fits = Text("v4-flash", {.gpus = 4, .memory = int64_t{80} << 30});
  EXPECT_THAT(fits, HasSubstr("TP 1, EP 4"));
  EXPECT_THAT(fits, HasSubstr("\nfits: "));
}

TEST_F(PlanTextTest, EveryProposalFits) {
  const ModelConfig config = Config("v4-flash");
  for (const int64_t gib : {1, 3, 4, 6, 155, 160, 165}) {
    PlanRequest request{.cache = {.kv = KvDType::kBf16, .index = IndexDType::kFp8},
                        .sequences = 2,
                        .step_tokens = 8'192};
    (gib < 100 ? request.cache_memory : request.memory) = gib << 30;
    const MemoryPlan plan = *PlanMemory(config, request);
    if (plan.fits()) continue;
    const PlanRemedies remedies = Remedies(config, plan);
    EXPECT_FALSE(remedies.changes.empty()) << gib;
    PlanRequest all = plan.request;
    for (const PlanAdvice& advice : remedies.changes) {
      PlanRequest changed = plan.request;
      for (PlanRequest* to : {&changed, &all}) {
        const std::string& flag = advice.flag;
        if (flag == "--kv-cache-dtype") to->cache.kv = KvDType::kFp8;
        else if (flag == "--attention-config.indexer_kv_dtype")
          to->cache.index = IndexDType::kMxfp4;
        else if (flag == "--max-num-seqs") to->slots = std::stoi(advice.value);
        else if (flag == "--max-num-batched-tokens") to->step_tokens = std::stoi(advice.value);
        else if (flag == "--max-model-len") to->context = std::stoll(advice.value);
        else if (flag == "--gpus") to->gpus = std::stoi(advice.value);
        else ADD_FAILURE() << flag;
      }
      if (!remedies.together) {
        EXPECT_TRUE(PlanMemory(config, changed)->fits()) << gib << advice.flag;
      }
    }
    EXPECT_TRUE(PlanMemory(config, all)->fits()) << gib;
  }
}

TEST_F(PlanTextTest, BlockSizesWithTheirPagesAndPadding) {
  const WhatIf what_if = *MakeWhatIf(Config("v4-flash"), {});
  ASSERT_EQ(what_if.block_sizes.size(), 24u);
  for (const BlockSizeLine& line : what_if.block_sizes) {
    EXPECT_LE(line.page_sizes, 3);
    EXPECT_EQ(line.hit_granularity, line.cache.block_tokens);
    EXPECT_EQ(line.tail_waste, line.cache.block_tokens - 1);
  }
  const std::string text = WhatIfText(what_if);
  for (const char* row : {// 512 tokens: twice the rows a page, half the pages.
                          "     512  fp8/fp8      74,880   17,280   2,880  1,992,960   21,632   "
                          "1.09 %    512        511",
                          "     256  fp8/fp8      37,440    8,640   1,728  1,002,240   16,576   "
                          "1.65 %    256        255",
                          "     256  fp8/mxfp4    37,440    4,608   1,728    917,568   17,920   "
                          "1.95 %    256        255"}) {
    EXPECT_THAT(text, HasSubstr(row));
  }
}

TEST_F(PlanTextTest, WhatIfNeverShowsContextsTheModelDoesNotHave) {
  ModelConfig config = Config("v4-flash");
  config.max_position_embeddings = 40'000;
  const WhatIf what_if = *MakeWhatIf(config, {});
  for (const BatchLine& line : what_if.batches) EXPECT_LE(line.context, 40'000);
  config.max_position_embeddings = 1'000;
  EXPECT_EQ((*MakeWhatIf(config, {})).contexts.front().context, 1'000);
}

}  // namespace
}  // namespace fathom
