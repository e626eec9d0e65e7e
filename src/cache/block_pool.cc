#include "cache/block_pool.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace fathom {
namespace {

// Transparent huge pages are worth asking for from here on: attention gathers rows from all over
// the reservation, and 4 KiB pages would miss the TLB on most of them.
constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// 0 on top of the stack, so that a fresh pool hands out 0, 1, 2, ...
std::vector<int32_t> FullFreeList(int32_t count) {
  FATHOM_CHECK(count >= 0);
  std::vector<int32_t> free(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) free[static_cast<size_t>(i)] = count - 1 - i;
  return free;
}

}  // namespace

Expected<Reservation> Reservation::Make(int64_t bytes, std::string_view what) {
  if (bytes < 0) {
    return Fail(Code::kInvalidArgument, "{}: cannot reserve {} bytes", what, bytes);
  }
  if (bytes == 0) return Reservation(nullptr, 0, nullptr);
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return Fail(Code::kResourceExhausted, "{}: cannot reserve {} bytes ({:.2f} GiB): {}", what,
                bytes, static_cast<double>(bytes) / (1 << 30), std::strerror(errno));
  }
  if (bytes >= kHugePageBytes) madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return Reservation(static_cast<std::byte*>(data), bytes, [](std::byte* memory, int64_t size) {
    munmap(memory, static_cast<size_t>(size));
  });
}

Reservation::Reservation(Reservation&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      release_(other.release_) {}

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(release_, other.release_);
  return *this;
}

Reservation::~Reservation() {
  if (data_ != nullptr) release_(data_, size_);
}

BlockPool::BlockPool(std::byte* base, int64_t unit_bytes, int32_t count)
    : base_(base), unit_bytes_(unit_bytes), references_(count), free_(FullFreeList(count)) {}

std::optional<BlockId> BlockPool::Allocate() {
  if (free_.empty()) return std::nullopt;
  const int32_t unit = free_.back();
  free_.pop_back();
  references_[static_cast<size_t>(unit)] = {1, 0};
  return BlockId{unit};
}

void BlockPool::Change(BlockId block, int32_t all, int32_t cached) {
  FATHOM_CHECK(block.value >= 0 && block.value < capacity());
  const bool before = evictable(block);
  References& references = references_[Index(block)];
  FATHOM_CHECK(references.all > 0);
  references.all += all;
  references.cached += cached;
  FATHOM_CHECK(references.cached >= 0 && references.cached <= references.all);
  evictable_ += int{evictable(block)} - int{before};
  if (references.all == 0) free_.push_back(block.value);
}

void BlockPool::Retain(BlockId block) {
  Change(block, 1, 0);
}
void BlockPool::Release(BlockId block) {
  Change(block, -1, 0);
}
void BlockPool::RetainCached(BlockId block) {
  Change(block, 1, 1);
}
void BlockPool::ReleaseCached(BlockId block) {
  Change(block, -1, -1);
}

template <class Id>
UnitPool<Id>::UnitPool(std::byte* base, int64_t unit_bytes, int32_t count)
    : base_(base), unit_bytes_(unit_bytes), in_use_(count, false), free_(FullFreeList(count)) {}

template <class Id>
std::optional<Id> UnitPool<Id>::Allocate() {
  if (free_.empty()) return std::nullopt;
  const int32_t unit = free_.back();
  free_.pop_back();
  in_use_[static_cast<size_t>(unit)] = true;
  return Id{unit};
}

template <class Id>
void UnitPool<Id>::Release(Id unit) {
  FATHOM_CHECK(unit.value >= 0 && unit.value < capacity());
  FATHOM_CHECK(in_use_[static_cast<size_t>(unit.value)]);
  in_use_[static_cast<size_t>(unit.value)] = false;
  free_.push_back(unit.value);
}

template class UnitPool<SlotId>;
template class UnitPool<BundleId>;
template class UnitPool<BlockId>;

}  // namespace fathom
