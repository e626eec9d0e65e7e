// What the emulated machine consists of, and what its parts ask of each other: the scheduler
// (scheduler.cc), shared memory and asynchronous copies (shared_memory.cc), tensor cores
// (products.cc), grids (grids.cc). One host thread runs it all.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator_core.h"

extern "C" void emu_switch(void** from, void* to);

namespace emu {

// --- chance

struct Settings {
  uint64_t seed = 1;
  bool trace = false;
  Settings() {
    if (const char* text = std::getenv("FATHOM_EMULATION_SEED"))
      seed = std::strtoull(text, nullptr, 0);
    trace = std::getenv("FATHOM_EMULATION_TRACE") != nullptr;
  }
};
inline const Settings settings;

inline uint64_t random_state = settings.seed * 0x9e3779b97f4a7c15ull + 1;
inline uint64_t Random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x2545f4914f6cdd1dull >> 16;
}
inline uint32_t Below(uint32_t n) {
  return static_cast<uint32_t>(Random() % n);
}

// How the present launch is scheduled.
struct Mood {
  bool by_priority;   // the ready warp of the highest priority, else any
  uint32_t preempt;   // in 256: how often a signal lets others run
  uint32_t deliver;   // in 256: how often a step delivers an asynchronous operation
  uint32_t eager;     // in 256: operations that are carried out as soon as they are issued
  uint32_t leave;     // in 256: how often a warp is left while some of its lanes are ready
  int lane_order;     // 0 ascending, 1 descending, 2 from any lane on
  unsigned resident;  // clusters at a time
  uint8_t poison;
};
inline Mood mood;

inline Mood AnyMood() {
  constexpr uint32_t kDeliver[] = {0, 0, 4, 40, 160}, kEager[] = {0, 0, 0, 32, 200},
                     kPreempt[] = {0, 16, 64, 160}, kLeave[] = {0, 0, 2, 32};
  constexpr uint8_t kPoison[] = {0xff, 0xff, 0x7f, 0xc3};
  return {Below(2) == 0,    kPreempt[Below(4)],         kDeliver[Below(5)], kEager[Below(5)],
          kLeave[Below(4)], static_cast<int>(Below(3)), 1 + Below(3),       kPoison[Below(4)]};
}

// --- threads

enum class State : uint8_t { kReady, kWaiting, kDone };

struct Warp;
struct Block;
struct Cluster;

struct AsyncCopy {  // cp.async of a thread
  char* to;
  const char* from;
  uint32_t bytes, read;
  uint32_t group;
};

struct Fiber : Place {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  Warp* warp = nullptr;
  Block* home = nullptr;
  int lane = 0;
  State state = State::kReady;
  // Of a meeting of lanes.
  Meeting meeting = Meeting::kSync;
  uint32_t mask = 0;
  Exchange* exchange = nullptr;
  // Of a wait.
  const char* what = "";
  uint64_t which = 0, detail = 0;
  std::string where;
  const Code* code = nullptr;
  std::vector<AsyncCopy> copies;
  uint32_t groups = 0;  // committed
  bool cluster_arrived = false;
  uint32_t cluster_phase = 0;
};

struct WarpProduct {
  WgmmaShape shape;
  Block* block;
  const char *a_panel, *b_panel;  // of descriptors; a_panel null: in registers
  uint64_t a_descriptor, b_descriptor;
  bool add;
  uint32_t a[32][4];
  char* d[32];
  uint32_t group;
};

struct Warp {
  Block* block = nullptr;
  int index = 0;
  uint32_t ready = 0;    // lanes
  uint32_t meeting = 0;  // lanes that wait for others of the warp
  uint32_t done = 0;     // lanes that have ended (or never were)
  int32_t listed = -1;   // in the list of ready warps
  uint32_t priority = 0;
  Fiber* lanes[32] = {};
  std::vector<WarpProduct> products;
  uint32_t product_groups = 0;
};

struct NamedBarrier {
  int expected = 0, arrived = 0;  // expected 0: all that live
  bool whole_block = false;
  std::vector<Fiber*> waiting;
  uint64_t sum = 0, any = 0, all = 1, result_sum = 0, result_any = 0, result_all = 0;
};

struct MemoryBarrier {
  uint32_t offset = 0;
  int expected = 0, pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
  std::vector<Fiber*> waiting;
};

struct Static {
  int declaration;
  size_t offset;
};

struct Block {
  Cluster* cluster = nullptr;
  unsigned rank = 0;
  uint3 index = {};
  char* shared = nullptr;  // its slot
  size_t shared_end = 0;
  int alive = 0;
  bool begun = false, waited_for_grid = false;
  std::vector<Static> statics;
  std::vector<Fiber*> fibers;
  std::vector<std::unique_ptr<Warp>> warps;
  NamedBarrier named[16];
  std::vector<std::unique_ptr<MemoryBarrier>> barriers;
  std::vector<uint16_t> barrier_at;  // by offset / 8, index + 1
};

struct Cluster {
  unsigned slot = 0;  // the first of its blocks
  int alive = 0;      // threads
  int arrived = 0;
  uint32_t phase = 0;
  std::vector<Block*> blocks;
  std::vector<Fiber*> waiting;
  int operations = 0;  // asynchronous ones on their way
};

struct Operation {
  enum Kind { kCopy, kValue, kLoose } kind;  // kLoose: cp.async of a thread that has ended
  Cluster* cluster;
  char* to;
  const char* from;
  uint32_t bytes;
  Block* block;  // of the barrier
  uint32_t barrier;
  char value[16];
};

inline constexpr size_t kSlotBytes = 256 * 1024, kSlots = 96, kFirstShared = 1024;
inline constexpr size_t kStackBytes = 128 * 1024;
inline constexpr uint64_t kCanary = 0x5ca1ab1e0ddba11ull;

inline char* arena = nullptr;
inline Fiber* current = nullptr;
inline void* main_stack = nullptr;
inline const Launch* launch = nullptr;  // of the grid that runs
inline std::vector<Warp*> ready_warps;
inline std::vector<Operation> operations;
inline Warp* running = nullptr;
inline bool reporting = false;
inline bool grid_waits = false;  // for the kernel before
inline std::vector<Fiber*> grid_waiting;
inline uint64_t budget = 0;  // steps until the grid is left; 0: none

inline std::vector<Fiber*> free_fibers;
// By kernel: cudaFuncSetAttribute's.
inline std::unordered_map<const void*, int> allowed_shared;
inline std::unordered_map<const void*, bool> allowed_clusters;  // of more than 8 blocks

// --- the scheduler

std::string KernelName();
Fiber* NewFiber();
// Makes a fiber begin at the kernel's first line when its turn comes.
void Start(Fiber* fiber);
void SetReady(Fiber* fiber);
// Who goes on; null: nobody can.
Fiber* Pick();
void Yield();
// Waits until SetReady; the arguments say for what.
void Block_(const char* what, uint64_t which = 0, uint64_t detail = 0);
void DescribeWaiting(const std::vector<Cluster*>& clusters);

// --- asynchronous work

void Deliver(size_t operation);
void CheckClusterBarrier(Cluster* cluster);
void FinishCopies(Fiber* fiber, uint32_t through);
void FinishProducts(Warp* warp, uint32_t through);

}  // namespace emu
