#include "cli/cache_flags.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "cache/what_if.h"
#include "cache/window_kinds.h"
#include "core/amounts.h"
#include "core/cpu_features.h"
#include "model/identity.h"

namespace fathom {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 50;

// Everything that must agree for rows of one process to be of use to another. Backend and
// instruction set are in it because their sums round differently in the last bits.
Expected<DiskFingerprint> Fingerprint(const Runtime& runtime) {
  nlohmann::ordered_json json;
  json["model"] = runtime.directory.substr(runtime.directory.find_last_of('/') + 1);
  json["config"] = TextIdentity(runtime.config_text);
  if (runtime.options.load_format == LoadFormat::kDummy) {
    json["weights"] = fmt::format("dummy, seed {}", runtime.options.seed);
  } else {
    FATHOM_ASSIGN(json["weights"], WeightsIdentity(runtime.directory));
  }
  const Geometry& geometry = runtime.geometry;
  json["kv_cache_dtype"] = KvDTypeName(geometry.options.kv);
  json["indexer_kv_dtype"] = IndexDTypeName(geometry.options.index);
  json["block_size"] = geometry.options.block_tokens;
  json["block_bytes"] = geometry.block_bytes;
  json["numerics"] = runtime.options.numerics == ops::Numerics::kProduct ? "product" : "reference";
  json["backend"] =
      runtime.gpu != nullptr ? std::string("cuda") : fmt::format("cpu {}", IsaName(CpuIsa()));
  json["prefix_hash"] = runtime.options.reuse.prefix_hash;
  return MakeDiskFingerprint(json.dump());
}

Expected<std::shared_ptr<DiskStore>> OpenDisk(const Runtime& runtime, HashAlgorithm hash) {
  const CacheReuseOptions& options = runtime.options.reuse;
  DiskOptions disk;
  disk.path = options.kv_disk_path;
  disk.max_bytes = options.kv_disk_size;
  FATHOM_ASSIGN(disk.fingerprint, Fingerprint(runtime));
  disk.algorithm = hash;
  disk.block_tokens = runtime.geometry.options.block_tokens;
  disk.block_bytes = runtime.geometry.block_bytes;
  auto opened = DiskStore::Open(std::move(disk));
  if (!opened) {
    return FailParam(opened.error().code, "--kv-disk-path", "--kv-disk-path: {}",
                     opened.error().message);
  }
  return std::shared_ptr<DiskStore>(std::move(*opened));
}

}  // namespace

void AddCacheFlags(Command& command, CacheReuseOptions& options) {
  command.Switch("--enable-prefix-caching", options.prefix_caching,
                 "go on from prompts that were seen before");
  command.Count("--bundle-interval", options.bundle_interval, 1, int64_t{1} << 30,
                "tokens between saved windows of a prompt, rounded up to whole blocks");
  command.Choice("--prefix-hash,--prefix-caching-hash-algo", options.prefix_hash,
                 {"xxh3", "sha256"},
                 "names of cached blocks; sha256 where tenants must not be able to collide",
                 {{"xxhash", "xxh3"}, {"sha256_cbor", "sha256"}});
  command.Count("--kv-host-size", options.kv_host_size, 0, kMostBytes,
                "bytes of host memory for what leaves the cache; 0: none");
  command.Text("--kv-disk-path", options.kv_disk_path, "FOLDER",
               "where prefixes outlive the server; left out: nowhere");
  command.NotEmpty("--kv-disk-path");
  command.Count("--kv-disk-size", options.kv_disk_size, 0, kMostBytes,
                "bytes the folder may take, the least recently used go first; 0: no limit");
  command.Text("--disk-windows", options.disk_windows, "POLICY",
               "full | checkpoint:N | none: which saved windows go to disk");
}

