// KvEventPublisher: tells routers over ZeroMQ which prefixes this node could resume from, in vLLM's
// format (docs/kv-events.md).
//
//   FATHOM_ASSIGN(KvEventsConfig config, KvEventsConfig::Parse(flag));
//   FATHOM_ASSIGN(auto publisher, KvEventPublisher::Start(config, {.block_tokens = 256}));
//   publisher->Publish(std::move(events));   // engine thread; never blocks
//
// A thread of its own owns the sockets: PUB carries every batch as (topic, sequence number,
// payload), ROUTER answers requests for past batches. Memory is bounded: a batch that finds the
// queue full is dropped and counted, and its sequence number is left out, so that subscribers see
// the gap.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/cache_event.h"
#include "core/status.h"
#include "dist/kv_event_encoding.h"
#include "dist/kv_events_config.h"

namespace fathom {

class KvEventPublisher : public CacheEventSink {
 public:
  struct Stats {
    uint64_t batches = 0;  // handed to ZeroMQ
    uint64_t events = 0;   // within them
    uint64_t dropped_batches = 0, dropped_events = 0;
    uint64_t replays = 0;  // requests answered
  };

  // Opens the sockets and starts the thread. kUnavailable with the endpoint when it cannot be bound
  // or connected. `config.publishes()` must hold; `format.encoding` is replaced by config's.
  static Expected<std::unique_ptr<KvEventPublisher>> Start(const KvEventsConfig& config,
                                                           const KvEventFormat& format);
  // Sends what is queued, waits at most half a second for ZeroMQ to deliver it, closes.
  ~KvEventPublisher() override;

  // From any one thread. An empty list does nothing.
  void Publish(std::vector<CacheEvent> events) override;

  // Where the sockets really are ("tcp://0.0.0.0:40123" for a port of 0); the second is empty
  // without replay.
  const std::string& endpoint() const;
  const std::string& replay_endpoint() const;
  Stats stats() const;  // from any thread

 private:
  struct Impl;
  explicit KvEventPublisher(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace fathom
