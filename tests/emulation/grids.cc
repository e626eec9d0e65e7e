// Launches: blocks and clusters in any order, and kernels that start before the one in front ends.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>

#include "machine.h"

namespace emu {

// --- grids

std::vector<Cluster*> spare_clusters;
std::vector<Block*> spare_blocks;

Block* NewBlock() {
  if (spare_blocks.empty()) return new Block;
  Block* const block = spare_blocks.back();
  spare_blocks.pop_back();
  return block;
}

void Begin(Cluster* cluster, unsigned slot, uint64_t first_block) {
  const Launch& l = *launch;
  const unsigned threads = l.block.x * l.block.y * l.block.z;
  cluster->slot = slot;
  cluster->alive = static_cast<int>(threads * l.cluster);
  cluster->arrived = 0;
  cluster->phase = 0;
  cluster->operations = 0;
  cluster->waiting.clear();
  cluster->blocks.clear();
  for (unsigned rank = 0; rank < l.cluster; ++rank) {
    Block* const block = NewBlock();
    cluster->blocks.push_back(block);
    const uint64_t index = first_block + rank;
    block->cluster = cluster;
    block->rank = rank;
    block->index = {static_cast<unsigned>(index % l.grid.x),
                    static_cast<unsigned>(index / l.grid.x % l.grid.y),
                    static_cast<unsigned>(index / l.grid.x / l.grid.y)};
    block->shared = arena + (slot + rank) * kSlotBytes;
    block->shared_end = kFirstShared + l.shared;
    block->alive = static_cast<int>(threads);
    block->begun = block->waited_for_grid = false;
    block->statics.clear();
    block->barriers.clear();
    block->barrier_at.assign(kSlotBytes / 8, 0);
    for (NamedBarrier& b : block->named) b = {};
    std::memset(block->shared, mood.poison, std::min(block->shared_end + 4096, kSlotBytes));
    const unsigned warps = (threads + 31) / 32;
    while (block->warps.size() < warps) block->warps.push_back(std::make_unique<Warp>());
    block->fibers.clear();
    for (unsigned w = 0; w < warps; ++w) {
      Warp& warp = *block->warps[w];
      warp.block = block;
      warp.index = static_cast<int>(w);
      warp.ready = warp.meeting = 0;
      warp.done = 0;
      warp.listed = -1;
      warp.priority = static_cast<uint32_t>(Random());
      warp.products.clear();
      warp.product_groups = 0;
      for (unsigned lane = 0; lane < 32; ++lane) {
        const unsigned thread = w * 32 + lane;
        if (thread >= threads) {
          warp.done |= 1u << lane;
          continue;
        }
        Fiber* const fiber = NewFiber();
        fiber->thread = {thread % l.block.x, thread / l.block.x % l.block.y,
                         thread / l.block.x / l.block.y};
        fiber->block = block->index;
        fiber->warp = &warp;
        fiber->home = block;
        fiber->lane = static_cast<int>(lane);
        fiber->copies.clear();
        fiber->groups = 0;
        fiber->cluster_arrived = false;
        fiber->code = nullptr;
        fiber->where.clear();
        Start(fiber);
        warp.lanes[lane] = fiber;
        block->fibers.push_back(fiber);
        SetReady(fiber);
      }
    }
  }
}

void End(Cluster* cluster) {
  for (size_t i = operations.size(); i-- > 0;) {
    if (operations[i].cluster == cluster && operations[i].kind == Operation::kLoose) Deliver(i);
  }
  if (cluster->operations != 0)
    Fail("a cluster ends with %d copies on their way", cluster->operations);
  for (Block* block : cluster->blocks) {
    const size_t end = block->shared_end;
    for (size_t i = 0; i < 4096 && end + i < kSlotBytes; ++i) {
      if (static_cast<uint8_t>(block->shared[end + i]) != mood.poison) {
        Fail("block (%u,%u,%u) has written beyond its shared memory (+%zu of %zu)", block->index.x,
             block->index.y, block->index.z, end + i - kFirstShared, end - kFirstShared);
      }
    }
    if (launch->overlapped && !block->waited_for_grid) {
      Fail("block (%u,%u,%u) of an overlapped launch ends without WaitForPrevious", block->index.x,
           block->index.y, block->index.z);
    }
    for (int name = 0; name < 16; ++name) {
      if (block->named[name].arrived != 0 && settings.trace) {
        std::fprintf(stderr, "emulator: %s: barrier %d is left with %d arrivals\n",
                     KernelName().c_str(), name, block->named[name].arrived);
      }
    }
    for (Fiber* fiber : block->fibers) free_fibers.push_back(fiber);
    spare_blocks.push_back(block);
  }
  spare_clusters.push_back(cluster);
}

void ReadConfig(const cudaLaunchConfig_t& config, Launch& l) {
  l.grid = config.gridDim;
  l.block = config.blockDim;
  l.shared = config.dynamicSmemBytes;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      l.cluster = attribute.val.clusterDim.x;
      if (attribute.val.clusterDim.y != 1 || attribute.val.clusterDim.z != 1) {
        Fail("only clusters along x");
      }
    } else if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      l.overlapped = attribute.val.programmaticStreamSerializationAllowed != 0;
    }
  }
}

