#include "cache/disk_segment.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

namespace fathom {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr char kMagic[8] = {'F', 'A', 'T', 'H', 'O', 'M', 'K', 'V'};
constexpr int64_t kFixedBytes = 216;  // everything before the token ids
constexpr int64_t kPartEntryBytes = 32;
// Far beyond any chain, far below what would make reading a damaged length a burden.
constexpr int64_t kMaxHeaderBytes = int64_t{256} << 20;
constexpr int64_t kMaxPosition = int64_t{1} << 40;  // no sum of positions overflows

int64_t AlignUp(int64_t bytes) {
  return (bytes + kSegmentAlignment - 1) / kSegmentAlignment * kSegmentAlignment;
}

int64_t BlocksOf(int64_t tokens, int64_t block_tokens) {
  return tokens / block_tokens + (tokens % block_tokens != 0 ? 1 : 0);
}

class Encoder {
 public:
  explicit Encoder(int64_t bytes) { bytes_.reserve(static_cast<size_t>(bytes)); }
  void Bytes(const void* data, size_t size) {
    const auto* begin = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), begin, begin + size);
  }
  template <class T>
  void Number(T value) {
    static_assert(std::is_integral_v<T>);
    Bytes(&value, sizeof(value));
  }
  void Hash(const BlockHash& hash) { Bytes(hash.bytes.data(), hash.bytes.size()); }
  std::vector<std::byte> Take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

// Reads what the caller has made sure is there.
class Decoder {
 public:
  explicit Decoder(std::span<const std::byte> bytes) : bytes_(bytes) {}
  void Bytes(void* out, size_t size) {
    FATHOM_CHECK(size <= bytes_.size() - at_);
    if (size > 0) std::memcpy(out, bytes_.data() + at_, size);
    at_ += size;
  }
  template <class T>
  T Number() {
    T value{};
    Bytes(&value, sizeof(value));
    return value;
  }
  BlockHash Hash() {
    BlockHash hash;
    Bytes(hash.bytes.data(), hash.bytes.size());
    return hash;
  }
  std::string Text(uint32_t size) {
    std::string text(size, '\0');
    Bytes(text.data(), size);
    return text;
  }

 private:
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
};

// Over everything but the field that holds it (bytes 16..23): what follows the field, seeded with
// what precedes it.
uint64_t HeaderChecksum(std::span<const std::byte> header) {
  return XXH3_64bits_withSeed(header.data() + kSegmentPrefixBytes,
                              header.size() - static_cast<size_t>(kSegmentPrefixBytes),
                              XXH3_64bits(header.data(), 16));
}

struct Counts {
  uint32_t blocks = 0, bundles = 0, json = 0, session = 0;
};

// The numbers of the fixed part agree with each other and with the header's length.
Status CheckCounts(const SegmentHeader& header, uint64_t tokens, const Counts& counts,
                   int64_t header_bytes, std::string_view origin) {
  const auto bad = [&](std::string_view what) {
    return Fail(Code::kDataLoss, "{}: {}", origin, what);
  };
  if (header.block_tokens <= 0 || header.block_bytes <= 0) {
    return bad("block_tokens or block_bytes is not positive");
  }
  if (header.begin < 0 || header.begin > kMaxPosition || header.begin % header.block_tokens != 0) {
    return bad(fmt::format("begin {} is no multiple of block_tokens {}", header.begin,
                           header.block_tokens));
  }
  if (tokens == 0 || tokens > static_cast<uint64_t>(header_bytes) / sizeof(TokenId)) {
    return bad(fmt::format("{} tokens do not fit the header", tokens));
  }
  if (int64_t{counts.blocks} != BlocksOf(static_cast<int64_t>(tokens), header.block_tokens)) {
    return bad(fmt::format("{} blocks for {} tokens", counts.blocks, tokens));
  }
  const int64_t expected = kFixedBytes + static_cast<int64_t>(tokens * sizeof(TokenId)) +
                           (int64_t{counts.blocks} + counts.bundles) * kPartEntryBytes +
                           counts.json + counts.session;
  if (expected != header_bytes) {
    return bad(fmt::format("header of {} bytes, its counts make {}", header_bytes, expected));
  }
  return {};
}

