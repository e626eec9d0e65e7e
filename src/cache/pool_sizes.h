// How many blocks, slots and bundles the cache's memory is divided into. The server reserves what
// these functions say, `fathom plan` prints it: one rule for both.
//
// Slots follow from the number of sequences that may run. What is left goes to blocks and bundles:
// kBundlesPerSlot of these for every slot (the ends of a prompt and of an answer, of it and of a
// session that waits) and one for every kTokensPerBundle tokens the blocks hold, but at most
// kBundleShare times the bytes of the blocks: a bundle is of use only with the blocks before it.
// Where memory is short, bundles give way to the blocks of the sequences that must fit, down to
// what one sequence of `context` tokens keeps.
#pragma once

#include <cstdint>

#include "cache/geometry.h"

namespace fathom {

struct PoolDemand {
  int64_t context = 0;    // tokens of the longest sequence, > 0
  int64_t sequences = 1;  // of that length that must fit together
  int64_t slots = 64;     // sequences that may run at once, >= sequences
  bool bundles = true;    // false: no prefix is ever kept
};

struct PoolSizes {
  int64_t blocks = 0;
  int64_t slots = 0;
  int64_t bundles = 0;

  int64_t bytes(const Geometry& geometry) const;
  bool operator==(const PoolSizes&) const = default;
};

inline constexpr int64_t kBundlesPerSlot = 4;
inline constexpr int64_t kTokensPerBundle = 4096;  // two of the default --bundle-interval
inline constexpr int64_t kBundleShare = 2;
inline constexpr int64_t kBundleInterval = 2048;  // default of --bundle-interval

// Bytes of one unit of the bundle pool: a bundle at the worst of all tokens.
int64_t BundleUnitBytes(const Geometry& geometry);

// Bundles that stay of one sequence once its interior ones have thinned out to geometric distances
// (kv-cache.md 3): at the ends of prompt and answer, and two for every doubling of the distance
// from the end in bundle intervals: 20 for 1,048,576 tokens.
int64_t BundlesKept(int64_t tokens);

// Bundles that go with so many blocks, at most 2^31 - 1 and no fewer than
// BundlesKept(demand.context) or than four slots are worth; 0 where the demand wants none.
int64_t BundlesFor(const Geometry& geometry, const PoolDemand& demand, int64_t blocks);

// What the demand cannot do without.
PoolSizes LeastPools(const Geometry& geometry, const PoolDemand& demand);

// Without a memory limit: the least, and 16 blocks (or the whole context, if that is less) for each
// slot where that is more.
PoolSizes DefaultPools(const Geometry& geometry, const PoolDemand& demand);

// As much as `bytes` hold; at least LeastPools, which the caller has seen to fit.
PoolSizes PoolsWithin(const Geometry& geometry, const PoolDemand& demand, int64_t bytes);

// The most sequences of `tokens` tokens that run together in pools of that size.
int64_t SequencesIn(const Geometry& geometry, const PoolSizes& pools, int64_t tokens);

// The most of them that any pools of `bytes` bytes allow: the value for --max-num-seqs.
int64_t MostSequences(const Geometry& geometry, PoolDemand demand, int64_t bytes);

// The longest context that `bytes` allow, at most demand.context; 0: not even one block.
int64_t LongestContext(const Geometry& geometry, PoolDemand demand, int64_t bytes);

}  // namespace fathom
