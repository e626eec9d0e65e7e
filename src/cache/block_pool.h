// BlockPool and SlotPool: fixed-size units on a free list over one reservation made at start.
// Fragmentation cannot occur: allocation succeeds whenever a unit is free.
//
//   BlockPool pool(memory, geometry.block_bytes, 4096);
//   auto block = pool.Allocate();       // reference count 1
//   pool.Retain(*block);                // shared by a prefix: 2
//   pool.Release(*block);  ...
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
  int32_t references(BlockId block) const { return references_[block.value]; }

  int32_t capacity() const { return static_cast<int32_t>(references_.size()); }
  int32_t free_count() const { return static_cast<int32_t>(free_.size()); }
  int32_t used_count() const { return capacity() - free_count(); }
  std::byte* base() const { return base_; }
  std::byte* address(BlockId block) const { return base_ + block.value * unit_bytes_; }
  int64_t unit_bytes() const { return unit_bytes_; }

 private:
  std::byte* base_;
  int64_t unit_bytes_;
  std::vector<int32_t> references_;
  std::vector<int32_t> free_;
};

class SlotPool {
 public:
  SlotPool(std::byte* base, int64_t unit_bytes, int32_t count);

  std::optional<SlotId> Allocate();
  void Release(SlotId slot);

  int32_t capacity() const { return static_cast<int32_t>(in_use_.size()); }
  int32_t free_count() const { return static_cast<int32_t>(free_.size()); }
  int32_t used_count() const { return capacity() - free_count(); }
  std::byte* base() const { return base_; }
  std::byte* address(SlotId slot) const { return base_ + slot.value * unit_bytes_; }
  int64_t unit_bytes() const { return unit_bytes_; }

 private:
  std::byte* base_;
  int64_t unit_bytes_;
  std::vector<bool> in_use_;
  std::vector<int32_t> free_;
};

}  // namespace fathom
