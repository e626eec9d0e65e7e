// Any bytes as a segment's header, as they are and with a right checksum: a header that passes has
// all its parts inside the file and encodes to the same bytes again.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cache/disk_segment.h"

namespace {

using fathom::kSegmentPrefixBytes;

void Parse(const std::vector<std::byte>& bytes, int64_t file_bytes) {
  const auto length = fathom::SegmentHeaderLength(bytes, file_bytes, "fuzz");
  if (!length) {
    if (length.error().message.empty()) std::abort();
    return;
  }
  if (*length > static_cast<int64_t>(bytes.size())) return;
  auto header = fathom::ParseSegmentHeader(bytes, file_bytes, "fuzz");
  if (!header) {
    if (header.error().message.empty()) std::abort();
    return;
  }
  for (const auto* entries : {&header->blocks, &header->bundle_parts}) {
    for (const fathom::SegmentPartEntry& entry : *entries) {
      if (entry.offset < *length || entry.bytes <= 0) std::abort();
      if (entry.bytes > file_bytes - entry.offset) std::abort();
    }
  }
  const std::vector<std::byte> again = fathom::EncodeSegmentHeader(*header);
  if (!std::equal(again.begin(), again.end(), bytes.begin())) std::abort();
  if (fathom::SegmentFileName(*header).size() != 44) std::abort();
  (void)fathom::FingerprintDifference(header->fingerprint.json, R"({"model": "fuzz"})");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::byte> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), data, size);
  Parse(bytes, static_cast<int64_t>(size));
  if (size < 216 || size > (size_t{1} << 20)) return 0;
  // A mutation survives only with the checksum and the length that fit it.
  const auto length = static_cast<uint32_t>(size);
  std::memcpy(bytes.data() + 12, &length, sizeof(length));
  fathom::SealSegmentHeader(bytes);
  int64_t file_bytes = 0;
  std::memcpy(&file_bytes, bytes.data() + kSegmentPrefixBytes, sizeof(file_bytes));
  if (file_bytes >= static_cast<int64_t>(size)) Parse(bytes, file_bytes);
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  (void)fathom::FingerprintDifference(text, text.substr(size / 2));
  return 0;
}