// Parts lie one after another, each at the next multiple of kSegmentAlignment, and the file ends
// with the last one: a layout with no freedom cannot overlap or point outside.
Status CheckLayout(const SegmentHeader& header, int64_t header_bytes, std::string_view origin) {
  int64_t end = header_bytes;
  const auto place = [&](const SegmentPartEntry& entry, SegmentPart part) -> Status {
    if (entry.offset != AlignUp(end) || entry.bytes <= 0 ||
        entry.bytes > header.file_bytes - entry.offset) {
      return Fail(Code::kDataLoss, "{}: {} at offset {} with {} bytes does not fit the layout",
                  origin, PartName(part), entry.offset, entry.bytes);
    }
    end = entry.offset + entry.bytes;
    return {};
  };
  for (size_t i = 0; i < header.blocks.size(); ++i) {
    const SegmentPartEntry& entry = header.blocks[i];
    FATHOM_TRY(place(entry, BlockPart(static_cast<int32_t>(i))));
    if (entry.bytes != header.block_bytes ||
        entry.at != header.begin + static_cast<int64_t>(i) * header.block_tokens) {
      return Fail(Code::kDataLoss, "{}: block {} is at token {} with {} bytes", origin, i, entry.at,
                  entry.bytes);
    }
  }
  int64_t previous = header.begin;
  for (size_t i = 0; i < header.bundle_parts.size(); ++i) {
    const SegmentPartEntry& entry = header.bundle_parts[i];
    FATHOM_TRY(place(entry, BundlePart(static_cast<int32_t>(i))));
    if (entry.at <= previous || entry.at > header.end()) {
      return Fail(Code::kDataLoss, "{}: bundle {} is at token {}", origin, i, entry.at);
    }
    previous = entry.at;
  }
  if (end != header.file_bytes) {
    return Fail(Code::kDataLoss, "{}: parts end at byte {} of {}", origin, end, header.file_bytes);
  }
  return {};
}

void EncodeEntry(Encoder& out, const SegmentPartEntry& entry) {
  out.Number<int64_t>(entry.at);
  out.Number<int64_t>(entry.offset);
  out.Number<int64_t>(entry.bytes);
  out.Number<uint64_t>(entry.checksum);
}

SegmentPartEntry DecodeEntry(Decoder& in) {
  SegmentPartEntry entry;
  entry.at = in.Number<int64_t>();
  entry.offset = in.Number<int64_t>();
  entry.bytes = in.Number<int64_t>();
  entry.checksum = in.Number<uint64_t>();
  return entry;
}

}  // namespace

std::string PartName(SegmentPart part) {
  return fmt::format("{} {}", part.kind == SegmentPart::Kind::kBlock ? "block" : "bundle",
                     part.index);
}

const SegmentPartEntry* FindPart(const SegmentHeader& header, SegmentPart part) {
  const auto& entries =
      part.kind == SegmentPart::Kind::kBlock ? header.blocks : header.bundle_parts;
  if (part.index < 0 || static_cast<size_t>(part.index) >= entries.size()) return nullptr;
  return &entries[static_cast<size_t>(part.index)];
}

std::string SegmentFileName(const SegmentHeader& header) {
  std::string bytes("fathom segment\0", 15);
  for (const BlockHash* hash : {&header.fingerprint.hash, &header.root, &header.parent}) {
    bytes.append(reinterpret_cast<const char*>(hash->bytes.data()), hash->bytes.size());
  }
  bytes.append(reinterpret_cast<const char*>(&header.begin), sizeof(header.begin));
  bytes.append(reinterpret_cast<const char*>(header.tokens.data()),
               header.tokens.size() * sizeof(TokenId));
  std::string name = BlockHasher(HashAlgorithm::kSha256).Of(bytes).Hex();
  name.resize(40, '0');
  return name.append(kSegmentSuffix);
}

int64_t SegmentHeaderBytes(const SegmentHeader& header) {
  const auto tokens = static_cast<int64_t>(header.tokens.size());
  return kFixedBytes + tokens * static_cast<int64_t>(sizeof(TokenId)) +
         (BlocksOf(tokens, header.block_tokens) + static_cast<int64_t>(header.bundles.size())) *
             kPartEntryBytes +
         static_cast<int64_t>(header.fingerprint.json.size() + header.session.size());
}

