#include "api/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

namespace fathom {
namespace {

using prometheus::MetricFamily;

// vLLM's bounds, so that dashboards made for it fit.
const prometheus::Histogram::BucketBoundaries kFirstToken = {
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0,   2.5,   5.0,  7.5,  10,   20,   40,   80,  160,  640, 2560};
const prometheus::Histogram::BucketBoundaries kInterToken = {
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.4,   0.5,    0.75,  1.0,  2.5,   5.0,  7.5,   10,  20,   40,  80};
const prometheus::Histogram::BucketBoundaries kEndToEnd = {0.3, 0.5, 0.8, 1.0, 1.5, 2.0,  2.5,
                                                           5.0, 10,  15,  20,  30,  40,   50,
                                                           60,  120, 240, 480, 960, 1920, 7680};
const prometheus::Histogram::BucketBoundaries kTokens = {
    1,    2,    5,      10,     20,     50,      100,     200,     500,      1000,
    2000, 5000, 10'000, 20'000, 50'000, 100'000, 200'000, 500'000, 1'000'000};

}  // namespace

struct Metrics::Impl {
  Impl(const std::string& metric_prefix, const std::string& model_name, const Engine& served,
       std::vector<ExtraCounter> counters)
      : prefix(metric_prefix),
        labels{{"model_name", model_name}, {"engine", "0"}},
        engine(served),
        extra(std::move(counters)) {
    first_token = &Histogram("time_to_first_token_seconds",
                             "Seconds from a request's arrival to its first token.", kFirstToken);
    inter_token =
        &Histogram("inter_token_latency_seconds",
                   "Seconds between two deliveries of tokens of one choice.", kInterToken);
    end_to_end = &Histogram("e2e_request_latency_seconds",
                            "Seconds from a request's arrival to its end.", kEndToEnd);
    decode = &Histogram("request_decode_time_seconds",
                        "Seconds from the first to the last token of a choice.", kEndToEnd);
    per_token =
        &Histogram("request_time_per_output_token_seconds",
                   "Mean seconds per token of a choice, the first one left out.", kInterToken);
    prompt_size = &Histogram("request_prompt_tokens", "Prompt tokens of a request.", kTokens);
    generated_size =
        &Histogram("request_generation_tokens", "Generated tokens of a request.", kTokens);
    success = &prometheus::BuildCounter()
                   .Name(prefix + "request_success_total")
                   .Help("Finished choices by reason.")
                   .Labels(labels)
                   .Register(registry);
    for (const char* reason : {"stop", "length", "abort", "error"}) {
      success->Add({{"finished_reason", reason}});
    }
  }

  prometheus::Histogram& Histogram(const char* name, const char* help,
                                   const prometheus::Histogram::BucketBoundaries& bounds) {
    return prometheus::BuildHistogram()
        .Name(prefix + name)
        .Help(help)
        .Labels(labels)
        .Register(registry)
        .Add({}, bounds);
  }

  std::string prefix;
  prometheus::Labels labels;
  const Engine& engine;
  const std::vector<ExtraCounter> extra;
  prometheus::Registry registry;
  prometheus::Histogram* first_token;
  prometheus::Histogram* inter_token;
  prometheus::Histogram* end_to_end;
  prometheus::Histogram* decode;
  prometheus::Histogram* per_token;
  prometheus::Histogram* prompt_size;
  prometheus::Histogram* generated_size;
  prometheus::Family<prometheus::Counter>* success;
};

Metrics::Metrics(const std::string& prefix, const std::string& model_name, const Engine& engine,
                 std::vector<ExtraCounter> extra)
    : impl_(std::make_unique<Impl>(prefix, model_name, engine, std::move(extra))) {}
Metrics::~Metrics() = default;

void Metrics::ObserveFirstToken(double seconds) {
  impl_->first_token->Observe(seconds);
}
void Metrics::ObserveInterToken(double seconds) {
  impl_->inter_token->Observe(seconds);
}
void Metrics::ObserveEndToEnd(double seconds) {
  impl_->end_to_end->Observe(seconds);
}

void Metrics::ObserveDecode(double seconds, int64_t tokens) {
  impl_->decode->Observe(seconds);
  if (tokens > 1) impl_->per_token->Observe(seconds / static_cast<double>(tokens - 1));
}

void Metrics::ObserveSizes(int64_t prompt_tokens, int64_t generated_tokens) {
  impl_->prompt_size->Observe(static_cast<double>(prompt_tokens));
  impl_->generated_size->Observe(static_cast<double>(generated_tokens));
}

void Metrics::CountFinished(const std::string& reason) {
  impl_->success->Add({{"finished_reason", reason}}).Increment();
}

std::string Metrics::Text() const {
  std::vector<MetricFamily> families = impl_->registry.Collect();
  const auto add = [&](std::vector<MetricFamily> more) {
    for (MetricFamily& family : more) families.push_back(std::move(family));
  };
  add(EngineMetrics(impl_->engine.stats(), impl_->engine.geometry(), impl_->prefix, impl_->labels));
  add(ExtraMetrics(impl_->extra, impl_->prefix, impl_->labels));
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace fathom
