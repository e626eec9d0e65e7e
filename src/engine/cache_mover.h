// CacheMover: carries out the prefix cache's CacheOps through an Executor, in order.
#pragma once

#include <span>

#include "cache/block_pool.h"
#include "cache/cache_op.h"
#include "cache/disk_tier.h"
#include "cache/prefix_cache.h"
#include "cache/window_kinds.h"
#include "engine/executor.h"

namespace fathom {

class CacheMover : public CacheReader {
 public:
  // Borrows all but the geometry; `host` may be null.
  CacheMover(const Geometry& geometry, BlockPool& blocks, SlotPool& slots, BundlePool& bundles,
             HostTier* host, Executor& executor)
      : kinds_(geometry),
        blocks_(blocks),
        slots_(slots),
        bundles_(bundles),
        host_(host),
        executor_(executor) {}

  void Run(std::span<const CacheOp> ops);

  std::vector<std::byte> ReadBlock(BlockId block) override;
  std::vector<std::byte> ReadHostBlock(BlockId block) override;
  std::vector<std::byte> ReadBundle(BundleId bundle, int64_t tokens) override;
  std::vector<std::byte> ReadHostBundle(BundleId bundle, int64_t tokens) override;

  const WindowKinds& kinds() const { return kinds_; }

 private:
  void Run(const CacheOp& op);
  void CopySlot(std::byte* to, const std::byte* from, int64_t tokens, bool save);

  WindowKinds kinds_;
  BlockPool& blocks_;
  SlotPool& slots_;
  BundlePool& bundles_;
  HostTier* host_;
  Executor& executor_;
  std::vector<CopyRun> runs_;
};

}  // namespace fathom
