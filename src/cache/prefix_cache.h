// PrefixCache: which prefixes are in the cache, and from which tokens a request can go on.
//
// A tree of whole blocks, one root per salt. A *bundle* (a saved slot, window_kinds.h) hangs at the
// node of the last whole block before it; one that is not on a block edge also holds the block it
// ends in, as its *tail*. A prefix is resumable at t when the blocks below t and a bundle at t are
// there. Where rows reach much further than bundles, the request runs the last `rebuild` tokens
// below their end again, without writing rows (ops::StepView::emit_from): what a layer's window
// holds depends on 128 tokens of the layer below, so after 128 tokens a layer every window is
// exact.
//
//   PrefixCache cache(options, blocks, bundles, host, &ops);
//   PrefixPath path = cache.Open(salt);
//   PrefixMatch match = cache.Find(path, tokens, now);
//   if (cache.Attach(match, slot, &path, &table, now)) ...   // table: blocks of [0, boundary)
//   cache.Extend(&path, tokens, computed, &table);           // after every step
//   cache.Save(path, tokens, computed, table, slot, now);    // at the boundaries of PlanSaves
//   cache.Leave(&path, &table, now);                         // the blocks stay, evictable
//
// What always holds:
// - The whole blocks of a sequence's table are the nodes of its path. Two sequences that compute
// the
//   same block end with one copy: Extend exchanges the sequence's own for the one that is there.
// - A block is written by the sequence that allocated it and by no other; tails are copied on
// write.
//   Rows below a bundle's t do not change when that sequence goes on in the tail block.
// - A node in device memory has its parent in device memory.
// - Token ids decide, not hashes: Find compares them.
//
// Eviction, when a block is needed: what no bundle makes resumable first, then the least recently
// used leaf, block by block from the end of a path. When a bundle is needed: interior bundles of a
// path before those at its end and those where requests were seen to part, unless they are ten
// times younger. Whatever the memory, interior bundles thin out with their distance from the end
// (Thin), junctions excepted. `keep_until` (a retained session) counts as the time of last use: it
// moves a path to the end of the order, it does not lock memory. With a host tier, what is evicted
// moves there first.
//
// Not thread-safe: the engine thread owns it. Memory is moved by the CacheOps it appends.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/block_hash.h"
#include "cache/block_pool.h"
#include "cache/cache_event.h"
#include "cache/cache_op.h"
#include "cache/prefix_report.h"

