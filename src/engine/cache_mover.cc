#include "engine/cache_mover.h"

namespace fathom {

void CacheMover::Run(std::span<const CacheOp> ops) {
  for (const CacheOp& op : ops) Run(op);
}

void CacheMover::CopySlot(std::byte* to, const std::byte* from, int64_t tokens, bool save) {
  runs_.clear();
  for (const ByteRun& run : kinds_.Runs(tokens)) {
    if (save) runs_.push_back({.to = run.bundle, .from = run.slot, .bytes = run.bytes});
    else runs_.push_back({.to = run.slot, .from = run.bundle, .bytes = run.bytes});
  }
  executor_.CopyRuns(to, from, runs_);
}

std::vector<std::byte> CacheMover::ReadBlock(BlockId block) {
  std::vector<std::byte> bytes(static_cast<size_t>(blocks_.unit_bytes()));
  executor_.ToHost(bytes.data(), blocks_.address(block), blocks_.unit_bytes());
  return bytes;
}

std::vector<std::byte> CacheMover::ReadHostBlock(BlockId block) {
  const std::byte* from = host_->blocks.address(block);
  return {from, from + blocks_.unit_bytes()};
}

std::vector<std::byte> CacheMover::ReadBundle(BundleId bundle, int64_t tokens) {
  std::vector<std::byte> bytes(static_cast<size_t>(kinds_.BundleBytes(tokens)));
  executor_.ToHost(bytes.data(), bundles_.address(bundle), kinds_.BundleBytes(tokens));
  return bytes;
}

std::vector<std::byte> CacheMover::ReadHostBundle(BundleId bundle, int64_t tokens) {
  const std::byte* from = host_->bundles.address(bundle);
  return {from, from + kinds_.BundleBytes(tokens)};
}

void CacheMover::Run(const CacheOp& op) {
  const int64_t block = blocks_.unit_bytes();
  const BlockId from_block{op.from}, to_block{op.to};
  const BundleId from_bundle{op.from}, to_bundle{op.to};
  switch (op.kind) {
    case CacheOp::Kind::kClearSlot:
      executor_.ClearSlot(
          {slots_.address(SlotId{op.to}), static_cast<size_t>(slots_.unit_bytes())});
      break;
    case CacheOp::Kind::kSaveSlot:
      CopySlot(bundles_.address(to_bundle), slots_.address(SlotId{op.from}), op.tokens, true);
      break;
    case CacheOp::Kind::kRestoreSlot:
      CopySlot(slots_.address(SlotId{op.to}), bundles_.address(from_bundle), op.tokens, false);
      break;
    case CacheOp::Kind::kCopyBlock: {
      const CopyRun whole{0, 0, block};
      executor_.CopyRuns(blocks_.address(to_block), blocks_.address(from_block), {&whole, 1});
      break;
    }
    case CacheOp::Kind::kBlockToHost:
      executor_.ToHost(host_->blocks.address(to_block), blocks_.address(from_block), block);
      break;
    case CacheOp::Kind::kBlockFromHost:
      executor_.FromHost(blocks_.address(to_block), host_->blocks.address(from_block), block);
      break;
    case CacheOp::Kind::kBundleToHost:
      executor_.ToHost(host_->bundles.address(to_bundle), bundles_.address(from_bundle),
                       kinds_.BundleBytes(op.tokens));
      break;
    case CacheOp::Kind::kBundleFromHost:
      executor_.FromHost(bundles_.address(to_bundle), host_->bundles.address(from_bundle),
                         kinds_.BundleBytes(op.tokens));
      break;
    case CacheOp::Kind::kBlockFromBuffer:
      executor_.FromHost(blocks_.address(to_block), op.buffer->data(),
                         static_cast<int64_t>(op.buffer->size()));
      break;
    case CacheOp::Kind::kBundleFromBuffer:
      executor_.FromHost(bundles_.address(to_bundle), op.buffer->data(),
                         static_cast<int64_t>(op.buffer->size()));
      break;
  }
}

}  // namespace fathom
