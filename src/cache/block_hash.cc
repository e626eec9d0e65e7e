#include "cache/block_hash.h"

#include <openssl/sha.h>
#include <xxhash.h>

#include <algorithm>
#include <vector>

namespace fathom {
namespace {

using Bytes = std::vector<uint8_t>;

BlockHash Digest(HashAlgorithm algorithm, const Bytes& bytes) {
  BlockHash hash;
  if (algorithm == HashAlgorithm::kSha256) {
    SHA256(bytes.data(), bytes.size(), hash.bytes.data());
    return hash;
  }
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  std::copy(std::begin(canonical.digest), std::end(canonical.digest), hash.bytes.begin());
  return hash;
}

}  // namespace

uint64_t BlockHash::word() const {
  uint64_t value = 0;
  for (int i = 0; i < 8; ++i) value = value << 8 | bytes[static_cast<size_t>(i)];
  return value;
}

std::string BlockHash::Hex() const {
  constexpr char kDigits[] = "0123456789abcdef";
  const bool half = std::all_of(bytes.begin() + 16, bytes.end(), [](uint8_t b) { return b == 0; });
  std::string text;
  for (size_t i = 0; i < (half ? 16u : 32u); ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

BlockHash BlockHasher::Of(std::string_view bytes) const {
  return Digest(algorithm_, Bytes(bytes.begin(), bytes.end()));
}

BlockHash BlockHasher::Root(std::string_view salt) const {
  constexpr std::string_view kPurpose("fathom prefix root\0", 19);
  Bytes bytes(kPurpose.begin(), kPurpose.end());
  bytes.insert(bytes.end(), salt.begin(), salt.end());
  return Digest(algorithm_, bytes);
}

BlockHash BlockHasher::Next(const BlockHash& parent, std::span<const TokenId> tokens) const {
  Bytes bytes(parent.bytes.begin(), parent.bytes.end());
  bytes.reserve(bytes.size() + tokens.size() * sizeof(TokenId));
  for (const TokenId token : tokens) {  // little-endian, so that names are the same everywhere
    const auto id = static_cast<uint32_t>(token);
    for (int shift = 0; shift < 32; shift += 8) {
      bytes.push_back(static_cast<uint8_t>(id >> shift & 0xff));
    }
  }
  return Digest(algorithm_, bytes);
}

}  // namespace fathom
