// The /metrics page: Prometheus text under vLLM's names. Gauges and totals are read from the engine
// when the page is asked for; latencies are observed by the io threads. Thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "api/engine_metrics.h"
#include "engine/engine.h"

namespace fathom {

class Metrics {
 public:
  // `prefix` replaces "vllm:"; the engine must outlive the object.
  Metrics(const std::string& prefix, const std::string& model_name, const Engine& engine,
          std::vector<ExtraCounter> extra = {});
  ~Metrics();

  void ObserveFirstToken(double seconds);  // from the request's arrival
  void ObserveInterToken(double seconds);  // between two deliveries of one choice
  void ObserveEndToEnd(double seconds);    // of a whole request
  // A finished choice: seconds from its first to its last token, which were so many.
  void ObserveDecode(double seconds, int64_t tokens);
  void ObserveSizes(int64_t prompt_tokens, int64_t generated_tokens);
  void CountFinished(const std::string& reason);  // stop, length, abort, error

  std::string Text() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fathom
