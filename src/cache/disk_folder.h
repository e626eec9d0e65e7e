// The files of a disk tier's folder: listing, reading headers, verifying, temporary names. Shared
// by the store and by `fathom cache`.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cache/disk_io.h"
#include "cache/disk_segment.h"
#include "core/status.h"

namespace fathom {

inline constexpr std::string_view kBadSuffix = ".bad";        // after the whole name: x.fkv.bad
inline constexpr std::string_view kTemporarySuffix = ".tmp";  // x.fkv.<pid>.<random>.tmp

struct FolderFile {
  enum class Kind : uint8_t { kSegment, kBad, kTemporary };  // by name alone
  std::string name;
  Kind kind = Kind::kSegment;
  bool regular = true;  // neither folder nor link nor anything else
  int64_t bytes = 0;
  int64_t modified_ns = 0;
};

// The files whose names are the tier's, sorted by name; others are not looked at. kNotFound,
// kInvalidArgument: `path` is missing, no folder, or cannot be listed.
Expected<std::vector<FolderFile>> ListFolder(const std::string& path);

// Reads and checks a header (ParseSegmentHeader), and that the file has the name of its contents.
// Codes: kNotFound: it vanished; kUnavailable: the system refused, named; kInvalidArgument and
// kUnimplemented: not a segment of this format; kDataLoss: a damaged one.
Expected<SegmentHeader> ReadSegmentHeader(DiskIo& io, const std::string& folder,
                                          const std::string& name);

// Why a store with this fingerprint, hash, block size and slab cannot use the segment.
struct SegmentFormat {
  const DiskFingerprint* fingerprint;
  HashAlgorithm algorithm;
  int64_t block_tokens;
  int64_t block_bytes;
};
Status CheckFormat(const SegmentHeader& header, const SegmentFormat& own, std::string_view origin);
std::string_view HashAlgorithmName(HashAlgorithm algorithm);  // "xxh3", "sha256"

// Reads every part and compares its checksum: one sentence for each bad one.
std::vector<std::string> VerifyParts(DiskIo& io, const std::string& folder, const std::string& name,
                                     const SegmentHeader& header);

// "5: Input/output error" is of no use: "Input/output error".
std::string ErrnoText(int64_t negative_errno);

std::string TemporaryName(std::string_view segment_name);

// What interrupted writers have left. A writer holds a lock on its temporary file, which ends with
// its process, in whatever container it ran; where the file system has no locks, a temporary is
// stale after a day.
// `take` is called for each while its lock is held: what it removes has no writer, nor gets one.
void ForEachStaleTemporary(const std::string& folder, const std::vector<FolderFile>& files,
                           const std::function<void(const FolderFile&)>& take);

int64_t NowNanoseconds();  // since 1970

}  // namespace fathom