namespace fathom {

struct PrefixOptions {
  int block_tokens = 256;
  HashAlgorithm hash = HashAlgorithm::kXxh3;
  int64_t bundle_interval = 2048;
  int64_t min_save = 64;  // no bundle before this token, none nearer to what is resumed
  // Tokens to run again, so that every layer's window is right where rows are cached and windows
  // are not: 128 for every layer, in whole blocks. 0: never done.
  int64_t rebuild = 0;
  int64_t keep_every = 0;  // bundles at multiples of it do not thin out before they are on disk
  bool events = false;     // collect CacheEvents for TakeEvents
};

// Units of host memory that hold what was evicted. Borrowed by PrefixCache.
struct HostTier {
  UnitPool<BlockId> blocks;
  UnitPool<BundleId> bundles;
};

struct PrefixNode;
struct PrefixBundle;

// A node or bundle in an order of eviction; the smallest goes first.
struct EvictionItem {
  int rank = 0;
  double used = 0;
  uint64_t id = 0;
  PrefixNode* node = nullptr;
  PrefixBundle* bundle = nullptr;
  bool operator==(const EvictionItem&) const = default;
  friend bool operator<(const EvictionItem& a, const EvictionItem& b) {
    return std::tie(a.rank, a.used, a.id) < std::tie(b.rank, b.used, b.id);
  }
};

// A sequence's place: the node of the last whole block of its table.
struct PrefixPath {
  PrefixNode* root = nullptr;
  PrefixNode* node = nullptr;
  bool closed = false;  // a hash collided: its blocks are not in the index from there on
  mutable std::vector<BlockHash> names;  // of the sequence's whole blocks, as far as computed
  bool open() const { return root != nullptr; }
};

struct PrefixMatch {
  std::vector<PrefixNode*> nodes;  // of the whole blocks of [0, rows_to)
  PrefixBundle* bundle =
      nullptr;  // at boundary; null when windows are rebuilt, or nothing is found
  int64_t boundary = 0;
  // Rows reach so far; above boundary when windows are rebuilt from there, else equal to it.
  int64_t rows_to = 0;
  bool found() const { return bundle != nullptr || rows_to > 0; }
  int64_t junction = 0;    // > boundary: the request leaves a cached path there; save a bundle
  bool parts = false;      // other requests went on from the boundary differently
  int64_t held_nodes = 0;  // of `nodes`, those that sequences hold: they cost no block at all
  bool on_disk = false;    // part of it has to be read first
  bool loading = false;    // part of it is being read
  PrefixReport report;
};

struct PrefixStats {
  int64_t nodes = 0, bundles = 0;  // in any tier
  int64_t device_bundles = 0, host_blocks = 0, host_bundles = 0, disk_nodes = 0;
  uint64_t blocks_evicted = 0, bundles_evicted = 0;  // from device memory, moved or dropped
  uint64_t bundles_thinned = 0;
  uint64_t blocks_to_host = 0, blocks_from_host = 0;
  uint64_t bundles_to_host = 0, bundles_from_host = 0;
  uint64_t host_blocks_dropped = 0, host_bundles_dropped = 0;
  uint64_t blocks_shared = 0;  // computed twice, kept once
};

class PrefixCache {
 public:
  // Borrows everything; `host` may be null. `ops` receives the movements.
  PrefixCache(const PrefixOptions& options, BlockPool& blocks, BundlePool& bundles, HostTier* host,
              std::vector<CacheOp>* ops);
  ~PrefixCache();

  PrefixPath Open(const std::string& salt);

  // The longest resumable boundary below tokens.size(), and why none longer; without `disk`, as if
  // nothing lay there. Changes nothing.
  PrefixMatch Find(const PrefixPath& path, std::span<const TokenId> tokens, double now,
                   bool disk = true) const;

  // Gives the sequence the blocks of [0, rows_to), the partial last one as a copy of its own, and
  // its slot the windows of the bundle. False when host blocks could not be brought up: the table
  // stays empty and the sequence computes everything.
  bool Attach(const PrefixMatch& match, SlotId slot, PrefixPath* path, std::vector<BlockId>* table,
              double now);

  // Enters the whole blocks of [0, computed) that are new.
  void Extend(PrefixPath* path, std::span<const TokenId> tokens, int64_t computed,
              std::vector<BlockId>* table);

  // Saves the slot after `at` tokens, the sequence's computed ones. Nothing happens where a bundle
  // exists already, where the path is not in the index, and when no unit can be had.
  void Save(const PrefixPath& path, std::span<const TokenId> tokens, int64_t at,
            const std::vector<BlockId>& table, SlotId slot, double now);

  // The tokens in (from, tokens.size()) at which a sequence that computes [from, ..) is to be
  // saved, ascending. prompt: length of the prompt; boundaries: where its messages end; junction:
  // of Find.
  std::vector<int64_t> PlanSaves(int64_t from, int64_t prompt, int64_t known,
                                 std::span<const int64_t> boundaries, int64_t junction) const;

  // The sequence gives its references back; blocks that are in the index stay as evictable ones.
  void Leave(PrefixPath* path, std::vector<BlockId>* table, double now);

  // Retains the path, from `node` up, until `until`, with its last bundle and the one at the end of
  // the prompt, where a session that drops its reasoning goes on.
  void Keep(const PrefixPath& path, int64_t prompt_end, double until);

  // A free block, evicting if need be. nullopt: everything is held by sequences.
  std::optional<BlockId> AllocateBlock(double now);

  // Drops everything no sequence holds (/reset_prefix_cache).
  void Clear(double now);

