// Cache events as vLLM writes them: one MessagePack value for the events of a step. The format,
// with an example, is docs/kv-events.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache/cache_event.h"
#include "dist/kv_events_config.h"

namespace fathom {

struct KvEventFormat {
  int64_t block_tokens = 256;
  int data_parallel_rank = 0;
  KvEventEncoding encoding = KvEventEncoding::kMap;
  // The root of the blocks without salt (BlockHasher::Root("")): first blocks under another root
  // say so in extra_keys, so that a router does not take them for the common prefix.
  BlockHash common_root;
};

// [timestamp, events, data_parallel_rank]. timestamp: seconds since 1970. A run of kStored events
// in which each is the child of the one before becomes one BlockStored, neighbouring kRemoved of
// one tier one BlockRemoved; the order is kept.
std::string EncodeKvEvents(const std::vector<CacheEvent>& events, double timestamp,
                           const KvEventFormat& format);

// "GPU", "CPU" or "STORAGE": vLLM's names of the tiers.
const char* MediumName(CacheTier tier);

}  // namespace fathom
