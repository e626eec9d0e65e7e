// PrefixCache::CheckInvariants: counts everything again, for tests.
#include <map>

#include "cache/prefix_cache.h"
#include "cache/prefix_node.h"
#include "core/status.h"

namespace fathom {

void PrefixCache::CheckInvariants() const {
  std::map<int32_t, int32_t> cached;  // block -> references this index holds
  int64_t nodes = 0, bundles = 0, device_bundles = 0, host_blocks = 0, host_bundles = 0;
  std::set<int32_t> units, host_units, host_block_units;
  for (const auto& [hash, owned] : nodes_) {
    const PrefixNode& node = *owned;
    FATHOM_CHECK(node.hash == hash && node.busy == 0);
    int64_t below = 0, device_children = 0, memory_children = 0;
    for (const PrefixNode* child : node.children) {
      FATHOM_CHECK(child->parent == &node && child->end == node.end + options_.block_tokens);
      FATHOM_CHECK(nodes_.at(child->hash).get() == child);
      below += child->bundles_below + static_cast<int64_t>(child->bundles.size());
      device_children += child->device ? 1 : 0;
      memory_children += child->device || child->host ? 1 : 0;
    }
    FATHOM_CHECK(below == node.bundles_below && device_children == node.device_children);
    FATHOM_CHECK(memory_children == node.memory_children);
    for (const auto& bundle : node.bundles) {
      ++bundles;
      FATHOM_CHECK(bundle->node == &node && bundle->busy == 0);
      FATHOM_CHECK(bundle->tokens == node.end + static_cast<int64_t>(bundle->tail.size()));
      FATHOM_CHECK(static_cast<int>(bundle->tail.size()) < options_.block_tokens);
      FATHOM_CHECK(bundle->has_windows() && bundle->has_tail());
      if (bundle->tail_device) ++cached[bundle->tail_device->value];
      if (bundle->device) FATHOM_CHECK(units.insert(bundle->device->value).second);
      if (bundle->host) FATHOM_CHECK(host_units.insert(bundle->host->value).second);
      if (bundle->tail_host) {
        FATHOM_CHECK(host_block_units.insert(bundle->tail_host->value).second);
      }
      device_bundles += bundle->device ? 1 : 0;
      host_bundles += bundle->host ? 1 : 0;
      host_blocks += bundle->tail_host ? 1 : 0;
      FATHOM_CHECK(bundle->in_device_bundles.has_value() == bundle->device.has_value());
      FATHOM_CHECK(bundle->in_host_bundles.has_value() == bundle->host.has_value());
      const bool tail = bundle->tail_device && blocks_.evictable(*bundle->tail_device) &&
                        holder_[static_cast<size_t>(bundle->tail_device->value)] == nullptr;
      FATHOM_CHECK(bundle->in_device_blocks.has_value() == tail);
    }
    if (node.parent == nullptr) continue;
    ++nodes;
    FATHOM_CHECK(node.resident() && node.announced == node.resumable());
    FATHOM_CHECK(!options_.events || node.told.has_value() == node.announced);
    FATHOM_CHECK(!node.device || node.parent->parent == nullptr || node.parent->device);
    if (node.device) {
      ++cached[node.device->value];
      FATHOM_CHECK(holder_[static_cast<size_t>(node.device->value)] == &node);
    }
    if (node.host) {
      FATHOM_CHECK(host_block_units.insert(node.host->value).second);
      ++host_blocks;
    }
    const bool leaf = node.device && node.device_children == 0 && blocks_.evictable(*node.device);
    FATHOM_CHECK(node.in_device_blocks.has_value() == leaf);
    if (leaf) FATHOM_CHECK((node.in_device_blocks->rank == 1) == node.resumable());
  }
  for (int32_t block = 0; block < blocks_.capacity(); ++block) {
    const auto at = cached.find(block);
    FATHOM_CHECK(blocks_.references(BlockId{block}) >= (at == cached.end() ? 0 : at->second));
    FATHOM_CHECK((holder_[static_cast<size_t>(block)] == nullptr) || at != cached.end());
  }
  FATHOM_CHECK(nodes == stats_.nodes && bundles == stats_.bundles);
  FATHOM_CHECK(device_bundles == stats_.device_bundles && device_bundles == bundles_.used_count());
  FATHOM_CHECK(host_blocks == stats_.host_blocks && host_bundles == stats_.host_bundles);
  if (host_ != nullptr) {
    FATHOM_CHECK(host_blocks == host_->blocks.used_count());
    FATHOM_CHECK(host_bundles == host_->bundles.used_count());
  }
}

}  // namespace fathom