void Check(const Launch& wanted) {
  launch = &wanted;
  const uint64_t threads = uint64_t{wanted.block.x} * wanted.block.y * wanted.block.z;
  const uint64_t blocks = uint64_t{wanted.grid.x} * wanted.grid.y * wanted.grid.z;
  if (threads == 0 || threads > 1024) Fail("a block of %llu threads", (unsigned long long)threads);
  if (blocks == 0 || wanted.grid.y > 65535 || wanted.grid.z > 65535) {
    Fail("a grid of %u x %u x %u", wanted.grid.x, wanted.grid.y, wanted.grid.z);
  }
  if (wanted.cluster == 0 || wanted.cluster > 16 || wanted.grid.x % wanted.cluster != 0) {
    Fail("clusters of %u in a grid of %u", wanted.cluster, wanted.grid.x);
  }
  if (wanted.shared > 227 * 1024) Fail("%zu bytes of shared memory", wanted.shared);
  if (wanted.kernel != nullptr && wanted.shared > 48 * 1024) {
    const auto allowed = allowed_shared.find(wanted.kernel);
    if (allowed == allowed_shared.end() || allowed->second < static_cast<int>(wanted.shared)) {
      Fail("%zu bytes of shared memory that were not asked for", wanted.shared);
    }
  }
  if (wanted.cluster > 8 && !allowed_clusters[wanted.kernel]) {
    Fail("clusters of %u that were not asked for", wanted.cluster);
  }
  if (settings.trace) {
    std::fprintf(stderr, "emulator: %s grid %u,%u,%u block %llu shared %zu cluster %u%s\n",
                 KernelName().c_str(), wanted.grid.x, wanted.grid.y, wanted.grid.z,
                 (unsigned long long)threads, wanted.shared, wanted.cluster,
                 wanted.overlapped ? " overlapped" : "");
  }
  launch = nullptr;
}

// A launch on its way.
struct Grid {
  Launch launch;
  Mood mood = AnyMood();
  std::vector<uint32_t> sequence;  // of clusters
  size_t next = 0;
  std::vector<Cluster*> live;
  std::vector<unsigned> free_slots;
  bool waits = false;  // for the kernel before
  // What stands in the variables of the same names while it runs.
  std::vector<Warp*> ready_warps;
  std::vector<Operation> operations;
  std::vector<Fiber*> grid_waiting;

