// vLLM's --kv-events-config: where the changes of the prefix cache are published.
//
//   FATHOM_ASSIGN(KvEventsConfig config, KvEventsConfig::Parse(R"({"enable_kv_cache_events":
//   true})")); if (config.publishes()) ...
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/status.h"

namespace fathom {

// How an event is written inside a batch (docs/kv-events.md). vLLM writes maps since 0.24 and wrote
// arrays before; routers of either age find the form they read.
enum class KvEventEncoding : uint8_t { kMap, kArray };

struct KvEventsConfig {
  bool enable_kv_cache_events = false;
  std::string publisher;  // "zmq" | "null"; left out: zmq when events are enabled
  std::string endpoint = "tcp://*:5557";
  std::string replay_endpoint;       // empty: no replay
  int64_t buffer_steps = 10'000;     // batches kept for replay
  int64_t hwm = 100'000;             // batches queued in ZeroMQ for each subscriber that lags
  int64_t max_queue_size = 100'000;  // batches waiting for the publisher's thread
  std::string topic;
  KvEventEncoding encoding = KvEventEncoding::kMap;  // ours: "map" | "array"

  // A JSON object with vLLM's keys and `encoding`. Unknown keys, wrong types, values out of range
  // and endpoints that ZeroMQ does not know or whose port is none are kInvalidArgument; the
  // sentence names the key and the error's param is --kv-events-config.
  static Expected<KvEventsConfig> Parse(std::string_view json);

  bool publishes() const { return enable_kv_cache_events && publisher != "null"; }
};

// vLLM's rule for the PUB socket: bind what has a wildcard and what is local to the machine,
// connect to anything else.
bool BindsEndpoint(std::string_view endpoint);

}  // namespace fathom
