// The disk tier's folder as `fathom cache` shows it, whoever's segments it holds.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cache/disk_catalog.h"
#include "cache/disk_folder.h"
#include "core/status.h"

namespace fathom {

struct RefusedSegment {
  std::string name;
  std::string reason;           // a sentence that begins with the name
  Code code = Code::kDataLoss;  // damaged; others: see ReadSegmentHeader
  int64_t bytes = 0;
  // Links, folders, pipes and other format versions: nobody's damage, left as they are.
  bool foreign = false;
};

struct CacheListing {
  std::string path;
  DiskCatalog catalog;
  std::vector<RefusedSegment> refused;
  std::vector<FolderFile> put_aside;    // *.bad; regular files, as of the following
  std::vector<FolderFile> temporaries;  // being written, or left by a writer that died
};

// Reads all headers. kNotFound, kInvalidArgument: `path` is missing or no folder.
Expected<CacheListing> ListCache(DiskIo& io, const std::string& path);

// The segment whose file name begins with `name`. kNotFound, kInvalidArgument (more than one);
// kDataLoss: it is refused, kUnimplemented: and foreign.
Expected<const DiskCatalog::Entry*> FindSegment(const CacheListing& listing,
                                                const std::string& name);

// One line a segment, parents before children, then what is refused and a sum. `now_ns`:
// NowNanoseconds().
std::string ListingText(const CacheListing& listing, int64_t now_ns);
nlohmann::ordered_json ListingJson(const CacheListing& listing);

// Header, parts and the chain of parents.
std::string SegmentText(const CacheListing& listing, const DiskCatalog::Entry& entry);
nlohmann::ordered_json SegmentJson(const CacheListing& listing, const DiskCatalog::Entry& entry);

// "45 s", "3 h", "12 d".
std::string Age(int64_t nanoseconds);

}  // namespace fathom