  Grid(Launch wanted, unsigned base) : launch(std::move(wanted)) {
    // Clusters in any order, or from the last or the first on.
    const uint64_t clusters =
        uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z / launch.cluster;
    const int order = static_cast<int>(Below(3));
    sequence.resize(clusters);
    for (uint64_t i = 0; i < clusters; ++i) {
      sequence[i] = static_cast<uint32_t>(order == 1 ? clusters - 1 - i : i);
      if (order == 2) std::swap(sequence[i], sequence[Below(static_cast<uint32_t>(i + 1))]);
    }
    const unsigned threads = launch.block.x * launch.block.y * launch.block.z * launch.cluster;
    unsigned resident = mood.resident;
    while (resident > 1 && resident * threads > 2048) --resident;
    for (unsigned i = 0; i < resident; ++i) free_slots.push_back(base + i * launch.cluster);
  }

  void Swap() {
    std::swap(ready_warps, emu::ready_warps);
    std::swap(operations, emu::operations);
    std::swap(grid_waiting, emu::grid_waiting);
  }

  // steps: at most so many, as long as the kernel before has not run (0: until all wait for it).
  void Run(uint64_t steps = 0) {
    Swap();
    emu::launch = &launch;
    blockDim = launch.block;
    gridDim = launch.grid;
    emu::mood = mood;
    emu::grid_waits = waits;
    emu::budget = steps;
    if (!waits) {
      for (Fiber* fiber : emu::grid_waiting) SetReady(fiber);
      emu::grid_waiting.clear();
    }
    while (next < sequence.size() || !live.empty()) {
      while (next < sequence.size() && !free_slots.empty()) {
        Cluster* cluster = nullptr;
        if (spare_clusters.empty()) {
          cluster = new Cluster;
        } else {
          cluster = spare_clusters.back();
          spare_clusters.pop_back();
        }
        const unsigned slot = free_slots.back();
        free_slots.pop_back();
        Begin(cluster, slot, uint64_t{sequence[next++]} * launch.cluster);
        live.push_back(cluster);
      }
      running = nullptr;
      Fiber* const first = Pick();
      if (first != nullptr) {
        current = first;
        here = first;
        emu_switch(&main_stack, first->stack_pointer);
      }
      bool ended = false;
      for (size_t i = 0; i < live.size();) {
        if (live[i]->alive != 0) {
          ++i;
          continue;
        }
        free_slots.push_back(live[i]->slot);
        End(live[i]);
        live.erase(live.begin() + static_cast<long>(i));
        ended = true;
      }
      if (ended) continue;
      if (waits) break;
      std::fprintf(stderr, "\nemulator: %s: nobody can go on (seed %llu)\n", KernelName().c_str(),
                   static_cast<unsigned long long>(settings.seed));
      DescribeWaiting(live);
      std::abort();
    }
    waits = false;
    emu::budget = 0;
    emu::launch = nullptr;
    Swap();
  }
};

std::unique_ptr<Grid> pending;
unsigned next_base = 0;

void Run(Launch wanted) {
  if (arena == nullptr) {
    arena = static_cast<char*>(mmap(nullptr, (kSlots + 1) * kSlotBytes, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    arena += (kSlotBytes - reinterpret_cast<uintptr_t>(arena) % kSlotBytes) % kSlotBytes;
  }
  if (launch != nullptr) Fail("a launch from a kernel");
  Check(wanted);
  auto grid = std::make_unique<Grid>(std::move(wanted), next_base);
  next_base = kSlots / 2 - next_base;
  if (pending != nullptr) {
    // A kernel may start before the one in front of it has done anything.
    if (grid->launch.overlapped && Below(4) != 0) {
      grid->waits = true;
      grid->Run(Below(2) == 0 ? 0 : 1 + Below(20000));
    }
    pending->Run();
  }
  pending = std::move(grid);
}

void Finish() {
  if (launch != nullptr || pending == nullptr) return;
  pending->Run();
  pending.reset();
}

void SetCode(const Code* code) {
  current->code = code;
}

}  // namespace emu
