#include "cache/block_hash.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace fathom {
namespace {

TEST(BlockHash, NamesDependOnEveryTokenOnTheParentAndOnTheSalt) {
  for (const HashAlgorithm algorithm : {HashAlgorithm::kXxh3, HashAlgorithm::kSha256}) {
    const BlockHasher hasher(algorithm);
    std::vector<TokenId> tokens(256, 7);
    std::set<BlockHash> names;
    for (const char* salt : {"", "a", "b"}) {
      const BlockHash root = hasher.Root(salt);
      names.insert(root);
      names.insert(hasher.Next(root, tokens));
      names.insert(hasher.Next(hasher.Next(root, tokens), tokens));
      for (size_t i = 0; i < tokens.size(); i += 17) {
        ++tokens[i];
        names.insert(hasher.Next(root, tokens));
        --tokens[i];
      }
    }
    EXPECT_EQ(names.size(), 3u * (3 + 16));
    EXPECT_EQ(hasher.Next(hasher.Root(""), tokens), hasher.Next(hasher.Root(""), tokens));
  }
}

// Published digests of the empty string, and of "abc".
TEST(BlockHash, AreTheAlgorithmsTheyClaimToBe) {
  EXPECT_EQ(BlockHasher(HashAlgorithm::kXxh3).Of("").Hex(), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(BlockHasher(HashAlgorithm::kSha256).Of("abc").Hex(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

}  // namespace
}  // namespace fathom
