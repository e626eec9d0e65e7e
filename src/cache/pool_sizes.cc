#include "cache/pool_sizes.h"

#include <algorithm>
#include <bit>

#include "cache/window_kinds.h"
#include "core/status.h"

namespace fathom {
namespace {

// Block and bundle ids are int32.
constexpr int64_t kMostUnits = INT32_MAX;

// The largest n in [0, most] for which fits(n); fits(0) is not asked, and fits is monotone.
template <class Fits>
int64_t Largest(int64_t most, Fits&& fits) {
  int64_t low = 0;
  while (low < most) {
    const int64_t middle = low + (most - low + 1) / 2;
    if (fits(middle)) low = middle;
    else most = middle - 1;
  }
  return low;
}

PoolSizes WithBlocks(const Geometry& geometry, const PoolDemand& demand, int64_t blocks) {
  return {blocks, demand.slots, BundlesFor(geometry, demand, blocks)};
}

}  // namespace

int64_t BundleUnitBytes(const Geometry& geometry) {
  return WindowKinds(geometry).max_bundle_bytes();
}

int64_t PoolSizes::bytes(const Geometry& geometry) const {
  return blocks * geometry.block_bytes + slots * geometry.slot_bytes +
         bundles * BundleUnitBytes(geometry);
}

int64_t BundlesKept(int64_t tokens) {
  const auto intervals = static_cast<uint64_t>(std::max<int64_t>(tokens / kBundleInterval, 1));
  return 2 + 2 * (static_cast<int64_t>(std::bit_width(intervals)) - 1);
}

int64_t BundlesFor(const Geometry& geometry, const PoolDemand& demand, int64_t blocks) {
  if (!demand.bundles) return 0;
  const int64_t tokens = blocks * geometry.options.block_tokens;
  const int64_t wanted = kBundlesPerSlot * demand.slots + tokens / kTokensPerBundle;
  const int64_t as_blocks =
      geometry.block_bytes == 0
          ? wanted
          : kBundleShare * blocks * geometry.block_bytes / BundleUnitBytes(geometry);
  const int64_t few = kBundlesPerSlot * std::min<int64_t>(demand.slots, 4);
  const int64_t least = std::max(BundlesKept(demand.context), few);
  return std::clamp(std::min(wanted, as_blocks), least, kMostUnits);
}

PoolSizes LeastPools(const Geometry& geometry, const PoolDemand& demand) {
  FATHOM_CHECK(demand.context > 0 && demand.sequences > 0 && demand.slots >= demand.sequences);
  return {demand.sequences * geometry.blocks_for(demand.context), demand.slots,
          demand.bundles ? BundlesKept(demand.context) : 0};
}

PoolSizes DefaultPools(const Geometry& geometry, const PoolDemand& demand) {
  const int64_t one = geometry.blocks_for(demand.context);
  const int64_t blocks =
      std::max(LeastPools(geometry, demand).blocks, std::min<int64_t>(one, 16) * demand.slots);
  return WithBlocks(geometry, demand, std::min(blocks, kMostUnits));
}

PoolSizes PoolsWithin(const Geometry& geometry, const PoolDemand& demand, int64_t bytes) {
  PoolSizes least = LeastPools(geometry, demand);
  FATHOM_CHECK(least.bytes(geometry) <= bytes);
  // Without compressed layers blocks cost nothing: the least is enough.
  const int64_t most =
      geometry.block_bytes == 0 ? least.blocks : std::min(kMostUnits, bytes / geometry.block_bytes);
  const int64_t blocks = Largest(
      most, [&](int64_t n) { return WithBlocks(geometry, demand, n).bytes(geometry) <= bytes; });
  if (blocks >= least.blocks) return WithBlocks(geometry, demand, blocks);
  if (demand.bundles) {
    least.bundles += (bytes - least.bytes(geometry)) / BundleUnitBytes(geometry);
  }
  return least;
}

int64_t SequencesIn(const Geometry& geometry, const PoolSizes& pools, int64_t tokens) {
  return std::min(pools.slots, pools.blocks / std::max<int64_t>(geometry.blocks_for(tokens), 1));
}

int64_t MostSequences(const Geometry& geometry, PoolDemand demand, int64_t bytes) {
  if (bytes <= 0) return 0;
  const int64_t most = bytes / std::max<int64_t>(geometry.slot_bytes, 1);
  return Largest(most, [&](int64_t n) {
    demand.sequences = demand.slots = n;
    return LeastPools(geometry, demand).bytes(geometry) <= bytes;
  });
}

int64_t LongestContext(const Geometry& geometry, PoolDemand demand, int64_t bytes) {
  const int64_t block = geometry.options.block_tokens;
  const int64_t most = geometry.blocks_for(demand.context);
  const int64_t context = demand.context;
  const int64_t blocks = Largest(most, [&](int64_t n) {
    demand.context = std::min(context, n * block);
    return LeastPools(geometry, demand).bytes(geometry) <= bytes;
  });
  return std::min(context, blocks * block);
}

}  // namespace fathom
