#include "api/engine_metrics.h"

#include <utility>

#include "cache/window_kinds.h"

namespace fathom {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

// The families of one page, in order. A value goes to the family opened last.
class Page {
 public:
  Page(const std::string& prefix, const prometheus::Labels& labels)
      : prefix_(prefix), labels_(labels) {}

  void Gauge(const std::string& name, const char* help) { Open(name, help, MetricType::Gauge); }
  void Counter(const std::string& name, const std::string& help) {
    Open(name, help, MetricType::Counter);
  }
  template <class Number>
  void Value(Number number, std::vector<ClientMetric::Label> extra = {}) {
    MetricFamily& family = families_.back();
    const auto value = static_cast<double>(number);
    ClientMetric metric;
    for (const auto& [name, text] : labels_) metric.label.push_back({name, text});
    for (auto& label : extra) metric.label.push_back(std::move(label));
    if (family.type == MetricType::Counter) metric.counter.value = value;
    else metric.gauge.value = value;
    family.metric.push_back(std::move(metric));
  }

  std::vector<MetricFamily> Take() { return std::move(families_); }

 private:
  void Open(const std::string& name, const std::string& help, MetricType type) {
    MetricFamily family;
    family.name = prefix_ + name;
    family.help = help;
    family.type = type;
    families_.push_back(std::move(family));
  }

