// BlockPool, SlotPool and BundlePool: fixed-size units on a free list over one reservation made at
// start.
// Fragmentation cannot occur: allocation succeeds whenever a unit is free.
//
//   BlockPool pool(memory, geometry.block_bytes, 4096);
//   auto block = pool.Allocate();       // reference count 1
//   pool.Retain(*block);                // shared by a prefix: 2
//   pool.Release(*block);  ...
//
// The prefix cache holds blocks too. A block that nothing else holds is *evictable*: not free, but
// to be had for the asking.
//
// Free units are handed out last-in first-out, so a small working set stays in cache and TLB, and
// the order of a run is reproducible. Allocate and Release are O(1). Releasing a free unit is a
// mistake of ours and aborts.
//
// Not thread-safe: the engine thread owns both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "core/ids.h"
#include "core/status.h"

namespace fathom {

// Zero-filled memory for a pool, returned at destruction: of the host, page-aligned, or of a
// device.
class Reservation {
 public:
  // `what` names the purpose in the error ("KV blocks"). The mapping counts against the system's
  // commit limit (no MAP_NORESERVE), so a size the machine cannot back is refused here and not by
  // a kill in the middle of a request. 0 bytes is a valid, empty reservation.
  static Expected<Reservation> Make(int64_t bytes, std::string_view what);
  // Memory of another kind, given back by release(data, size).
  using Release = void (*)(std::byte* data, int64_t size);
  static Reservation Adopt(std::byte* data, int64_t size, Release release) {
    return {data, size, release};
  }
  Reservation(Reservation&&) noexcept;
  Reservation& operator=(Reservation&&) noexcept;
  ~Reservation();
  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  Reservation(std::byte* data, int64_t size, Release release)
      : data_(data), size_(size), release_(release) {}
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
  Release release_ = nullptr;
};

// Where the pools' memory comes from: Reservation::Make, or a device's allocator.
using MemorySource = std::function<Expected<Reservation>(int64_t bytes, std::string_view what)>;

class BlockPool {
 public:
  // `base` holds count * unit_bytes bytes and outlives the pool (it may be device memory: the pool
  // never touches it).
  BlockPool(std::byte* base, int64_t unit_bytes, int32_t count);

  std::optional<BlockId> Allocate();
  void Retain(BlockId block);
  void Release(BlockId block);  // back on the free list at count 0
  int32_t references(BlockId block) const { return references_[Index(block)].all; }

  // The same for references that the prefix cache holds.
  void RetainCached(BlockId block);
  void ReleaseCached(BlockId block);
  // Whether only the prefix cache holds the block.
  bool evictable(BlockId block) const {
    const References& references = references_[Index(block)];
    return references.cached > 0 && references.cached == references.all;
  }

  int32_t capacity() const { return static_cast<int32_t>(references_.size()); }
  int32_t free_count() const { return static_cast<int32_t>(free_.size()); }
  int32_t evictable_count() const { return evictable_; }
  int32_t available() const { return free_count() + evictable_; }
  int32_t used_count() const { return capacity() - free_count(); }  // evictable ones included
  std::byte* base() const { return base_; }
  std::byte* address(BlockId block) const { return base_ + block.value * unit_bytes_; }
  int64_t unit_bytes() const { return unit_bytes_; }

 private:
  struct References {
    int32_t all = 0;
    int32_t cached = 0;  // of them the prefix cache's
  };
  size_t Index(BlockId block) const { return static_cast<size_t>(block.value); }
  // Adds to the counts of an allocated block and keeps evictable_ true.
  void Change(BlockId block, int32_t all, int32_t cached);

  std::byte* base_;
  int64_t unit_bytes_;
  std::vector<References> references_;
  std::vector<int32_t> free_;
  int32_t evictable_ = 0;
};

// Units with one owner each.
template <class Id>
class UnitPool {
 public:
  UnitPool(std::byte* base, int64_t unit_bytes, int32_t count);

  std::optional<Id> Allocate();
  void Release(Id unit);

  int32_t capacity() const { return static_cast<int32_t>(in_use_.size()); }
  int32_t free_count() const { return static_cast<int32_t>(free_.size()); }
  int32_t used_count() const { return capacity() - free_count(); }
  std::byte* base() const { return base_; }
  std::byte* address(Id unit) const { return base_ + unit.value * unit_bytes_; }
  int64_t unit_bytes() const { return unit_bytes_; }

 private:
  std::byte* base_;
  int64_t unit_bytes_;
  std::vector<bool> in_use_;
  std::vector<int32_t> free_;
};

extern template class UnitPool<SlotId>;
extern template class UnitPool<BundleId>;
extern template class UnitPool<BlockId>;  // of the host tier
using SlotPool = UnitPool<SlotId>;        // the state of a running sequence
using BundlePool = UnitPool<BundleId>;    // saved slots

}  // namespace fathom
