// The part of the /metrics page that is read from the engine when it is asked for.
#pragma once

#include <prometheus/labels.h>
#include <prometheus/metric_family.h>

#include <functional>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace fathom {

// A counter kept elsewhere, read when the page is asked for, by any thread.
struct ExtraCounter {
  std::string name, help;  // name without prefix, "kv_event_batches_total"
  std::function<double()> read;
};

// Gauges and totals: scheduling, pools by unit and by cache kind, prefix cache, tiers. `prefix`
// stands before every name, `labels` are on every value.
std::vector<prometheus::MetricFamily> EngineMetrics(const EngineStats& stats,
                                                    const Geometry& geometry,
                                                    const std::string& prefix,
                                                    const prometheus::Labels& labels);

std::vector<prometheus::MetricFamily> ExtraMetrics(const std::vector<ExtraCounter>& counters,
                                                   const std::string& prefix,
                                                   const prometheus::Labels& labels);

}  // namespace fathom