  const std::string& prefix_;
  const prometheus::Labels& labels_;
  std::vector<MetricFamily> families_;
};

void AddScheduling(const EngineStats& stats, Page& page) {
  page.Gauge("num_requests_running", "Sequences in the running batch.");
  page.Value(stats.running);
  page.Gauge("num_requests_waiting", "Sequences waiting for memory or a slot.");
  page.Value(stats.waiting);
  page.Gauge("kv_cache_usage_perc", "Blocks that running sequences hold; 1 is all of them.");
  page.Value(stats.blocks_total > 0 ? static_cast<double>(stats.blocks_used) / stats.blocks_total
                                    : 0.0);
  page.Counter("prompt_tokens_total", "Prompt tokens, computed or found in the prefix cache.");
  page.Value(stats.prompt_tokens);
  page.Counter("generation_tokens_total", "Tokens generated.");
  page.Value(stats.generation_tokens);
  page.Counter("num_preemptions_total", "Sequences that gave up their blocks for others.");
  page.Value(stats.preemptions);
  page.Counter("recomputed_tokens_total", "Tokens computed again after preemptions.");
  page.Value(stats.recomputed_tokens);
  page.Counter("engine_steps_total", "Steps the engine has run.");
  page.Value(stats.steps);
  page.Gauge("last_step_seconds", "Duration of the last step.");
  page.Value(stats.last_step_seconds);
  page.Gauge("oldest_waiting_seconds", "Age of the oldest waiting request.");
  page.Value(stats.oldest_waiting_seconds);
}

void AddPools(const EngineStats& stats, const Geometry& geometry, Page& page) {
  const int64_t bundle_bytes = WindowKinds(geometry).max_bundle_bytes();
  struct Pool {
    const char* name;
    int64_t used, total, unit_bytes;
  };
  const Pool pools[] = {
      {"blocks", stats.blocks_used, stats.blocks_total, geometry.block_bytes},
      {"slots", stats.slots_used, stats.slots_total, geometry.slot_bytes},
      {"bundles", stats.prefix.device_bundles, stats.bundles_total, bundle_bytes},
      {"host_blocks", stats.prefix.host_blocks, stats.host_blocks_total, geometry.block_bytes},
      {"host_bundles", stats.prefix.host_bundles, stats.host_bundles_total, bundle_bytes},
  };
  page.Gauge("pool_units_used",
             "Units in use by pool; of blocks, those that running sequences hold.");
  for (const Pool& pool : pools) page.Value(pool.used, {{"pool", pool.name}});
  page.Gauge("pool_units_cached", "Blocks that only the prefix cache holds: free on demand.");
  page.Value(stats.blocks_cached, {{"pool", "blocks"}});
  page.Gauge("pool_units_total", "Units of each cache pool.");
  for (const Pool& pool : pools) page.Value(pool.total, {{"pool", pool.name}});
  page.Gauge("pool_unit_bytes", "Bytes of one unit of each cache pool.");
  for (const Pool& pool : pools) page.Value(pool.unit_bytes, {{"pool", pool.name}});

  const auto bytes = [](const KindGeometry& kind, int64_t units) {
    return units * kind.page_bytes * static_cast<int64_t>(kind.layers.size());
  };
  const auto by_kind = [&](int64_t blocks, int64_t slots) {
    for (const KindGeometry& kind : geometry.kinds) {
      page.Value(bytes(kind, kind.block_kind ? blocks : slots),
                 {{"kind", std::string(CacheKindName(kind.kind))}});
    }
  };
  page.Gauge("cache_kind_bytes_used",
             "Bytes by cache kind in blocks and slots that are in use or cached.");
  by_kind(int64_t{stats.blocks_used} + stats.blocks_cached, stats.slots_used);
  page.Gauge("cache_kind_bytes_total", "Bytes by cache kind in all blocks and slots.");
  by_kind(stats.blocks_total, stats.slots_total);
}

void AddPrefixCache(const EngineStats& stats, Page& page) {
  const uint64_t found = stats.prompt_from_device + stats.prompt_from_host + stats.prompt_from_disk;
  page.Counter("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.");
  page.Value(stats.prefix_queries);
  page.Counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.");
  page.Value(found);
  page.Counter("prompt_tokens_by_source_total", "Prompt tokens by where their rows came from.");
  page.Value(stats.prompt_computed, {{"source", "computed"}});
  page.Value(stats.prompt_from_device, {{"source", "device"}});
  page.Value(stats.prompt_from_host, {{"source", "host"}});
  page.Value(stats.prompt_from_disk, {{"source", "disk"}});
  page.Counter("prefix_cache_misses_total", "Requests by why not more of the prompt was found.");
  for (int i = 0; i < kMissReasons; ++i) {
    const auto reason = static_cast<MissReason>(i);
    if (reason == MissReason::kNone) continue;
    page.Value(stats.misses[static_cast<size_t>(i)],
               {{"reason", std::string(MissReasonName(reason))}});
  }
  page.Counter("prefix_cache_whole_hits_total", "Requests of which all was found.");
  page.Value(stats.misses[static_cast<size_t>(MissReason::kNone)]);
  const PrefixStats& prefix = stats.prefix;
  page.Gauge("prefix_cache_entries", "Blocks and bundles the prefix cache knows, in any tier.");
  page.Value(prefix.nodes, {{"unit", "blocks"}});
  page.Value(prefix.bundles, {{"unit", "bundles"}});
  page.Counter("prefix_cache_evictions_total", "Units evicted from device memory.");
  page.Value(prefix.blocks_evicted, {{"unit", "blocks"}});
  page.Value(prefix.bundles_evicted, {{"unit", "bundles"}});
  page.Counter("prefix_cache_thinned_bundles_total", "Interior bundles given up along a path.");
  page.Value(prefix.bundles_thinned);
  page.Counter("prefix_cache_shared_blocks_total", "Blocks computed twice and kept once.");
  page.Value(prefix.blocks_shared);
  page.Gauge("sessions_retained", "Named sessions whose time has not run out.");
  page.Value(stats.sessions_retained);
}

void AddTiers(const EngineStats& stats, const Geometry& geometry, Page& page) {
  const PrefixStats& prefix = stats.prefix;
  const auto block = static_cast<uint64_t>(geometry.block_bytes);
  const auto bundle = static_cast<uint64_t>(WindowKinds(geometry).max_bundle_bytes());
  page.Counter("cache_tier_bytes_total", "Bytes moved to and from the tiers below the device.");
  page.Value(prefix.blocks_to_host * block + prefix.bundles_to_host * bundle,
             {{"tier", "host"}, {"direction", "to"}});
  page.Value(prefix.blocks_from_host * block + prefix.bundles_from_host * bundle,
             {{"tier", "host"}, {"direction", "from"}});
  const DiskTierStats& disk = stats.disk;
  page.Value(disk.store.bytes_written, {{"tier", "disk"}, {"direction", "to"}});
  page.Value(disk.store.bytes_read, {{"tier", "disk"}, {"direction", "from"}});
  page.Counter("cache_tier_failures_total", "Movements to and from the disk that failed.");
  page.Value(disk.write_failures, {{"tier", "disk"}, {"direction", "to"}});
  page.Value(disk.loads_failed, {{"tier", "disk"}, {"direction", "from"}});
  page.Counter("cache_tier_evictions_total", "Units dropped from the tiers below the device.");
  page.Value(prefix.host_blocks_dropped, {{"tier", "host"}, {"unit", "blocks"}});
  page.Value(prefix.host_bundles_dropped, {{"tier", "host"}, {"unit", "bundles"}});
  page.Value(disk.store.evicted, {{"tier", "disk"}, {"unit", "segments"}});
  page.Gauge("cache_disk_bytes", "Bytes of this model's segments on disk.");
  page.Value(disk.store.bytes_on_disk);
  page.Gauge("cache_disk_segments", "This model's segments on disk.");
  page.Value(disk.store.segments);
  page.Counter("cache_disk_segments_refused_total", "Segments on disk that could not be used.");
  page.Value(disk.store.refused);
  page.Counter("cache_disk_full_total",
               "Operations that a full disk refused, also where old segments then made room.");
  page.Value(disk.store.disk_full);
  page.Counter("cache_disk_write_pauses_total",
               "Times that writing paused because no room could be made on the disk.");
  page.Value(disk.store.write_pauses);
}

}  // namespace

std::vector<MetricFamily> EngineMetrics(const EngineStats& stats, const Geometry& geometry,
                                        const std::string& prefix,
                                        const prometheus::Labels& labels) {
  Page page(prefix, labels);
  AddScheduling(stats, page);
  AddPools(stats, geometry, page);
  AddPrefixCache(stats, page);
  AddTiers(stats, geometry, page);
  return page.Take();
}

std::vector<MetricFamily> ExtraMetrics(const std::vector<ExtraCounter>& counters,
                                       const std::string& prefix,
                                       const prometheus::Labels& labels) {
  Page page(prefix, labels);
  for (const ExtraCounter& counter : counters) {
    page.Counter(counter.name, counter.help);
    page.Value(counter.read());
  }
  return page.Take();
}

}  // namespace fathom