void NameBlocks(SegmentHeader& header) {
  const BlockHasher hasher(header.algorithm);
  const auto block_tokens = static_cast<size_t>(header.block_tokens);
  const std::span<const TokenId> tokens = header.tokens;
  header.block_names.clear();
  header.block_names.reserve(tokens.size() / block_tokens);
  BlockHash name = header.parent;
  for (size_t at = 0; tokens.size() - at >= block_tokens; at += block_tokens) {
    name = hasher.Next(name, tokens.subspan(at, block_tokens));
    header.block_names.push_back(name);
  }
}

std::vector<std::byte> EncodeSegmentHeader(SegmentHeader& header) {
  const int64_t header_bytes = SegmentHeaderBytes(header);
  FATHOM_CHECK(header.bundles.size() == header.bundle_parts.size());
  FATHOM_CHECK(header_bytes <= kMaxHeaderBytes);
  Encoder out(header_bytes);
  out.Bytes(kMagic, sizeof(kMagic));
  out.Number<uint32_t>(kSegmentVersion);
  out.Number<uint32_t>(static_cast<uint32_t>(header_bytes));
  out.Number<uint64_t>(0);  // the checksum's place
  out.Number<int64_t>(header.file_bytes);
  out.Hash(header.fingerprint.hash);
  out.Hash(header.root);
  out.Hash(header.parent);
  out.Hash(header.last_block());
  out.Number<int64_t>(header.begin);
  out.Number<uint64_t>(header.tokens.size());
  out.Number<int64_t>(header.created_us);
  out.Number<uint32_t>(static_cast<uint32_t>(header.block_tokens));
  out.Number<uint32_t>(static_cast<uint32_t>(header.algorithm));
  out.Number<int64_t>(header.block_bytes);
  out.Number<uint32_t>(static_cast<uint32_t>(header.blocks.size()));
  out.Number<uint32_t>(static_cast<uint32_t>(header.bundle_parts.size()));
  out.Number<uint32_t>(static_cast<uint32_t>(header.fingerprint.json.size()));
  out.Number<uint32_t>(static_cast<uint32_t>(header.session.size()));
  out.Bytes(header.tokens.data(), header.tokens.size() * sizeof(TokenId));
  for (const SegmentPartEntry& entry : header.blocks) EncodeEntry(out, entry);
  for (const SegmentPartEntry& entry : header.bundle_parts) EncodeEntry(out, entry);
  out.Bytes(header.fingerprint.json.data(), header.fingerprint.json.size());
  out.Bytes(header.session.data(), header.session.size());
  std::vector<std::byte> bytes = out.Take();
  FATHOM_CHECK(static_cast<int64_t>(bytes.size()) == header_bytes);
  header.checksum = SealSegmentHeader(bytes);
  return bytes;
}

uint64_t SealSegmentHeader(std::span<std::byte> encoded) {
  FATHOM_CHECK(static_cast<int64_t>(encoded.size()) >= kFixedBytes);
  const uint64_t checksum = HeaderChecksum(encoded);
  std::memcpy(encoded.data() + 16, &checksum, sizeof(checksum));
  return checksum;
}

