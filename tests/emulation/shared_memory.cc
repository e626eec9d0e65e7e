// Shared memory of a cluster, its barriers, and asynchronous copies to it.
#include <algorithm>

#include "machine.h"

namespace emu {

// --- shared memory

void* DynamicShared() {
  return current->home->shared + kFirstShared;
}
void* StaticShared(int declaration, size_t bytes, size_t alignment) {
  Block* const block = current->home;
  for (const Static& s : block->statics) {
    if (s.declaration == declaration) return block->shared + s.offset;
  }
  const size_t offset = (block->shared_end + alignment - 1) / alignment * alignment;
  if (offset + bytes > kSlotBytes - 1024) Fail("too much shared memory");
  block->statics.push_back({declaration, offset});
  block->shared_end = offset + bytes;
  std::memset(block->shared + offset, mood.poison, std::min(bytes + 4096, kSlotBytes - offset));
  return block->shared + offset;
}
uint32_t SharedAddress(const void* pointer) {
  const auto at = static_cast<size_t>(static_cast<const char*>(pointer) - arena);
  if (at >= kSlots * kSlotBytes) Fail("the shared address of a pointer to other memory");
  const size_t slot = at / kSlotBytes - current->home->cluster->slot;
  if (slot >= current->home->cluster->blocks.size()) {
    Fail("the shared address of another cluster's memory");
  }
  return static_cast<uint32_t>(slot << 24 | at % kSlotBytes);
}
Block* BlockOf(uint32_t address) {
  Cluster* const cluster = current->home->cluster;
  const size_t rank = address >> 24;
  if (rank >= cluster->blocks.size()) Fail("shared memory of rank %zu", rank);
  return cluster->blocks[rank];
}
char* SharedAt(uint32_t address, size_t bytes) {
  Block* const block = BlockOf(address);
  const size_t offset = address & 0xffffffu;
  if (offset < kFirstShared || offset + bytes > block->shared_end) {
    Fail("shared address %zu + %zu of %zu bytes", offset - kFirstShared, bytes,
         block->shared_end - kFirstShared);
  }
  if (offset % std::min<size_t>(bytes, 16) != 0) Fail("a misaligned shared address");
  if (block != current->home) {
    if (block->alive == 0) Fail("shared memory of a block that has ended");
    if (!block->begun) Fail("shared memory of a block that has not begun");
    if (block->cluster->phase == 0) Fail("shared memory of a block that may not have begun");
  }
  return block->shared + offset;
}
void* SharedPointer(uint32_t address) {
  return SharedAt(address, 1);
}
uint32_t MapRank(uint32_t address, uint32_t rank) {
  if (rank >= current->home->cluster->blocks.size()) Fail("mapa: rank %u", rank);
  return (address & 0xffffffu) | rank << 24;
}
uint32_t ClusterRank() {
  return current->home->rank;
}
uint32_t ClusterSize() {
  return static_cast<uint32_t>(current->home->cluster->blocks.size());
}
char* CheckedShared(uint32_t address, size_t bytes) {
  return SharedAt(address, bytes);
}

// --- mbarriers

MemoryBarrier& BarrierAt(Block* block, uint32_t offset) {
  const uint16_t at = offset / 8 < block->barrier_at.size() ? block->barrier_at[offset / 8] : 0;
  if (at == 0) Fail("an mbarrier at shared+%zu that is not initialised", offset - kFirstShared);
  return *block->barriers[at - 1u];
}

void CheckMemoryBarrier(MemoryBarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  ++b.phase;
  b.pending = b.expected;
  std::vector<Fiber*> waiting;
  waiting.swap(b.waiting);
  for (Fiber* fiber : waiting) SetReady(fiber);
  waiting.clear();
  b.waiting.swap(waiting);
}

void BarrierInit(uint32_t address, uint32_t count) {
  (void)SharedAt(address, 8);
  Block* const block = BlockOf(address);
  const uint32_t offset = address & 0xffffffu;
  if (count == 0 || count >= 1u << 20) Fail("mbarrier.init with count %u", count);
  if (block->barrier_at[offset / 8] != 0) {
    MemoryBarrier& old = BarrierAt(block, offset);
    if (!old.waiting.empty()) Fail("mbarrier.init of a barrier that threads wait for");
    old = {};
    old.offset = offset, old.expected = old.pending = static_cast<int>(count);
    return;
  }
  block->barriers.push_back(std::make_unique<MemoryBarrier>());
  block->barrier_at[offset / 8] = static_cast<uint16_t>(block->barriers.size());
  MemoryBarrier& b = *block->barriers.back();
  b.offset = offset, b.expected = b.pending = static_cast<int>(count);
}
void BarrierForget(uint32_t address) {
  Block* const block = BlockOf(address);
  (void)BarrierAt(block, address & 0xffffffu);
  block->barrier_at[(address & 0xffffffu) / 8] = 0;
}
void BarrierArrive(uint32_t address, uint32_t count, uint32_t bytes) {
  (void)SharedAt(address, 8);
  MemoryBarrier& b = BarrierAt(BlockOf(address), address & 0xffffffu);
  if (b.pending < static_cast<int>(count)) {
    Fail(
        "mbarrier at shared+%zu: more arrivals than the %d of a phase (phase %u, %lld bytes on "
        "their way)",
        (address & 0xffffffu) - kFirstShared, b.expected, b.phase, static_cast<long long>(b.bytes));
  }
  b.bytes += bytes;
  b.pending -= static_cast<int>(count);
  CheckMemoryBarrier(b);
  Preempt();
}
bool BarrierTest(uint32_t address, uint32_t parity) {
  (void)SharedAt(address, 8);
  if (parity > 1) Fail("mbarrier: parity %u", parity);
  Preempt();
  return (BarrierAt(BlockOf(address), address & 0xffffffu).phase & 1) != parity;
}
bool BarrierTryWait(uint32_t address, uint32_t parity) {
  if (BarrierTest(address, parity)) return true;
  MemoryBarrier& b = BarrierAt(BlockOf(address), address & 0xffffffu);
  if (Below(16) == 0 && !ready_warps.empty()) {  // as when the time of waiting is over
    running = nullptr;
    Yield();
    return (b.phase & 1) != parity;
  }
  b.waiting.push_back(current);
  Block_("mbarrier", address & 0xffffffu, parity);
  return (b.phase & 1) != parity;  // it may be a phase further already
}

void Complete(const Operation& op) {
  if (op.kind == Operation::kLoose) {  // its barrier is what is read
    std::memcpy(op.to, op.from, op.barrier);
    std::memset(op.to + op.barrier, 0, op.bytes - op.barrier);
    return;
  }
  if (op.kind == Operation::kValue) {
    std::memcpy(op.to, op.value, op.bytes);
  } else {
    std::memcpy(op.to, op.from, op.bytes);
  }
  MemoryBarrier& b = BarrierAt(op.block, op.barrier);
  b.bytes -= op.bytes;
  CheckMemoryBarrier(b);
}
void Deliver(size_t i) {
  const Operation op = operations[i];
  operations[i] = operations.back();
  operations.pop_back();
  if (op.kind != Operation::kLoose) --op.cluster->operations;
  Complete(op);
}
void Issue(const Operation& op) {
  (void)BarrierAt(op.block, op.barrier);
  if (Below(256) < mood.eager) {
    Complete(op);
  } else {
    // From now on until it is complete nobody knows what is there.
    std::memset(op.to, mood.poison, op.bytes);
    operations.push_back(op);
    ++op.cluster->operations;
  }
  Preempt();
}

void CopyBulk(uint32_t to, const void* from, uint32_t from_shared, uint32_t bytes,
              uint32_t barrier) {
  const char* source = static_cast<const char*>(from);
  if (bytes == 0 || bytes % 16 != 0) Fail("a bulk copy of %u bytes", bytes);
  if (to % 16 != 0) Fail("a bulk copy to a misaligned address");
  char* const target = SharedAt(to, 1);
  (void)SharedAt(to + bytes - 1, 1);
  if (source == nullptr) {
    source = SharedAt(from_shared, 1);
    (void)SharedAt(from_shared + bytes - 1, 1);
  }
  if (reinterpret_cast<uintptr_t>(source) % 16 != 0) Fail("a bulk copy from a misaligned address");
  if (BlockOf(to) != BlockOf(barrier)) Fail("a bulk copy to one block, its barrier in another");
  (void)SharedAt(barrier, 8);
  Issue({Operation::kCopy,
         current->home->cluster,
         target,
         source,
         bytes,
         BlockOf(barrier),
         barrier & 0xffffffu,
         {}});
}
void StoreAsync(uint32_t to, const void* value, uint32_t bytes, uint32_t barrier) {
  Operation op = {Operation::kValue,
                  current->home->cluster,
                  SharedAt(to, bytes),
                  nullptr,
                  bytes,
                  BlockOf(barrier),
                  barrier & 0xffffffu,
                  {}};
  if (BlockOf(to) != BlockOf(barrier)) Fail("st.async to one block, its barrier in another");
  (void)SharedAt(barrier, 8);
  std::memcpy(op.value, value, bytes);
  Issue(op);
}

// --- clusters

void CheckClusterBarrier(Cluster* cluster) {
  if (cluster->arrived == 0 || cluster->arrived < cluster->alive) return;
  cluster->arrived = 0;
  ++cluster->phase;
  std::vector<Fiber*> waiting;
  waiting.swap(cluster->waiting);
  for (Fiber* fiber : waiting) SetReady(fiber);
}
void ClusterArrive() {
  Fiber* const me = current;
  if (me->cluster_arrived) Fail("barrier.cluster.arrive twice without a wait");
  me->cluster_arrived = true;
  me->cluster_phase = me->home->cluster->phase;
  ++me->home->cluster->arrived;
  CheckClusterBarrier(me->home->cluster);
  Preempt();
}
void ClusterWait() {
  Fiber* const me = current;
  if (!me->cluster_arrived) Fail("barrier.cluster.wait without an arrive");
  me->cluster_arrived = false;
  if (me->home->cluster->phase != me->cluster_phase) {
    Preempt();
    return;
  }
  me->home->cluster->waiting.push_back(me);
  Block_("cluster");
}
void GridWait() {
  current->home->waited_for_grid = true;
  if (grid_waits) {
    grid_waiting.push_back(current);
    Block_("grid");
  } else {
    Preempt();
  }
}

// --- cp.async

void Carry(const AsyncCopy& copy) {
  if (copy.read != 0) std::memcpy(copy.to, copy.from, copy.read);
  if (copy.read < copy.bytes) std::memset(copy.to + copy.read, 0, copy.bytes - copy.read);
}
void FinishCopies(Fiber* fiber, uint32_t through) {
  size_t kept = 0;
  for (const AsyncCopy& copy : fiber->copies) {
    if (copy.group < through || (mood.eager != 0 && Below(256) < mood.eager)) Carry(copy);
    else fiber->copies[kept++] = copy;
  }
  fiber->copies.resize(kept);
}
void CopyAsync(uint32_t to, const void* from, uint32_t bytes, uint32_t read) {
  char* const target = SharedAt(to, bytes);
  if (read != 0 && reinterpret_cast<uintptr_t>(from) % bytes != 0) {
    Fail("cp.async from a misaligned address");
  }
  const AsyncCopy copy = {target, static_cast<const char*>(from), bytes, read, current->groups};
  if (mood.eager != 0 && Below(256) < mood.eager) {
    Carry(copy);
    return;
  }
  std::memset(target, mood.poison, bytes);
  current->copies.push_back(copy);
}
void CopyAsyncCommit() {
  ++current->groups;
}
void CopyAsyncWait(uint32_t pending) {
  Preempt();
  FinishCopies(current, current->groups < pending ? 0 : current->groups - pending);
}
void CopyAsyncWaitAll() {
  Preempt();
  FinishCopies(current, current->groups + 1);
}

}  // namespace emu
