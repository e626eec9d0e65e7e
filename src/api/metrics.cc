#include "api/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

namespace fathom {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

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
  Impl(const std::string& metric_prefix, const std::string& model_name, const Engine& served)
      : prefix(metric_prefix), labels{{"model_name", model_name}, {"engine", "0"}}, engine(served) {
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

  MetricFamily Family(const char* name, const char* help, MetricType type) const {
    MetricFamily family;
    family.name = prefix + name;
    family.help = help;
    family.type = type;
    return family;
  }

  void AddValue(MetricFamily& family, double value,
                std::vector<ClientMetric::Label> extra = {}) const {
    ClientMetric metric;
    for (const auto& [name, text] : labels) metric.label.push_back({name, text});
    for (auto& label : extra) metric.label.push_back(std::move(label));
    if (family.type == MetricType::Counter) metric.counter.value = value;
    else metric.gauge.value = value;
    family.metric.push_back(std::move(metric));
  }

  std::vector<MetricFamily> EngineFamilies() const {
    const EngineStats stats = engine.stats();
    std::vector<MetricFamily> families;
    const auto add = [&](const char* name, const char* help, MetricType type, double value) {
      families.push_back(Family(name, help, type));
      AddValue(families.back(), value);
    };
    const auto gauge = MetricType::Gauge;
    const auto counter = MetricType::Counter;
    const double used =
        stats.blocks_total > 0 ? static_cast<double>(stats.blocks_used) / stats.blocks_total : 0;
    add("num_requests_running", "Sequences in the running batch.", gauge, stats.running);
    add("num_requests_waiting", "Sequences waiting for memory or a slot.", gauge, stats.waiting);
    add("kv_cache_usage_perc", "Blocks in use; 1 is all of them.", gauge, used);
    add("prompt_tokens_total", "Prompt tokens computed.", counter,
        static_cast<double>(stats.prompt_tokens));
    add("generation_tokens_total", "Tokens generated.", counter,
        static_cast<double>(stats.generation_tokens));
    add("num_preemptions_total", "Sequences that gave up their blocks and are computed anew.",
        counter, static_cast<double>(stats.preemptions));
    add("engine_steps_total", "Steps the engine has run.", counter,
        static_cast<double>(stats.steps));
    add("last_step_seconds", "Duration of the last step.", gauge, stats.last_step_seconds);
    add("oldest_waiting_seconds", "Age of the oldest waiting request.", gauge,
        stats.oldest_waiting_seconds);
    families.push_back(Family("pool_units_used", "Units of each cache pool in use.", gauge));
    AddValue(families.back(), stats.blocks_used, {{"pool", "blocks"}});
    AddValue(families.back(), stats.slots_used, {{"pool", "slots"}});
    families.push_back(Family("pool_units_total", "Units of each cache pool.", gauge));
    AddValue(families.back(), stats.blocks_total, {{"pool", "blocks"}});
    AddValue(families.back(), stats.slots_total, {{"pool", "slots"}});
    families.push_back(Family("pool_unit_bytes", "Bytes of one unit of each cache pool.", gauge));
    const Geometry& geometry = engine.geometry();
    AddValue(families.back(), static_cast<double>(geometry.block_bytes), {{"pool", "blocks"}});
    AddValue(families.back(), static_cast<double>(geometry.slot_bytes), {{"pool", "slots"}});
    return families;
  }

  std::string prefix;
  prometheus::Labels labels;
  const Engine& engine;
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

Metrics::Metrics(const std::string& prefix, const std::string& model_name, const Engine& engine)
    : impl_(std::make_unique<Impl>(prefix, model_name, engine)) {}
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
  for (MetricFamily& family : impl_->EngineFamilies()) families.push_back(std::move(family));
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace fathom
