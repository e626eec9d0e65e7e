// What the disk tier counts reaches the page, each value under its own name.
#include "api/engine_metrics.h"

#include <gtest/gtest.h>

#include <map>

#include "engine/testing_executor.h"

namespace fathom {
namespace {

TEST(EngineMetrics, TheDiskTierSpeaksOfAFullDisk) {
  EngineStats stats;
  stats.disk.store.disk_full = 5;
  stats.disk.store.write_pauses = 2;
  stats.disk.store.refused = 3;
  const Geometry geometry = ScriptedGeometry();
  std::map<std::string, double> counters;
  for (const prometheus::MetricFamily& family : EngineMetrics(stats, geometry, "vllm:", {})) {
    for (const prometheus::ClientMetric& metric : family.metric) {
      counters[family.name] = metric.counter.value;
    }
  }
  EXPECT_EQ(counters.at("vllm:cache_disk_full_total"), 5);
  EXPECT_EQ(counters.at("vllm:cache_disk_write_pauses_total"), 2);
  EXPECT_EQ(counters.at("vllm:cache_disk_segments_refused_total"), 3);
}

}  // namespace
}  // namespace fathom
