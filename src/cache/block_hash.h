// Names of blocks: a hash chain over (parent, the block's token ids), begun by a root that stands
// for the salt. Equal names mean equal token prefixes under the same salt.
//
//   BlockHasher hasher(HashAlgorithm::kXxh3);
//   BlockHash name = hasher.Root("tenant-7");
//   name = hasher.Next(name, tokens.subspan(0, 256));      // block 0
//
// XXH3-128 is fast and not collision-resistant against an attacker; SHA-256 is for tenants who must
// not be able to collide. A name never decides alone: the index compares the token ids too.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "core/ids.h"

namespace fathom {

enum class HashAlgorithm : uint8_t { kXxh3, kSha256 };

struct BlockHash {
  std::array<uint8_t, 32> bytes{};  // XXH3-128 fills the first 16, the rest is 0
  auto operator<=>(const BlockHash&) const = default;
  // The first eight bytes as a big-endian number: the short name in KV events.
  uint64_t word() const;
  std::string Hex() const;  // 64 digits; 32 when the last 16 bytes are 0
};

class BlockHasher {
 public:
  explicit BlockHasher(HashAlgorithm algorithm = HashAlgorithm::kXxh3) : algorithm_(algorithm) {}
  // The parent of every first block under `salt`; "" is the common one.
  BlockHash Root(std::string_view salt) const;
  BlockHash Next(const BlockHash& parent, std::span<const TokenId> tokens) const;
  // Of any bytes, for fingerprints.
  BlockHash Of(std::string_view bytes) const;
  HashAlgorithm algorithm() const { return algorithm_; }

 private:
  HashAlgorithm algorithm_;
};

}  // namespace fathom

template <>
struct std::hash<fathom::BlockHash> {
  size_t operator()(const fathom::BlockHash& hash) const noexcept {
    size_t value = 0;
    std::memcpy(&value, hash.bytes.data(), sizeof(value));
    return value;
  }
};