Status CheckReuse(const CacheReuseOptions& options) {
  const auto refuse = [](const char* flag, std::string_view why) -> Status {
    return FailParam(Code::kInvalidArgument, flag, "{} {}", flag, why);
  };
  if (!options.prefix_caching) {
    const char* needs = "needs prefix caching, which --no-enable-prefix-caching turns off";
    if (options.kv_host_size > 0) return refuse("--kv-host-size", needs);
    if (!options.kv_disk_path.empty()) return refuse("--kv-disk-path", needs);
    // Nothing would ever be published, and a router would wait for it.
    if (options.events != nullptr) return refuse("--kv-events-config", needs);
  }
  if (options.kv_disk_path.empty()) {
    const char* without = "has no effect without --kv-disk-path";
    if (options.kv_disk_size > 0) return refuse("--kv-disk-size", without);
    if (options.disk_windows != CacheReuseOptions().disk_windows) {
      return refuse("--disk-windows", without);
    }
  }
  return {};
}

Status SetUpReuse(const Runtime& runtime, EngineOptions* engine) {
  const CacheReuseOptions& options = runtime.options.reuse;
  FATHOM_TRY(CheckReuse(options));
  const Geometry& geometry = runtime.geometry;
  engine->prefix_caching = options.prefix_caching;
  engine->bundle_interval = options.bundle_interval;
  engine->prefix_hash =
      options.prefix_hash == "sha256" ? HashAlgorithm::kSha256 : HashAlgorithm::kXxh3;
  engine->events = options.events;
  if (!options.prefix_caching) return {};
  FATHOM_ASSIGN(engine->disk_windows,
                DiskWindows::Parse(options.disk_windows, geometry.options.block_tokens));
  if (options.kv_host_size > 0) {
    // As many bundles to a block as in device memory.
    const int64_t unit = WindowKinds(geometry).max_bundle_bytes();
    const double share = static_cast<double>(std::max(1, engine->num_bundles)) /
                         static_cast<double>(std::max(1, engine->num_blocks));
    const double each =
        static_cast<double>(geometry.block_bytes) + share * static_cast<double>(unit);
    const double blocks = static_cast<double>(options.kv_host_size) / each;
    const double bundles = blocks * share;
    if (blocks < 1 || bundles < 1 || blocks > std::numeric_limits<int32_t>::max()) {
      return FailParam(Code::kInvalidArgument, "--kv-host-size",
                       "--kv-host-size {} is less than a block of {} bytes and a bundle of {} need",
                       options.kv_host_size, geometry.block_bytes, unit);
    }
    engine->host_bundles = static_cast<int32_t>(bundles);
    engine->host_blocks = static_cast<int32_t>(
        (options.kv_host_size - engine->host_bundles * unit) / geometry.block_bytes);
  }
  if (options.kv_disk_path.empty()) return {};
  FATHOM_ASSIGN(engine->disk, OpenDisk(runtime, engine->prefix_hash));
  return {};
}

std::string DescribeReuse(const EngineOptions& engine, const Geometry& geometry) {
  std::string table;
  const auto row = [&table](std::string_view name, const std::string& value) {
    table += fmt::format("  {:<16} {}\n", name, value);
  };
  if (!engine.prefix_caching) {
    row("prefix cache", "off");
    return table;
  }
  row("prefix cache",
      fmt::format("on, bundles every {} tokens, {} names", engine.bundle_interval,
                  engine.prefix_hash == HashAlgorithm::kSha256 ? "SHA-256" : "XXH3-128"));
  if (engine.host_blocks > 0) {
    const int64_t bytes = engine.host_blocks * geometry.block_bytes +
                          engine.host_bundles * WindowKinds(geometry).max_bundle_bytes();
    row("host tier", fmt::format("{} blocks, {} bundles, {}", engine.host_blocks,
                                 engine.host_bundles, BytesAndAmount(bytes)));
  }
  if (engine.disk != nullptr) {
    const DiskStats stats = engine.disk->stats();
    row("disk tier", fmt::format("{} segments, {}, read through {}", stats.segments,
                                 BytesAndAmount(stats.bytes_on_disk), engine.disk->backend()));
    for (const RefusedFile& file : engine.disk->refused()) row("", "refused: " + file.reason);
  }
  return table;
}

}  // namespace fathom
