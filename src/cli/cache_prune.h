// What `fathom cache prune` removes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/cache_listing.h"

namespace fathom {

struct PruneOptions {
  std::optional<int64_t> max_bytes;      // of usable segments
  std::optional<int64_t> older_than_ns;  // since they were last used
  bool bad = false;                      // damaged segments, *.bad, abandoned temporaries
  bool dry_run = false;
};

struct Pruned {
  std::string name;
  int64_t bytes = 0;
  std::string why;
};

// Segments go leaf by leaf, the least recently used first, so that what stays can be resumed from.
// Without dry_run the listing's catalog follows. Errors name the file that could not be removed;
// those before it are gone.
Expected<std::vector<Pruned>> Prune(DiskIo& io, CacheListing& listing, const PruneOptions& options);

// "90s", "30m", "12h", "7d", "2w" in nanoseconds.
Expected<int64_t> ParseDuration(const std::string& text);

}  // namespace fathom
