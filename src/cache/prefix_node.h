// The nodes of the prefix cache's tree. Internal to cache/.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cache/block_hash.h"
#include "cache/prefix_cache.h"

namespace fathom {

// Where a part lies on disk: part `part` of a segment file, 0 = nowhere.
struct DiskPlace {
  uint64_t segment = 0;
  int32_t part = 0;
  bool there() const { return segment != 0; }
};

struct PrefixBundle {
  uint64_t id = 0;
  int64_t tokens = 0;          // t
  PrefixNode* node = nullptr;  // of the last whole block in [0, t)
  std::vector<TokenId> tail;   // ids of [node's end, t)
  std::optional<BundleId> device, host;
  // With a tail: the block that holds its rows.
  std::optional<BlockId> tail_device, tail_host;
  DiskPlace disk, tail_disk;
  double used = 0;
  bool kept = false;       // an end that a retained session may come back to: never interior
  bool junction = false;   // requests were seen to go on from here differently
  int busy = 0;            // being brought up or read: in no order of eviction
  int loading = 0;         // being read from disk
  bool from_disk = false;  // read since it was last used
  std::optional<EvictionItem> in_device_bundles, in_device_blocks, in_host_bundles, in_host_blocks;

  bool has_windows() const { return device || host || disk.there(); }
  bool has_tail() const { return tail.empty() || tail_device || tail_host || tail_disk.there(); }
};

struct PrefixNode {
  uint64_t id = 0;
  BlockHash hash;
  PrefixNode* root = nullptr;
  PrefixNode* parent = nullptr;  // null: a root, which stands for no block
  int64_t end = 0;               // tokens up to and including this block
  std::vector<TokenId> tokens;
  std::vector<PrefixNode*> children;
  std::vector<std::unique_ptr<PrefixBundle>> bundles;  // at t in [end, end + block_tokens)
  std::optional<BlockId> device, host;
  DiskPlace disk;
  int64_t bundles_below = 0;    // in the subtree, this node's own not among them
  int64_t device_children = 0;  // children with a device block
  int64_t memory_children = 0;  // with a device or host block
  int64_t users = 0;            // roots: open paths
  double used = 0;
  int busy = 0;
  int loading = 0;                // being read from disk
  bool from_disk = false;         // read since it was last used
  bool announced = false;         // as resumable, in the events
  std::optional<CacheTier> told;  // where the events say that it is
  double bundle_evicted = -1;     // when a bundle of this node was last dropped for want of room
  std::optional<EvictionItem> in_device_blocks, in_host_blocks;

  bool resumable() const { return bundles_below + static_cast<int64_t>(bundles.size()) > 0; }
  bool resident() const { return device || host || disk.there(); }
};

}  // namespace fathom
