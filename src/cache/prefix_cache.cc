// Sequences and the tree: how paths are opened, found, attached, extended, saved and left.
// Eviction is in prefix_evict.cc, the reasons of misses in prefix_find.cc.
#include "cache/prefix_cache.h"

#include <algorithm>
#include <iterator>

#include "cache/prefix_node.h"
#include "core/status.h"

namespace fathom {

PrefixCache::PrefixCache(const PrefixOptions& options, BlockPool& blocks, BundlePool& bundles,
                         HostTier* host, std::vector<CacheOp>* ops)
    : options_(options),
      hasher_(options.hash),
      blocks_(blocks),
      bundles_(bundles),
      host_(host),
      ops_(ops),
      holder_(static_cast<size_t>(blocks.capacity()), nullptr) {
  FATHOM_CHECK(options.block_tokens > 0 && options.bundle_interval > 0 && options.min_save > 0);
}

PrefixCache::~PrefixCache() = default;

// --- the tree ---

PrefixPath PrefixCache::Open(const std::string& salt) {
  const BlockHash hash = hasher_.Root(salt);
  std::unique_ptr<PrefixNode>& root = nodes_[hash];
  if (root == nullptr) {
    root = std::make_unique<PrefixNode>();
    root->id = ++next_id_;
    root->hash = hash;
    root->root = root.get();
  }
  ++root->users;
  return {root.get(), root.get()};
}

const BlockHash& PrefixCache::Name(const PrefixPath& path, std::span<const TokenId> tokens,
                                   size_t index) const {
  const auto size = static_cast<size_t>(options_.block_tokens);
  std::vector<BlockHash>& names = path.names;
  while (names.size() <= index) {
    const BlockHash& parent = names.empty() ? path.root->hash : names.back();
    names.push_back(hasher_.Next(parent, tokens.subspan(names.size() * size, size)));
  }
  return names[index];
}

void PrefixCache::DropRoot(PrefixNode* root) {
  if (root->users == 0 && root->children.empty() && root->bundles.empty()) nodes_.erase(root->hash);
}

PrefixNode* PrefixCache::Child(const PrefixNode* parent, const BlockHash& hash,
                               std::span<const TokenId> tokens) const {
  const auto at = nodes_.find(hash);
  if (at == nodes_.end()) return nullptr;
  PrefixNode* node = at->second.get();
  if (node->parent != parent || !std::ranges::equal(node->tokens, tokens)) return nullptr;
  return node;
}

PrefixNode* PrefixCache::AddNode(PrefixNode* parent, const BlockHash& hash,
                                 std::span<const TokenId> tokens) {
  auto owned = std::make_unique<PrefixNode>();
  PrefixNode* node = owned.get();
  node->id = ++next_id_;
  node->hash = hash;
  node->root = parent->root;
  node->parent = parent;
  node->end = parent->end + options_.block_tokens;
  node->tokens.assign(tokens.begin(), tokens.end());
  parent->children.push_back(node);
  nodes_.emplace(hash, std::move(owned));
  if (parent->parent == nullptr) ++first_blocks_[hasher_.Next(hasher_.Root(""), tokens)];
  graves_.erase(hash);
  ++stats_.nodes;
  return node;
}

// Removes a node and what hangs below it. Nothing of it is held by a sequence.
void PrefixCache::RemoveNode(PrefixNode* top, double now) {
  std::vector<PrefixNode*> order{top};  // parents before children
  for (size_t i = 0; i < order.size(); ++i) {
    order.insert(order.end(), order[i]->children.begin(), order[i]->children.end());
  }
  for (auto it = order.rbegin(); it != order.rend(); ++it) {
    PrefixNode* node = *it;
    FATHOM_CHECK(node->busy == 0);
    while (!node->bundles.empty()) RemoveBundle(node->bundles.back().get(), now, false);
    if (node->device) DropDevice(node);
    if (node->host) DropHost(node);
    if (node->disk.there()) --stats_.disk_nodes;
    Bury(node->hash, now);
    PrefixNode* parent = node->parent;
    std::erase(parent->children, node);
    if (parent->parent == nullptr) {
      const auto first = first_blocks_.find(hasher_.Next(hasher_.Root(""), node->tokens));
      if (--first->second == 0) first_blocks_.erase(first);
    }
    Place(&device_blocks_, &node->in_device_blocks, std::nullopt);
    Place(&host_blocks_, &node->in_host_blocks, std::nullopt);
    --stats_.nodes;
    FATHOM_CHECK(!node->told);
    nodes_.erase(BlockHash(node->hash));
    if (parent->parent == nullptr) DropRoot(parent);
    else Refresh(parent);
  }
}

void PrefixCache::RemoveIfGone(PrefixNode* node, double now) {
  if (!node->resident()) RemoveNode(node, now);
}

// --- bundles ---

PrefixBundle* PrefixCache::AddBundle(PrefixNode* node, int64_t tokens,
                                     std::span<const TokenId> tail) {
  auto owned = std::make_unique<PrefixBundle>();
  PrefixBundle* bundle = owned.get();
  bundle->id = ++next_id_;
  bundle->tokens = tokens;
  bundle->node = node;
  bundle->tail.assign(tail.begin(), tail.end());
  node->bundles.push_back(std::move(owned));
  ++stats_.bundles;
  CountBundle(node, 1);
  return bundle;
}

void PrefixCache::RemoveBundle(PrefixBundle* bundle, double now, bool evicted) {
  FATHOM_CHECK(bundle->busy == 0);
  PrefixNode* node = bundle->node;
  if (bundle->device) {
    bundles_.Release(*bundle->device);
    --stats_.device_bundles;
  }
  if (bundle->host) {
    host_->bundles.Release(*bundle->host);
    --stats_.host_bundles;
  }
  if (bundle->tail_device) DropTail(bundle);
  if (bundle->tail_host) {
    host_->blocks.Release(*bundle->tail_host);
    --stats_.host_blocks;
  }
  Place(&device_bundles_, &bundle->in_device_bundles, std::nullopt);
  Place(&device_blocks_, &bundle->in_device_blocks, std::nullopt);
  Place(&host_bundles_, &bundle->in_host_bundles, std::nullopt);
  Place(&host_blocks_, &bundle->in_host_blocks, std::nullopt);
  if (evicted) node->bundle_evicted = now;
  std::erase_if(node->bundles, [&](const auto& other) { return other.get() == bundle; });
  --stats_.bundles;
  CountBundle(node, -1);
  RefreshBundles(node);
}

// A bundle of `node` came or went: who is resumable, and which bundles are interior now.
void PrefixCache::CountBundle(PrefixNode* node, int change) {
  std::vector<PrefixNode*> stored;
  UpdateResumable(node, &stored);
  for (PrefixNode* above = node->parent; above != nullptr; above = above->parent) {
    above->bundles_below += change;
    FATHOM_CHECK(above->bundles_below >= 0);
    UpdateResumable(above, &stored);
  }
  // Parents are announced before their children.
  for (auto it = stored.rbegin(); it != stored.rend(); ++it) {
    Announce(*it);
  }
}

void PrefixCache::UpdateResumable(PrefixNode* node, std::vector<PrefixNode*>* stored) {
  if (node->parent == nullptr || node->resumable() == node->announced) return;
  node->announced = node->resumable();
  if (node->announced) stored->push_back(node);
  else Announce(node);
  Refresh(node);
  RefreshBundles(node->parent);  // they may lie inside a path now, or at its end
}

void PrefixCache::Announce(PrefixNode* node) {
  if (!options_.events) return;
  std::optional<CacheTier> tier;
  if (node->announced && node->device) tier = CacheTier::kDevice;
  else if (node->announced && node->host) tier = CacheTier::kHost;
  else if (node->announced && node->disk.there()) tier = CacheTier::kDisk;
  if (tier == node->told) return;
  CacheEvent event;
  event.hash = node->hash;
  // Where it is now before where it was: its children always have a parent.
  if (tier) {
    event.tier = *tier;
    event.parent = node->parent->hash;
    event.first = node->parent->parent == nullptr;
    event.tokens = node->tokens;
    events_.push_back(event);
  }
  if (node->told) {
    event.kind = CacheEvent::Kind::kRemoved;
    event.tier = *node->told;
    event.tokens.clear();
    events_.push_back(std::move(event));
  }
  node->told = tier;
}

// --- where a node's rows are ---

void PrefixCache::SetDevice(PrefixNode* node, BlockId block) {
  FATHOM_CHECK(!node->device && holder_[static_cast<size_t>(block.value)] == nullptr);
  blocks_.RetainCached(block);
  holder_[static_cast<size_t>(block.value)] = node;
  node->device = block;
  Announce(node);
  ++node->parent->device_children;
  if (!node->host) ++node->parent->memory_children;
  RefreshBundles(node->parent);  // a tail may be this block
  Refresh(node->parent);
  Refresh(node);
}

void PrefixCache::DropDevice(PrefixNode* node) {
  const BlockId block = *node->device;
  holder_[static_cast<size_t>(block.value)] = nullptr;
  node->device.reset();
  blocks_.ReleaseCached(block);
  Announce(node);
  --node->parent->device_children;
  if (!node->host) --node->parent->memory_children;
  RefreshBundles(node->parent);
  Refresh(node);
  Refresh(node->parent);
}

void PrefixCache::DropHost(PrefixNode* node) {
  host_->blocks.Release(*node->host);
  node->host.reset();
  Announce(node);
  --stats_.host_blocks;
  if (!node->device) --node->parent->memory_children;
  Refresh(node);
  Refresh(node->parent);
}

void PrefixCache::DropTail(PrefixBundle* bundle) {
  blocks_.ReleaseCached(*bundle->tail_device);
  bundle->tail_device.reset();
}

// --- sequences ---

bool PrefixCache::Attach(const PrefixMatch& match, SlotId slot, PrefixPath* path,
                         std::vector<BlockId>* table, double now) {
  FATHOM_CHECK(match.found() && table->empty());
  PrefixBundle* bundle = match.bundle;
  // Out of all orders of eviction: making room below must not take what is wanted.
  if (bundle != nullptr) {
    ++bundle->busy;
    Refresh(bundle);
  }
  for (PrefixNode* node : match.nodes) {
    ++node->busy;
    if (node->device) blocks_.Retain(*node->device);
    Refresh(node);
  }
  bool whole = true;
  for (PrefixNode* node : match.nodes) {
    whole = node->device || BringUp(node, now);
    if (!whole) break;
    table->push_back(*node->device);
  }
  whole = whole && (bundle == nullptr || BringUp(bundle, now));
  if (whole && bundle != nullptr && !bundle->tail.empty()) {
    const std::optional<BlockId> own = AllocateBlock(now);
    whole = own.has_value() || Adopt(bundle, now);
    if (whole && !own) {
      table->push_back(*bundle->tail_device);
    } else if (whole) {
      table->push_back(*own);
      if (bundle->tail_device) {
        ops_->push_back({CacheOp::Kind::kCopyBlock, bundle->tail_device->value, own->value});
      } else {
        ops_->push_back({CacheOp::Kind::kBlockFromHost, bundle->tail_host->value, own->value});
        ++stats_.blocks_from_host;
      }
    }
  }
  if (whole && !match.nodes.empty()) path->node = match.nodes.back();
  if (whole && bundle != nullptr) {
    ops_->push_back(
        {CacheOp::Kind::kRestoreSlot, bundle->device->value, slot.value, bundle->tokens});
    bundle->used = std::max(bundle->used, now);
    bundle->junction = bundle->junction || match.parts;
    bundle->from_disk = false;
  } else if (!whole) {
    for (PrefixNode* node : match.nodes) {
      if (node->device) blocks_.Release(*node->device);
    }
    table->clear();
  }
  if (bundle != nullptr) --bundle->busy;
  for (PrefixNode* node : match.nodes) {
    --node->busy;
    if (whole) node->from_disk = false;
    Refresh(node);
  }
  Touch(path->node, now);
  if (bundle != nullptr) Refresh(bundle);
  return whole;
}

// With no block free for a copy, a sequence may go on in the tail block itself: its rows below t
// stay what they are. Bundles further on in the same block would not: they go. The sequence gets
// the reference.
bool PrefixCache::Adopt(PrefixBundle* bundle, double now) {
  if (!bundle->tail_device) return false;
  const BlockId block = *bundle->tail_device;
  if (holder_[static_cast<size_t>(block.value)] != nullptr || !blocks_.evictable(block)) {
    return false;
  }
  PrefixNode* node = bundle->node;
  for (size_t i = node->bundles.size(); i-- > 0;) {
    PrefixBundle* other = node->bundles[i].get();
    if (other->tail_device == block && other->tokens > bundle->tokens) {
      RemoveBundle(other, now, true);
    }
  }
  blocks_.Retain(block);
  return true;
}

void PrefixCache::Extend(PrefixPath* path, std::span<const TokenId> tokens, int64_t computed,
                         std::vector<BlockId>* table) {
  const int64_t size = options_.block_tokens;
  while (!path->closed && path->node->end + size <= computed) {
    PrefixNode* parent = path->node;
    const auto ids = tokens.subspan(static_cast<size_t>(parent->end), static_cast<size_t>(size));
    const BlockHash hash = Name(*path, tokens, static_cast<size_t>(parent->end / size));
    BlockId& own = (*table)[static_cast<size_t>(parent->end / size)];
    PrefixNode* node = Child(parent, hash, ids);
    if (node == nullptr) {
      if (nodes_.contains(hash)) {
        path->closed = true;
        return;
      }
      node = AddNode(parent, hash, ids);
    }
    if (!node->device) {
      if (node->host) DropHost(node);
      SetDevice(node, own);
    } else if (*node->device != own) {
      blocks_.Retain(*node->device);
      blocks_.Release(own);
      own = *node->device;
      ++stats_.blocks_shared;
      RefreshBundles(parent);  // a tail may have been the block given back
    }
    path->node = node;
    Refresh(parent);
    Refresh(node);
  }
}

void PrefixCache::Save(const PrefixPath& path, std::span<const TokenId> tokens, int64_t at,
                       const std::vector<BlockId>& table, SlotId slot, double now) {
  if (path.closed || at < options_.min_save) return;
  PrefixNode* node = path.node;
  FATHOM_CHECK(at >= node->end && at < node->end + options_.block_tokens);
  const auto tail =
      tokens.subspan(static_cast<size_t>(node->end), static_cast<size_t>(at - node->end));
  PrefixBundle* bundle = nullptr;
  for (const auto& there : node->bundles) {
    if (there->tokens == at && std::ranges::equal(there->tail, tail)) bundle = there.get();
  }
  if (bundle != nullptr) {
    bundle->used = std::max(bundle->used, now);
    Refresh(bundle);
    // What lies on disk alone would have to be read: here it is at hand.
    const bool in_memory = bundle->device || bundle->host;
    if (in_memory || bundle->busy > 0 || bundle->loading > 0) return;
    ++bundle->busy;  // the search for a unit must not drop it
    Refresh(bundle);
  }
  // The bundle must not evict its own path's nodes; those are held by the sequence.
  const std::optional<BundleId> unit = AllocateBundle(now);
  if (bundle != nullptr) {
    --bundle->busy;
    Refresh(bundle);
  }
  if (!unit) return;
  if (bundle == nullptr) bundle = AddBundle(node, at, tail);
  bundle->device = unit;
  ++stats_.device_bundles;
  bundle->used = std::max(bundle->used, now);
  if (!tail.empty() && !bundle->tail_device && !bundle->tail_host) {
    bundle->tail_device = table[static_cast<size_t>(at / options_.block_tokens)];
    blocks_.RetainCached(*bundle->tail_device);
  }
  ops_->push_back({CacheOp::Kind::kSaveSlot, slot.value, unit->value, at});
  RefreshBundles(node);
  Thin(bundle, now);
}

std::vector<int64_t> PrefixCache::PlanSaves(int64_t from, int64_t prompt, int64_t known,
                                            std::span<const int64_t> boundaries,
                                            int64_t junction) const {
  std::set<int64_t> points;
  const int64_t least = std::max(options_.min_save, from + options_.min_save);
  // kApart: nowhere near another. kBelow: others may go on from here and not from a point close
  // above, so that alone does not matter. kSeen: requests did.
  enum class Distance { kApart, kBelow, kSeen };
  const auto add = [&](int64_t at, Distance distance) {
    if (at < least || at >= known) return;
    const auto next = points.lower_bound(at);
    if (distance == Distance::kApart && next != points.end() && *next - at < options_.min_save) {
      return;
    }
    if (distance != Distance::kSeen && next != points.begin() &&
        at - *std::prev(next) < options_.min_save) {
      return;
    }
    points.insert(at);
  };
  const int64_t size = options_.block_tokens;
  // All of a prompt but its last token: where the same prompt, or one that ends otherwise, goes on.
  add(prompt - 1, Distance::kApart);
  add(junction, Distance::kSeen);
  for (const int64_t boundary : boundaries) add(boundary, Distance::kBelow);
  // Prompts, and messages with a document in them, often share all but a question at the end.
  add((prompt - 1) / size * size, Distance::kBelow);
  add((prompt - 1) / size * size - size, Distance::kApart);
  for (int64_t at = (from / options_.bundle_interval + 1) * options_.bundle_interval; at < known;
       at += options_.bundle_interval) {
    add(at, Distance::kApart);
  }
  return {points.begin(), points.end()};
}

void PrefixCache::Leave(PrefixPath* path, std::vector<BlockId>* table, double now) {
  Touch(path->node, now);
  for (const BlockId block : *table) blocks_.Release(block);
  table->clear();
  PrefixNode* root = path->root;
  RefreshBundles(path->node);
  if (path->node != root) Refresh(path->node);
  --root->users;
  *path = {};
  DropRoot(root);
}

void PrefixCache::Keep(const PrefixPath& path, int64_t prompt_end, double until) {
  Touch(path.node, until);
  const auto keep = [until](PrefixBundle* bundle) {
    bundle->used = std::max(bundle->used, until);
    bundle->kept = true;
  };
  PrefixBundle* last = nullptr;
  for (const auto& bundle : path.node->bundles) {
    if (last == nullptr || bundle->tokens > last->tokens) last = bundle.get();
  }
  if (last != nullptr) keep(last);
  RefreshBundles(path.node);
  for (PrefixNode* node = path.node; node != nullptr; node = node->parent) {
    if (node->end > prompt_end) continue;
    for (const auto& bundle : node->bundles) {
      if (bundle->tokens == prompt_end) keep(bundle.get());
    }
    RefreshBundles(node);
    break;
  }
}

void PrefixCache::Clear(double now) {
  std::vector<PrefixNode*> all;
  for (const auto& [hash, node] : nodes_) {
    all.push_back(node.get());
    if (node->parent == nullptr)
      ++node->users;  // a root outlives its last child until we are there
  }
  // From the leaves up: a node goes when no sequence holds it and nothing is left below it.
  std::ranges::sort(all, [](const PrefixNode* a, const PrefixNode* b) { return a->end > b->end; });
  for (PrefixNode* node : all) {
    for (size_t i = node->bundles.size(); i-- > 0;) {
      if (node->bundles[i]->busy == 0) RemoveBundle(node->bundles[i].get(), now, false);
    }
    if (node->parent == nullptr) {
      --node->users;
      DropRoot(node);
      continue;
    }
    const bool held = node->busy > 0 || (node->device && !blocks_.evictable(*node->device));
    if (!held && node->children.empty() && node->bundles.empty()) RemoveNode(node, now);
  }
  if (options_.events) {
    events_.clear();
    events_.push_back({.kind = CacheEvent::Kind::kCleared});
    // What is being moved at the moment stays, and is told again, parents first.
    std::vector<PrefixNode*> left;
    for (const auto& [hash, node] : nodes_) left.push_back(node.get());
    std::ranges::sort(left, {}, &PrefixNode::end);
    for (PrefixNode* node : left) {
      node->told.reset();
      if (node->parent != nullptr) Announce(node);
    }
  }
}

}  // namespace fathom
