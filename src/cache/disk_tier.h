// DiskTier: what of the prefix cache lies on disk. Between PrefixCache (which prefixes there are)
// and DiskStore (files, a worker thread): paths are written when a request ends, parts are read
// when a prompt is found there, and neither ever makes the engine thread wait for a disk.
//
//   DiskTier disk(store, cache, blocks, bundles, {.windows = ...}, &ops);   // enters what is there
//   disk.Persist(path, tokens, session);          // when a request has ended; before Leave
//   if (match.on_disk) disk.Load(match, now);     // Find says `loading` until it is done
//   disk.Work(reader, now);                       // between steps: events, timeouts, some writing
//
// A load holds the blocks of its whole path until it ends; it ends at the latest
// kLoadSilence seconds after the last part arrived. What could not be read is dropped from the
// index, counted and named; a prompt is then computed like any other. Writing holds nothing: a
// block that is evicted before its turn came ends that job.
//
// Not thread-safe: the engine thread owns it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/disk_store.h"
#include "cache/prefix_cache.h"

namespace fathom {

// Which windows go to disk (--disk-windows).
struct DiskWindows {
  enum class Policy : uint8_t {
    kFull,        // every bundle a path has when it is written
    kCheckpoint,  // those at multiples of `every` tokens
    kNone,        // rows alone
  };
  Policy policy = Policy::kFull;
  int64_t every = 0;
  // "full", "checkpoint:N", "none".
  static Expected<DiskWindows> Parse(const std::string& text, int64_t block_tokens);
  bool Wants(int64_t tokens) const {
    return policy == Policy::kFull || (policy == Policy::kCheckpoint && tokens % every == 0);
  }
};

// Copies of cache memory, in order with the work submitted so far.
class CacheReader {
 public:
  virtual ~CacheReader() = default;
  virtual std::vector<std::byte> ReadBlock(BlockId block) = 0;
  virtual std::vector<std::byte> ReadHostBlock(BlockId block) = 0;
  virtual std::vector<std::byte> ReadBundle(BundleId bundle, int64_t tokens) = 0;
  virtual std::vector<std::byte> ReadHostBundle(BundleId bundle, int64_t tokens) = 0;
};

struct DiskTierStats {
  uint64_t loads = 0, loads_failed = 0;  // of paths
  uint64_t blocks_loaded = 0, bundles_loaded = 0;
  uint64_t paths_written = 0, paths_abandoned = 0, write_failures = 0;
  uint64_t orphans = 0;  // segments whose parent is not there
  DiskStats store;
};

class DiskTier {
 public:
  // Borrows everything. Enters the segments that the store has.
  DiskTier(DiskStore& store, PrefixCache& cache, BlockPool& blocks, BundlePool& bundles,
           const DiskWindows& windows, std::vector<CacheOp>* ops);
  ~DiskTier();

  // Queues what of the path is not on disk yet, up to its last bundle.
  void Persist(const PrefixPath& path, std::span<const TokenId> tokens, const std::string& session);

  // Starts to read what of the match is on disk alone. False: no memory for it now.
  bool Load(const PrefixMatch& match, double now);

  // True when something changed that a waiting sequence may have waited for.
  bool Work(CacheReader& reader, double now);

  bool loading() const { return !loads_.empty(); }
  bool writing() const { return !jobs_.empty(); }
  // Writes what is queued; false: not done by then.
  bool Flush(CacheReader& reader, double now, std::chrono::steady_clock::time_point deadline);

  const std::string& last_failure() const { return last_failure_; }
  DiskTierStats stats() const;

 private:
  struct Target;
  struct Load_;
  struct Job;

  void Enter(SegmentId id, std::shared_ptr<const SegmentHeader> header);
  void Forget(SegmentId id, double now);
  void EnterBundle(PrefixNode* node, const SegmentHeader& header, uint64_t place, int32_t index);
  void TakePart(DiskEvent event, double now);
  void FailRead(const DiskEvent& event, double now);
  void EndLoad(Load_* load, double now);
  bool AppendNext(Job* job, CacheReader& reader);
  void DropPlace(PrefixNode* node);

  DiskStore& store_;
  PrefixCache& cache_;
  BlockPool& blocks_;
  BundlePool& bundles_;
  DiskWindows windows_;
  std::vector<CacheOp>* ops_;
  std::map<uint64_t, std::shared_ptr<const SegmentHeader>> segments_;
  std::vector<std::unique_ptr<Load_>> loads_;
  std::deque<std::unique_ptr<Job>> jobs_;
  std::string last_failure_;
  bool full_named_ = false;  // that nothing can be written; until something was
  DiskTierStats stats_;
};

}  // namespace fathom