uint64_t PartChecksum(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

Expected<int64_t> SegmentHeaderLength(std::span<const std::byte> prefix, int64_t file_bytes,
                                      std::string_view origin) {
  FATHOM_CHECK(prefix.size() >= static_cast<size_t>(std::min(kSegmentPrefixBytes, file_bytes)));
  const size_t magic = std::min(prefix.size(), sizeof(kMagic));
  if (magic == 0 || std::memcmp(prefix.data(), kMagic, magic) != 0) {
    return Fail(Code::kInvalidArgument, "{}: is no segment file", origin);
  }
  if (static_cast<int64_t>(prefix.size()) < kSegmentPrefixBytes) {
    return Fail(Code::kDataLoss, "{}: truncated: {} bytes", origin, file_bytes);
  }
  Decoder in(prefix.subspan(sizeof(kMagic)));
  if (const auto version = in.Number<uint32_t>(); version != kSegmentVersion) {
    return Fail(Code::kUnimplemented, "{}: format version {}, this program reads {}", origin,
                version, kSegmentVersion);
  }
  const int64_t length = in.Number<uint32_t>();
  if (length < kFixedBytes || length > kMaxHeaderBytes) {
    return Fail(Code::kDataLoss, "{}: a header of {} bytes cannot be", origin, length);
  }
  if (length > file_bytes) {
    return Fail(Code::kDataLoss, "{}: truncated: {} bytes, the header alone has {}", origin,
                file_bytes, length);
  }
  return length;
}

Expected<SegmentHeader> ParseSegmentHeader(std::span<const std::byte> bytes, int64_t file_bytes,
                                           std::string_view origin) {
  FATHOM_ASSIGN(const int64_t length, SegmentHeaderLength(bytes, file_bytes, origin));
  FATHOM_CHECK(static_cast<int64_t>(bytes.size()) >= length);
  bytes = bytes.first(static_cast<size_t>(length));
  Decoder in(bytes.subspan(16));
  const auto checksum = in.Number<uint64_t>();
  if (checksum != HeaderChecksum(bytes)) {
    return Fail(Code::kDataLoss, "{}: the header's checksum is wrong", origin);
  }
  SegmentHeader header;
  header.checksum = checksum;
  header.file_bytes = in.Number<int64_t>();
  header.fingerprint.hash = in.Hash();
  header.root = in.Hash();
  header.parent = in.Hash();
  const BlockHash last_block = in.Hash();
  header.begin = in.Number<int64_t>();
  const auto tokens = in.Number<uint64_t>();
  header.created_us = in.Number<int64_t>();
  header.block_tokens = in.Number<uint32_t>();
  const auto algorithm = in.Number<uint32_t>();
  header.block_bytes = in.Number<int64_t>();
  Counts counts;
  counts.blocks = in.Number<uint32_t>();
  counts.bundles = in.Number<uint32_t>();
  counts.json = in.Number<uint32_t>();
  counts.session = in.Number<uint32_t>();
  if (header.file_bytes != file_bytes) {
    return Fail(Code::kDataLoss, "{}: {}: {} bytes, {} were written", origin,
                file_bytes < header.file_bytes ? "truncated" : "bytes follow the end", file_bytes,
                header.file_bytes);
  }
  if (algorithm > static_cast<uint32_t>(HashAlgorithm::kSha256)) {
    return Fail(Code::kDataLoss, "{}: hash algorithm {} is not known", origin, algorithm);
  }
  header.algorithm = static_cast<HashAlgorithm>(algorithm);
  FATHOM_TRY(CheckCounts(header, tokens, counts, length, origin));

  header.tokens.resize(static_cast<size_t>(tokens));
  in.Bytes(header.tokens.data(), header.tokens.size() * sizeof(TokenId));
  for (uint32_t i = 0; i < counts.blocks; ++i) header.blocks.push_back(DecodeEntry(in));
  for (uint32_t i = 0; i < counts.bundles; ++i) {
    header.bundle_parts.push_back(DecodeEntry(in));
    header.bundles.push_back({.at = header.bundle_parts.back().at});
  }
  header.fingerprint.json = in.Text(counts.json);
  header.session = in.Text(counts.session);
  FATHOM_TRY(CheckLayout(header, length, origin));

  const auto negative = std::find_if(header.tokens.begin(), header.tokens.end(),
                                     [](TokenId token) { return token < 0; });
  if (negative != header.tokens.end()) {
    return Fail(Code::kDataLoss, "{}: token {} has id {}", origin,
                header.begin + (negative - header.tokens.begin()), *negative);
  }
  if (MakeDiskFingerprint(header.fingerprint.json).hash != header.fingerprint.hash) {
    return Fail(Code::kDataLoss, "{}: the fingerprint is not that of its text", origin);
  }
  if (header.begin == 0 && header.parent != header.root) {
    return Fail(Code::kDataLoss, "{}: begins at token 0, but its parent is not the root", origin);
  }
  NameBlocks(header);
  if (header.last_block() != last_block) {
    return Fail(Code::kDataLoss, "{}: the name of the last block is not that of its tokens",
                origin);
  }
  return header;
}

}  // namespace fathom
