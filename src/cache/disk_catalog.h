// What is known of the segments in a folder: by id, by name, in the order of their chains, and
// which one is to go next.
//
// A segment is a leaf when no known segment continues from one of its blocks. Only leaves are
// evicted: what remains can always be resumed from its root. A chain's later tokens always begin at
// a higher position, so as long as there are segments there is a leaf.
//
// Plain data, not thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache/disk_store.h"

namespace fathom {

class DiskCatalog {
 public:
  struct Entry {
    SegmentInfo info;
    int64_t used_ns = 0;  // last use, nanoseconds since 1970
    int pinned = 0;       // queued reads
    int64_t bytes() const { return info.header->file_bytes; }
  };

  DiskCatalog() = default;
  DiskCatalog(DiskCatalog&&) = default;  // entries keep their places
  DiskCatalog& operator=(DiskCatalog&&) = default;

  void Add(SegmentInfo info, int64_t used_ns);
  void Remove(SegmentId id);
  Entry* Find(SegmentId id);
  Entry* FindName(const std::string& name);

  // A segment that is being written continues from `header`'s parent: that is no leaf meanwhile.
  void Want(const SegmentHeader& header) { CountParent(header, 1); }
  void Unwant(const SegmentHeader& header) { CountParent(header, -1); }

  bool IsLeaf(const Entry& entry) const;
  // The least recently used leaf that no read is queued for; null: there is none.
  const Entry* EvictionChoice() const;

  // Parents before children; those without a known parent (and what continues from them) last.
  std::vector<const Entry*> ParentsFirst() const;

  // The segments from the root to `entry` that together hold everything before it; the first of
  // them does not begin at token 0 when some are missing. `entry` is the last.
  std::vector<const Entry*> Chain(const Entry& entry) const;

  const std::map<std::string, Entry>& entries() const { return entries_; }  // by name
  int64_t bytes() const { return bytes_; }

 private:
  // Two models name the same tokens alike.
  struct Name {
    BlockHash fingerprint, block;
    bool operator==(const Name&) const = default;
  };
  struct NameHash {
    size_t operator()(const Name& name) const {
      const std::hash<BlockHash> hash;
      return hash(name.block) ^ hash(name.fingerprint) * 31;
    }
  };
  void CountParent(const SegmentHeader& header, int change);

  std::map<std::string, Entry> entries_;
  std::unordered_map<SegmentId, Entry*> by_id_;
  std::unordered_map<Name, int, NameHash> children_;  // of a block: segments that begin after it
  int64_t bytes_ = 0;
};

}  // namespace fathom
