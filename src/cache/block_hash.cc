#include "cache/block_hash.h"

#include <openssl/sha.h>
#include <xxhash.h>

#include <algorithm>

namespace fathom {
namespace {

void Digest(HashAlgorithm algorithm, const std::string& bytes, BlockHash* out) {
  if (algorithm == HashAlgorithm::kSha256) {
    SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), out->bytes.data());
    return;
  }
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
  std::copy(std::begin(canonical.digest), std::end(canonical.digest), out->bytes.begin());
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
  BlockHash hash;
  Digest(algorithm_, std::string(bytes), &hash);
  return hash;
}

BlockHash BlockHasher::Root(std::string_view salt) const {
  std::string bytes("fathom prefix root\0", 19);
  bytes.append(salt);
  return Of(bytes);
}

BlockHash BlockHasher::Next(const BlockHash& parent, std::span<const TokenId> tokens) const {
  std::string bytes(parent.bytes.begin(), parent.bytes.end());
  for (const TokenId token : tokens) {  // little-endian, so that names are the same everywhere
    const auto id = static_cast<uint32_t>(token);
    for (int shift = 0; shift < 32; shift += 8) bytes += static_cast<char>(id >> shift & 0xff);
  }
  BlockHash hash;
  Digest(algorithm_, bytes, &hash);
  return hash;
}

}  // namespace fathom
