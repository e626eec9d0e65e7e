#include "cache/disk_catalog.h"

#include <algorithm>
#include <unordered_set>

namespace fathom {

void DiskCatalog::CountParent(const SegmentHeader& header, int change) {
  if (header.begin == 0) return;  // the root is no segment's block
  const Name name{header.fingerprint.hash, header.parent};
  if ((children_[name] += change) == 0) children_.erase(name);
}

void DiskCatalog::Add(SegmentInfo info, int64_t used_ns) {
  const std::string name = info.name;
  FATHOM_CHECK(!entries_.contains(name));
  Entry& entry = entries_[name];
  entry = {.info = std::move(info), .used_ns = used_ns};
  FATHOM_CHECK(by_id_.emplace(entry.info.id, &entry).second);
  CountParent(*entry.info.header, 1);
  bytes_ += entry.bytes();
}

void DiskCatalog::Remove(SegmentId id) {
  const auto found = by_id_.find(id);
  FATHOM_CHECK(found != by_id_.end());
  const Entry& entry = *found->second;
  CountParent(*entry.info.header, -1);
  bytes_ -= entry.bytes();
  const std::string name = entry.info.name;
  by_id_.erase(found);
  entries_.erase(name);
}

DiskCatalog::Entry* DiskCatalog::Find(SegmentId id) {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : found->second;
}

DiskCatalog::Entry* DiskCatalog::FindName(const std::string& name) {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

bool DiskCatalog::IsLeaf(const Entry& entry) const {
  const SegmentHeader& header = *entry.info.header;
  return std::none_of(header.block_names.begin(), header.block_names.end(),
                      [&](const BlockHash& block) {
                        return children_.contains({header.fingerprint.hash, block});
                      });
}

const DiskCatalog::Entry* DiskCatalog::EvictionChoice() const {
  std::vector<const Entry*> order;
  for (const auto& [name, entry] : entries_) {
    if (entry.pinned == 0) order.push_back(&entry);
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const Entry* a, const Entry* b) { return a->used_ns < b->used_ns; });
  const auto leaf =
      std::find_if(order.begin(), order.end(), [&](const Entry* entry) { return IsLeaf(*entry); });
  return leaf == order.end() ? nullptr : *leaf;
}

std::vector<const DiskCatalog::Entry*> DiskCatalog::ParentsFirst() const {
  std::vector<const Entry*> order;
  for (const auto& [name, entry] : entries_) order.push_back(&entry);
  // A parent holds the block before `begin`, so it begins earlier.
  std::stable_sort(order.begin(), order.end(), [](const Entry* a, const Entry* b) {
    return a->info.header->begin < b->info.header->begin;
  });
  std::unordered_set<Name, NameHash> reachable;
  std::vector<const Entry*> rooted, orphans;
  for (const Entry* entry : order) {
    const SegmentHeader& header = *entry->info.header;
    if (header.begin != 0 && !reachable.contains({header.fingerprint.hash, header.parent})) {
      orphans.push_back(entry);
      continue;
    }
    rooted.push_back(entry);
    for (const BlockHash& block : header.block_names) {
      reachable.insert({header.fingerprint.hash, block});
    }
  }
  rooted.insert(rooted.end(), orphans.begin(), orphans.end());
  return rooted;
}

std::vector<const DiskCatalog::Entry*> DiskCatalog::Chain(const Entry& entry) const {
  std::vector<const Entry*> chain = {&entry};
  while (chain.back()->info.header->begin != 0) {
    const SegmentHeader& child = *chain.back()->info.header;
    const auto parent = std::find_if(entries_.begin(), entries_.end(), [&](const auto& candidate) {
      const SegmentHeader& header = *candidate.second.info.header;
      return header.begin < child.begin && header.fingerprint.hash == child.fingerprint.hash &&
             std::find(header.block_names.begin(), header.block_names.end(), child.parent) !=
                 header.block_names.end();
    });
    if (parent == entries_.end()) break;
    chain.push_back(&parent->second);
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

}  // namespace fathom
