// A segment: one immutable file of the disk tier (format: docs/disk-tier.md). It holds the part of
// one prefix chain that no earlier file holds, tokens [begin, end): the payload of every block of
// the range, and some bundles (saved windows, opaque bytes) at token positions within it.
//
//   SegmentHeader header;                        // tokens 512..1300 of a chain
//   header.root = hasher.Root(salt);
//   header.parent = name_of_block_1;             // the block before token 512
//   header.begin = 512;
//   header.tokens = {...};                       // 788 of them: 3 whole blocks and a partial one
//   header.bundles = {{.at = 1300}};
//
// Everything here is plain data; a header that ParseSegmentHeader has accepted holds the invariants
// named at the fields.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/block_hash.h"
#include "core/ids.h"
#include "core/status.h"

namespace fathom {

inline constexpr uint32_t kSegmentVersion = 1;
inline constexpr int64_t kSegmentAlignment = 4096;  // of every part: pages, direct I/O
inline constexpr std::string_view kSegmentSuffix = ".fkv";

// Everything that must agree before one process may use another's rows: the model's configuration,
// the identity of its weights, dtypes, block size, layout and numerics, as one flat JSON object.
// The key "model" is what people see in `fathom cache ls`.
struct DiskFingerprint {
  BlockHash hash;    // SHA-256 of `json`
  std::string json;  // {"model": "DeepSeek-V4-Flash", "kv_cache_dtype": "fp8", ...}
};
DiskFingerprint MakeDiskFingerprint(std::string json);
// "kv_cache_dtype is "bf16" in the file and "fp8" here", at most three such differences.
std::string FingerprintDifference(std::string_view file_json, std::string_view own_json);

// Where a part lies in the file, and what it must hash to.
struct SegmentPartEntry {
  int64_t at = 0;         // block: its first token; bundle: the token position it was saved at
  int64_t offset = 0;     // from the start of the file, a multiple of kSegmentAlignment
  int64_t bytes = 0;      // block: block_bytes
  uint64_t checksum = 0;  // XXH3-64 of the part's bytes
};

struct SegmentBundle {
  int64_t at = 0;  // in (begin, end]; ascending, no two the same
};

struct SegmentHeader {
  BlockHash root;                      // of the chain: stands for the salt
  BlockHash parent;                    // name of the block before `begin`; the root for begin = 0
  int64_t begin = 0;                   // a multiple of block_tokens
  std::vector<TokenId> tokens;         // of [begin, end), at least one
  std::vector<SegmentBundle> bundles;  // in the order in which they are written
  std::string session;                 // for people: a session id, or empty

  // Filled in by the store when the segment is written or read.
  DiskFingerprint fingerprint;
  HashAlgorithm algorithm = HashAlgorithm::kXxh3;
  int64_t block_tokens = 0;
  int64_t block_bytes = 0;
  int64_t created_us = 0;                // microseconds since 1970, UTC
  std::vector<BlockHash> block_names;    // of the whole blocks; computed, only the last is stored
  std::vector<SegmentPartEntry> blocks;  // the last one may be partial
  std::vector<SegmentPartEntry> bundle_parts;  // one for each of `bundles`
  int64_t file_bytes = 0;
  uint64_t checksum = 0;  // of the encoded header

  int64_t end() const { return begin + static_cast<int64_t>(tokens.size()); }
  // The parent of what follows this segment, if it ends with a whole block.
  const BlockHash& last_block() const { return block_names.empty() ? parent : block_names.back(); }
};

// A part of a segment: block or bundle number `index`, from 0.
struct SegmentPart {
  enum class Kind : uint8_t { kBlock, kBundle };
  Kind kind = Kind::kBlock;
  int32_t index = 0;
  auto operator<=>(const SegmentPart&) const = default;
};
inline SegmentPart BlockPart(int32_t index) {
  return {SegmentPart::Kind::kBlock, index};
}
inline SegmentPart BundlePart(int32_t index) {
  return {SegmentPart::Kind::kBundle, index};
}
std::string PartName(SegmentPart part);  // "block 3"

// Null when the segment has no such part.
const SegmentPartEntry* FindPart(const SegmentHeader& header, SegmentPart part);

// 40 hex digits and kSegmentSuffix: SHA-256 of fingerprint, root, parent, begin and tokens. Files
// of different models never meet under one name.
std::string SegmentFileName(const SegmentHeader& header);

// Bytes of the encoded header: known before any part is written, as it depends on counts alone.
int64_t SegmentHeaderBytes(const SegmentHeader& header);
// Names the whole blocks from root, parent and tokens (block_names).
void NameBlocks(SegmentHeader& header);
// The encoded header; fills in header.checksum. `blocks` and `bundle_parts` must be complete.
std::vector<std::byte> EncodeSegmentHeader(SegmentHeader& header);

// Writes the checksum of an encoded header into its place and returns it.
uint64_t SealSegmentHeader(std::span<std::byte> encoded);

uint64_t PartChecksum(std::span<const std::byte> bytes);

// What the first kSegmentPrefixBytes of a file say, checked no further than that: how long the
// header is. kInvalidArgument: no segment (magic); kUnimplemented: another format version;
// kDataLoss: a length that cannot be. `file_bytes` is the file's real size.
inline constexpr int64_t kSegmentPrefixBytes = 24;
Expected<int64_t> SegmentHeaderLength(std::span<const std::byte> prefix, int64_t file_bytes,
                                      std::string_view origin);

// Checks the whole header (checksum, counts, offsets, order, the chain of names) against the file's
// real size. Errors name `origin` and the field, with the codes of SegmentHeaderLength.
Expected<SegmentHeader> ParseSegmentHeader(std::span<const std::byte> bytes, int64_t file_bytes,
                                           std::string_view origin);

}  // namespace fathom
