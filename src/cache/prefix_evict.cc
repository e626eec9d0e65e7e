// Orders of eviction, thinning, and the way to the host tier and back.
#include <algorithm>
#include <limits>

#include "cache/prefix_cache.h"
#include "cache/prefix_node.h"
#include "core/status.h"

namespace fathom {
namespace {

// How many dropped blocks are remembered, to be told "evicted 40 s ago" from "never seen".
constexpr size_t kGraves = 1 << 16;
// Beyond so many bundles at one node (short prompts below the root), which of them lie inside
// another's path is not worked out.
constexpr size_t kCompared = 64;
// A gap between bundles may be this part of its distance from the newest one. At an interval of
// 2,048 a path of a million tokens keeps about twenty.
constexpr double kGapShare = 0.5;
// A session's last bundle is worth so many interior ones: of two that were not used for equally
// long the interior one goes, but not one that is so many times younger.
constexpr double kWorthOfLast = 10;

}  // namespace

// --- orders ---

void PrefixCache::Place(Order* order, std::optional<EvictionItem>* at,
                        std::optional<EvictionItem> item) {
  if (*at == item) return;
  if (*at) order->erase(**at);
  *at = item;
  if (item) order->insert(*item);
}

// Inside a path that goes on to another bundle, and no place where requests part.
bool PrefixCache::Interior(const PrefixBundle& bundle) {
  if (bundle.junction || bundle.kept) return false;
  const PrefixNode& node = *bundle.node;
  if (bundle.tail.empty() && node.bundles_below > 0) return true;
  if (node.bundles.size() + node.children.size() > kCompared) return false;
  const auto extends = [&](const std::vector<TokenId>& ids) {
    return ids.size() > bundle.tail.size() &&
           std::equal(bundle.tail.begin(), bundle.tail.end(), ids.begin());
  };
  return std::ranges::any_of(node.bundles,
                             [&](const auto& other) { return extends(other->tail); }) ||
         std::ranges::any_of(node.children, [&](const PrefixNode* child) {
           return child->resumable() && extends(child->tokens);
         });
}

void PrefixCache::Refresh(PrefixNode* node) {
  if (node->parent == nullptr) return;
  const EvictionItem item{node->resumable() ? 1 : 0, node->used, node->id, node, nullptr};
  const bool device = node->device && node->device_children == 0 && node->busy == 0 &&
                      blocks_.evictable(*node->device);
  const bool host = node->host && !node->device && node->memory_children == 0 && node->busy == 0;
  Place(&device_blocks_, &node->in_device_blocks, device ? std::optional(item) : std::nullopt);
  Place(&host_blocks_, &node->in_host_blocks, host ? std::optional(item) : std::nullopt);
}

void PrefixCache::Refresh(PrefixBundle* bundle) {
  const bool free = bundle->busy == 0;
  const EvictionItem block{1, bundle->used, bundle->id, nullptr, bundle};
  const EvictionItem unit{Interior(*bundle) ? 0 : 1, bundle->used, bundle->id, nullptr, bundle};
  // A tail that has become a node's block goes with that node.
  const bool tail = free && bundle->tail_device &&
                    holder_[static_cast<size_t>(bundle->tail_device->value)] == nullptr &&
                    blocks_.evictable(*bundle->tail_device);
  const auto when = [](bool condition, const EvictionItem& item) {
    return condition ? std::optional(item) : std::nullopt;
  };
  Place(&device_blocks_, &bundle->in_device_blocks, when(tail, block));
  Place(&device_bundles_, &bundle->in_device_bundles,
        when(free && bundle->device.has_value(), unit));
  Place(&host_blocks_, &bundle->in_host_blocks, when(free && bundle->tail_host.has_value(), block));
  Place(&host_bundles_, &bundle->in_host_bundles, when(free && bundle->host.has_value(), unit));
}

void PrefixCache::RefreshBundles(PrefixNode* node) {
  for (const auto& bundle : node->bundles) Refresh(bundle.get());
}

void PrefixCache::Touch(PrefixNode* node, double now) {
  for (; node != nullptr; node = node->parent) {
    node->used = std::max(node->used, now);
    if (node->in_device_blocks || node->in_host_blocks) Refresh(node);
  }
}

void PrefixCache::Bury(const BlockHash& hash, double now) {
  if (!graves_.insert_or_assign(hash, now).second) return;
  grave_order_.push_back(hash);
  if (grave_order_.size() <= kGraves) return;
  graves_.erase(grave_order_.front());
  grave_order_.pop_front();
}

// --- thinning ---

// Drops interior bundles of a path so that the gaps grow with the distance from its newest bundle:
// wherever a later request leaves the path, it computes again at most a share of what follows.
void PrefixCache::Thin(PrefixBundle* end, double now) {
  std::vector<PrefixBundle*> along;          // newest first
  std::span<const TokenId> next(end->tail);  // the path's ids after the node at hand
  for (PrefixNode* node = end->node; node != nullptr; node = node->parent) {
    const size_t begin = along.size();
    for (const auto& bundle : node->bundles) {
      if (bundle->tail.size() <= next.size() &&
          std::equal(bundle->tail.begin(), bundle->tail.end(), next.begin())) {
        along.push_back(bundle.get());
      }
    }
    std::sort(along.begin() + static_cast<std::ptrdiff_t>(begin), along.end(),
              [](const auto* a, const auto* b) { return a->tokens > b->tokens; });
    next = node->tokens;
  }
  if (along.size() < 3) return;
  const int64_t newest = along.front()->tokens;
  int64_t kept = 0;  // distance of the last one kept
  for (size_t i = 1; i < along.size(); ++i) {
    PrefixBundle* bundle = along[i];
    const int64_t beyond = newest - (i + 1 < along.size() ? along[i + 1]->tokens : 0);
    const bool awaited = options_.keep_every > 0 && bundle->tokens % options_.keep_every == 0 &&
                         !bundle->disk.there();
    const bool spare = !bundle->junction && !awaited && bundle->busy == 0 && bundle->used <= now &&
                       static_cast<double>(beyond - kept) <= kGapShare * static_cast<double>(kept);
    if (!spare) {
      kept = newest - bundle->tokens;
      continue;
    }
    ++stats_.bundles_thinned;
    RemoveBundle(bundle, now, false);
  }
}

// --- units of device memory ---

std::optional<BlockId> PrefixCache::AllocateBlock(double now) {
  for (;;) {
    if (const std::optional<BlockId> block = blocks_.Allocate()) return block;
    if (device_blocks_.empty()) return std::nullopt;
    const EvictionItem item = *device_blocks_.begin();
    if (item.node != nullptr) EvictNode(item.node, now);
    else EvictTail(item.bundle, now);
  }
}

void PrefixCache::EvictNode(PrefixNode* node, double now) {
  ++stats_.blocks_evicted;
  if (host_ != nullptr && node->resumable()) {
    ++node->busy;  // the host tier must not drop it while it makes room
    const std::optional<BlockId> to = AllocateHostBlock(now);
    --node->busy;
    if (to) {
      ops_->push_back({CacheOp::Kind::kBlockToHost, node->device->value, to->value});
      node->host = to;
      ++stats_.host_blocks;
      ++stats_.blocks_to_host;
    }
  }
  // The host copy counts from here on: DropDevice leaves memory_children alone then.
  DropDevice(node);
  RemoveIfGone(node, now);
}

void PrefixCache::EvictTail(PrefixBundle* bundle, double now) {
  ++stats_.blocks_evicted;
  if (host_ != nullptr && !bundle->tail_host) {
    ++bundle->busy;
    ++bundle->node->busy;
    Refresh(bundle->node);
    const std::optional<BlockId> to = AllocateHostBlock(now);
    --bundle->busy;
    --bundle->node->busy;
    Refresh(bundle->node);
    if (to) {
      ops_->push_back({CacheOp::Kind::kBlockToHost, bundle->tail_device->value, to->value});
      bundle->tail_host = to;
      ++stats_.host_blocks;
      ++stats_.blocks_to_host;
    }
  }
  if (bundle->tail_host || bundle->tail_disk.there()) {
    DropTail(bundle);
    Refresh(bundle);
  } else {
    ++stats_.bundles_evicted;
    RemoveBundle(bundle, now, true);
  }
}

// The bundle of a not empty order that is worth least.
PrefixBundle* PrefixCache::LeastBundle(const Order& order, double now) {
  const EvictionItem& interior = *order.begin();
  if (interior.rank > 0) return interior.bundle;
  const auto last = order.lower_bound({.rank = 1, .used = std::numeric_limits<double>::lowest()});
  if (last == order.end() || kWorthOfLast * (now - interior.used) >= now - last->used) {
    return interior.bundle;
  }
  return last->bundle;
}

std::optional<BundleId> PrefixCache::AllocateBundle(double now) {
  for (;;) {
    if (const std::optional<BundleId> unit = bundles_.Allocate()) return unit;
    if (device_bundles_.empty()) return std::nullopt;
    EvictBundleUnit(LeastBundle(device_bundles_, now), now);
  }
}

void PrefixCache::EvictBundleUnit(PrefixBundle* bundle, double now) {
  ++stats_.bundles_evicted;
  if (host_ != nullptr && !bundle->host) {
    ++bundle->busy;
    ++bundle->node->busy;
    Refresh(bundle->node);
    const std::optional<BundleId> to = AllocateHostBundle(now);
    --bundle->busy;
    --bundle->node->busy;
    Refresh(bundle->node);
    if (to) {
      ops_->push_back(
          {CacheOp::Kind::kBundleToHost, bundle->device->value, to->value, bundle->tokens});
      bundle->host = to;
      ++stats_.host_bundles;
      ++stats_.bundles_to_host;
    }
  }
  if (!bundle->host && !bundle->disk.there()) {
    RemoveBundle(bundle, now, true);
    return;
  }
  bundles_.Release(*bundle->device);
  bundle->device.reset();
  --stats_.device_bundles;
  Refresh(bundle);
}

// --- the host tier ---

std::optional<BlockId> PrefixCache::AllocateHostBlock(double now) {
  for (;;) {
    if (const std::optional<BlockId> unit = host_->blocks.Allocate()) return unit;
    if (host_blocks_.empty()) return std::nullopt;
    const EvictionItem item = *host_blocks_.begin();
    ++stats_.host_blocks_dropped;
    if (item.node != nullptr) {
      DropHost(item.node);
      RemoveIfGone(item.node, now);
      continue;
    }
    PrefixBundle* bundle = item.bundle;
    host_->blocks.Release(*bundle->tail_host);
    bundle->tail_host.reset();
    --stats_.host_blocks;
    if (bundle->has_tail()) Refresh(bundle);
    else RemoveBundle(bundle, now, true);
  }
}

std::optional<BundleId> PrefixCache::AllocateHostBundle(double now) {
  for (;;) {
    if (const std::optional<BundleId> unit = host_->bundles.Allocate()) return unit;
    if (host_bundles_.empty()) return std::nullopt;
    PrefixBundle* bundle = LeastBundle(host_bundles_, now);
    ++stats_.host_bundles_dropped;
    host_->bundles.Release(*bundle->host);
    bundle->host.reset();
    --stats_.host_bundles;
    if (bundle->has_windows()) Refresh(bundle);
    else RemoveBundle(bundle, now, true);
  }
}

// Gives a node that is in host memory a device block, whose first reference is the caller's.
bool PrefixCache::BringUp(PrefixNode* node, double now) {
  if (!node->host) return false;
  const std::optional<BlockId> block = AllocateBlock(now);
  if (!block) return false;
  ops_->push_back({CacheOp::Kind::kBlockFromHost, node->host->value, block->value});
  ++stats_.blocks_from_host;
  SetDevice(node, *block);
  DropHost(node);
  return true;
}

bool PrefixCache::BringUp(PrefixBundle* bundle, double now) {
  if (bundle->device) return true;
  if (!bundle->host) return false;
  const std::optional<BundleId> unit = AllocateBundle(now);
  if (!unit) return false;
  ops_->push_back(
      {CacheOp::Kind::kBundleFromHost, bundle->host->value, unit->value, bundle->tokens});
  ++stats_.bundles_from_host;
  bundle->device = unit;
  ++stats_.device_bundles;
  host_->bundles.Release(*bundle->host);
  bundle->host.reset();
  --stats_.host_bundles;
  return true;
}

}  // namespace fathom