  const PrefixStats& stats() const { return stats_; }
  std::vector<CacheEvent> TakeEvents() { return std::exchange(events_, {}); }
  const PrefixOptions& options() const { return options_; }
  const BlockHasher& hasher() const { return hasher_; }

  // For tests: every invariant of this header, by looking at all of it.
  void CheckInvariants() const;

 private:
  friend class DiskTier;  // what lies on disk is entered, loaded and dropped there (disk_tier.h)

  using Order = std::set<EvictionItem>;

  // The name of whole block `index` of the sequence's tokens, which only ever grow.
  const BlockHash& Name(const PrefixPath& path, std::span<const TokenId> tokens,
                        size_t index) const;
  PrefixNode* Child(const PrefixNode* parent, const BlockHash& hash,
                    std::span<const TokenId> tokens) const;
  static bool Reachable(const PrefixNode& node, bool disk);
  static bool Reachable(const PrefixBundle& bundle, bool disk);
  PrefixNode* AddNode(PrefixNode* parent, const BlockHash& hash, std::span<const TokenId> tokens);
  void RemoveNode(PrefixNode* node, double now);  // with everything below it
  void RemoveIfGone(PrefixNode* node, double now);
  void DropRoot(PrefixNode* root);

  PrefixBundle* AddBundle(PrefixNode* node, int64_t tokens, std::span<const TokenId> tail);
  void RemoveBundle(PrefixBundle* bundle, double now, bool evicted);
  void CountBundle(PrefixNode* node, int change);
  void SetDevice(PrefixNode* node, BlockId block);
  void DropDevice(PrefixNode* node);
  void DropHost(PrefixNode* node);
  void DropTail(PrefixBundle* bundle);
  bool Adopt(PrefixBundle* bundle, double now);

  void Touch(PrefixNode* node, double now);  // and everything above it
  void Refresh(PrefixNode* node);
  void Refresh(PrefixBundle* bundle);
  void RefreshBundles(PrefixNode* node);
  void UpdateResumable(PrefixNode* node, std::vector<PrefixNode*>* stored);
  static bool Interior(const PrefixBundle& bundle);
  static PrefixBundle* LeastBundle(const Order& order, double now);
  static void Place(Order* order, std::optional<EvictionItem>* at,
                    std::optional<EvictionItem> item);

  void Thin(PrefixBundle* end, double now);
  std::optional<BundleId> AllocateBundle(double now);
  void EvictBundleUnit(PrefixBundle* bundle, double now);
  void EvictNode(PrefixNode* node, double now);
  void EvictTail(PrefixBundle* bundle, double now);
  std::optional<BlockId> AllocateHostBlock(double now);
  std::optional<BundleId> AllocateHostBundle(double now);
  bool BringUp(PrefixNode* node, double now);  // to device memory
  bool BringUp(PrefixBundle* bundle, double now);
  void Bury(const BlockHash& hash, double now);  // remembers when a block was dropped
  void Announce(PrefixNode* node);  // what of its place and use the events have not told
  void Explain(const std::vector<PrefixNode*>& chain, std::span<const TokenId> tokens, double now,
               PrefixMatch* match) const;
  void CountSources(PrefixMatch* match) const;

  PrefixOptions options_;
  BlockHasher hasher_;
  BlockPool& blocks_;
  BundlePool& bundles_;
  HostTier* host_;
  std::vector<CacheOp>* ops_;

  std::unordered_map<BlockHash, std::unique_ptr<PrefixNode>> nodes_;  // roots too
  std::vector<PrefixNode*> holder_;                  // [block] the node whose block it is
  std::unordered_map<BlockHash, int> first_blocks_;  // unsalted names of first blocks, all salts
  Order device_blocks_;                              // evictable leaves, and tails no node holds
  Order device_bundles_;                             // bundles with a device unit
  Order host_blocks_, host_bundles_;
  std::unordered_map<BlockHash, double> graves_;  // when a block was dropped; bounded
  std::deque<BlockHash> grave_order_;
  uint64_t next_id_ = 0;
  PrefixStats stats_;
  std::vector<CacheEvent> events_;
};

}  // namespace fathom
