#include "api/throughput_log.h"

#include <gtest/gtest.h>

namespace fathom {
namespace {

TEST(ThroughputLog, TellsWhatRanSinceTheLastLine) {
  ThroughputLog log;
  EngineStats stats;
  stats.blocks_total = 200;
  EXPECT_FALSE(log.Line(stats, 10));
  stats.prompt_tokens = 1000;
  stats.prompt_computed = 250;  // the others were cached
  stats.generation_tokens = 50;
  stats.running = 2;
  stats.waiting = 1;
  stats.blocks_used = 25;
  EXPECT_EQ(log.Line(stats, 10),
            "prompt 25.0 tokens/s and 75.0 cached, generation 5.0 tokens/s, running 2, waiting 1, "
            "blocks 25 of 200 (12.5 %)");
  // Stands still, but is not done.
  EXPECT_EQ(log.Line(stats, 10),
            "prompt 0.0 tokens/s and 0.0 cached, generation 0.0 tokens/s, running 2, waiting 1, "
            "blocks 25 of 200 (12.5 %)");
  // The last tokens are told of though nothing runs any more; then there is silence.
  stats.generation_tokens = 60;
  stats.running = stats.waiting = stats.blocks_used = 0;
  EXPECT_EQ(log.Line(stats, 5),
            "prompt 0.0 tokens/s and 0.0 cached, generation 2.0 tokens/s, running 0, waiting 0, "
            "blocks 0 of 200 (0.0 %)");
  EXPECT_FALSE(log.Line(stats, 5));
}

}  // namespace
}  // namespace fathom
