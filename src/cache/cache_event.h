// What changes in the set of resumable prefixes, for routers that follow it (KV events). A block is
// announced when a request could resume at or past its end, and withdrawn when none can any more.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/block_hash.h"

namespace fathom {

enum class CacheTier : uint8_t { kDevice, kHost, kDisk };

struct CacheEvent {
  enum class Kind : uint8_t { kStored, kRemoved, kCleared };
  Kind kind = Kind::kStored;
  CacheTier tier = CacheTier::kDevice;
  BlockHash hash;               // kStored, kRemoved
  BlockHash parent;             // kStored; the root's for a first block
  bool first = false;           // kStored: there is no parent block
  std::vector<TokenId> tokens;  // kStored: the block's own
};

// Receives the events of a step, in order, on the engine thread; must not block.
class CacheEventSink {
 public:
  virtual ~CacheEventSink() = default;
  virtual void Publish(std::vector<CacheEvent> events) = 0;
};

}  // namespace fathom
