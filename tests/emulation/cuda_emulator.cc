#include "cuda_emulator.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "emulator_core.h"

extern "C" void emu_switch(void** from, void* to);
asm(R"(
.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");

dim3 blockDim, gridDim;

namespace emu {

Place* here = nullptr;

// --- chance ------------------------------------------------------------------------------------

namespace {

struct Settings {
  uint64_t seed = 1;
  bool trace = false;
  Settings() {
    if (const char* text = std::getenv("FATHOM_EMULATION_SEED"))
      seed = std::strtoull(text, nullptr, 0);
    trace = std::getenv("FATHOM_EMULATION_TRACE") != nullptr;
  }
};
const Settings settings;

uint64_t random_state = settings.seed * 0x9e3779b97f4a7c15ull + 1;
uint64_t Random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state * 0x2545f4914f6cdd1dull >> 16;
}
uint32_t Below(uint32_t n) {
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
Mood mood;

Mood AnyMood() {
  constexpr uint32_t kDeliver[] = {0, 0, 4, 40, 160}, kEager[] = {0, 0, 0, 32, 200},
                     kPreempt[] = {0, 16, 64, 160}, kLeave[] = {0, 0, 2, 32};
  constexpr uint8_t kPoison[] = {0xff, 0xff, 0x7f, 0xc3};
  return {Below(2) == 0,    kPreempt[Below(4)],         kDeliver[Below(5)], kEager[Below(5)],
          kLeave[Below(4)], static_cast<int>(Below(3)), 1 + Below(3),       kPoison[Below(4)]};
}

// --- threads
// ---------------------------------------------------------------------------------------

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

constexpr size_t kSlotBytes = 256 * 1024, kSlots = 96, kFirstShared = 1024;
constexpr size_t kStackBytes = 128 * 1024;
constexpr uint64_t kCanary = 0x5ca1ab1e0ddba11ull;

char* arena = nullptr;
Fiber* current = nullptr;
void* main_stack = nullptr;
const Launch* launch = nullptr;  // of the grid that runs
std::vector<Warp*> ready_warps;
std::vector<Operation> operations;
Warp* running = nullptr;
bool reporting = false;
bool grid_waits = false;  // for the kernel before
std::vector<Fiber*> grid_waiting;
uint64_t budget = 0;  // steps until the grid is left; 0: none

std::string KernelName() {
  if (launch == nullptr) return "(no kernel)";
  if (launch->name != nullptr) return launch->name;
  Dl_info info;
  if (dladdr(launch->kernel, &info) != 0 && info.dli_sname != nullptr) {
    int status = 0;
    char* name = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    std::string text = status == 0 ? name : info.dli_sname;
    std::free(name);
    return text;
  }
  return "(a kernel)";
}

std::string PlaceOf(const Fiber& fiber) {
  char text[160];
  std::snprintf(text, sizeof(text), "block (%u,%u,%u) thread %u%s", fiber.block.x, fiber.block.y,
                fiber.block.z, fiber.thread.x, blockDim.y * blockDim.z > 1 ? " (x)" : "");
  return text;
}

void PrintStack() {
  void* frames[24];
  const int count = backtrace(frames, 24);
  backtrace_symbols_fd(frames + 1, count - 1, 2);
}

}  // namespace

void Fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::fflush(stdout);
  std::fprintf(stderr, "\nemulator: %s: ", KernelName().c_str());
  std::vfprintf(stderr, format, arguments);
  std::fprintf(stderr, "\n");
  va_end(arguments);
  if (current != nullptr) {
    std::fprintf(stderr, "  in %s%s%s\n", PlaceOf(*current).c_str(),
                 current->code != nullptr ? ", at " : "",
                 current->code != nullptr ? TextOf(current->code).c_str() : "");
    PrintStack();
  }
  std::fprintf(stderr, "  seed %llu (FATHOM_EMULATION_SEED)\n",
               static_cast<unsigned long long>(settings.seed));
  std::abort();
}

namespace {

// --- switching -----------------------------------------------------------------------------------

std::vector<Fiber*> free_fibers;

Fiber* NewFiber() {
  if (!free_fibers.empty()) {
    Fiber* fiber = free_fibers.back();
    free_fibers.pop_back();
    return fiber;
  }
  constexpr size_t kBatch = 64;
  char* const memory =
      static_cast<char*>(mmap(nullptr, kBatch * kStackBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (memory == MAP_FAILED) Fail("no memory for stacks");
  for (size_t i = 0; i < kBatch; ++i) {
    auto* const fiber = new Fiber;
    fiber->stack = memory + i * kStackBytes;
    std::memcpy(fiber->stack, &kCanary, sizeof(kCanary));
    free_fibers.push_back(fiber);
  }
  return NewFiber();
}

void SetReady(Fiber* fiber) {
  fiber->state = State::kReady;
  Warp* const warp = fiber->warp;
  warp->ready |= 1u << fiber->lane;
  if (warp->listed < 0) {
    warp->listed = static_cast<int32_t>(ready_warps.size());
    ready_warps.push_back(warp);
  }
}
void ClearReady(Fiber* fiber) {
  Warp* const warp = fiber->warp;
  warp->ready &= ~(1u << fiber->lane);
  if (warp->ready != 0) return;
  Warp* const last = ready_warps.back();
  ready_warps[static_cast<size_t>(warp->listed)] = last;
  last->listed = warp->listed;
  ready_warps.pop_back();
  warp->listed = -1;
}

void Deliver(size_t i);

Fiber* Pick() {
  if (budget != 0 && --budget == 0) return nullptr;
  while (true) {
    if (!operations.empty() && Below(256) < mood.deliver) {
      Deliver(Below(static_cast<uint32_t>(operations.size())));
    }
    if (ready_warps.empty()) {
      if (operations.empty()) return nullptr;
      Deliver(Below(static_cast<uint32_t>(operations.size())));
      continue;
    }
    Warp* warp = running;
    if (warp == nullptr || warp->ready == 0 || (mood.leave != 0 && Below(256) < mood.leave)) {
      warp = ready_warps[Below(static_cast<uint32_t>(ready_warps.size()))];
      if (mood.by_priority) {
        for (Warp* other : ready_warps) {
          if (other->priority > warp->priority) warp = other;
        }
      }
      running = warp;
    }
    uint32_t lanes = warp->ready;
    int lane = 0;
    if (mood.lane_order == 0) {
      lane = __builtin_ctz(lanes);
    } else if (mood.lane_order == 1) {
      lane = 31 - __builtin_clz(lanes);
    } else {
      const auto first = static_cast<int>(Below(32));
      const uint32_t later = lanes & (0xffffffffu << first);
      lane = __builtin_ctz(later != 0 ? later : lanes);
    }
    return warp->lanes[lane];
  }
}

// Lets somebody else run; returns when this one's turn comes.
void Yield() {
  Fiber* const me = current;
  Fiber* const next = Pick();
  if (next == me) return;
  if (next == nullptr) {
    current = nullptr;
    here = nullptr;
    emu_switch(&me->stack_pointer, main_stack);
  } else {
    current = next;
    here = next;
    emu_switch(&me->stack_pointer, next->stack_pointer);
  }
  while (reporting) {
    PrintStack();
    emu_switch(&me->stack_pointer, main_stack);
  }
}

void Block_(const char* what, uint64_t which = 0, uint64_t detail = 0) {
  Fiber* const me = current;
  me->what = what;
  me->which = which;
  me->detail = detail;
  me->state = State::kWaiting;
  ClearReady(me);
  Yield();
}

void CheckMeeting(Warp* warp);
void CheckBlockBarrier(Block* block, int name);
void CheckClusterBarrier(Cluster* cluster);
void FinishCopies(Fiber* fiber, uint32_t through);
void FinishProducts(Warp* warp, uint32_t through);

void FiberMain() {
  {
    Fiber* const me = current;
    me->home->begun = true;
  }
  launch->call();
  Fiber* const me = current;
  uint64_t canary = 0;
  std::memcpy(&canary, me->stack, sizeof(canary));
  if (canary != kCanary) Fail("a thread's stack has overflown");
  for (const AsyncCopy& copy : me->copies) {
    operations.push_back({Operation::kLoose,
                          me->home->cluster,
                          copy.to,
                          copy.from,
                          copy.bytes,
                          nullptr,
                          copy.read,
                          {}});
  }
  me->copies.clear();
  Warp* const warp = me->warp;
  if (!warp->products.empty()) Fail("a thread ends with products (wgmma) on their way");
  me->state = State::kDone;
  ClearReady(me);
  warp->done |= 1u << me->lane;
  --me->home->alive;
  --me->home->cluster->alive;
  CheckMeeting(warp);
  for (int name = 0; name < 16; ++name) {
    if (me->home->named[name].whole_block) CheckBlockBarrier(me->home, name);
  }
  CheckClusterBarrier(me->home->cluster);
  if (me->home->cluster->alive == 0) {
    current = nullptr;
    here = nullptr;
    emu_switch(&me->stack_pointer, main_stack);
  }
  Yield();
  std::abort();
}

void Start(Fiber* fiber) {
  const size_t number = static_cast<size_t>(fiber->lane);
  char* top = fiber->stack + kStackBytes - 64 - 128 * number;  // not all in the same cache lines
  top -= reinterpret_cast<uintptr_t>(top) % 16;
  auto** at = reinterpret_cast<void**>(top);
  *--at = nullptr;
  *--at = reinterpret_cast<void*>(&FiberMain);
  for (int i = 0; i < 6; ++i) *--at = nullptr;
  fiber->stack_pointer = at;
}

// --- waits
// -----------------------------------------------------------------------------------------

void DescribeWaiting(const std::vector<Cluster*>& clusters) {
  std::map<std::string, std::pair<int, Fiber*>> kinds;
  for (const Cluster* cluster : clusters) {
    for (const Block* block : cluster->blocks) {
      for (Fiber* fiber : block->fibers) {
        if (fiber->state != State::kWaiting) continue;
        char text[256];
        std::snprintf(text, sizeof(text), "block (%u,%u,%u) rank %u warp %2d: %s", block->index.x,
                      block->index.y, block->index.z, block->rank, fiber->warp->index, fiber->what);
        std::string key = text;
        if (std::strstr(fiber->what, "mbarrier") != nullptr) {
          const uint16_t at = block->barrier_at[fiber->which / 8];
          const MemoryBarrier& b = *block->barriers[at - 1];
          std::snprintf(text, sizeof(text),
                        " at shared+%llu, parity %llu; it is in phase %u (parity %u), %d of %d "
                        "arrivals missing, %lld bytes missing",
                        static_cast<unsigned long long>(fiber->which - kFirstShared),
                        static_cast<unsigned long long>(fiber->detail), b.phase, b.phase & 1,
                        b.pending, b.expected, static_cast<long long>(b.bytes));
          key += text;
        } else if (std::strstr(fiber->what, "bar") == fiber->what) {
          const NamedBarrier& b = block->named[fiber->which];
          std::snprintf(text, sizeof(text), " %llu, %d of %d threads there",
                        static_cast<unsigned long long>(fiber->which), b.arrived,
                        b.whole_block ? block->alive : b.expected);
          key += text;
        } else if (std::strstr(fiber->what, "lanes") == fiber->what) {
          std::snprintf(text, sizeof(text), " kind %d mask %08x", static_cast<int>(fiber->meeting),
                        fiber->mask);
          key += text;
        }
        if (!fiber->where.empty()) key += " at " + fiber->where;
        auto& kind = kinds[key];
        ++kind.first;
        kind.second = fiber;
      }
    }
  }
  int stacks = 0;
  for (const auto& [text, kind] : kinds) {
    std::fprintf(stderr, "  %s: %d threads, e.g. %u\n", text.c_str(), kind.first,
                 kind.second->thread.x);
    if (++stacks <= 12) {
      reporting = true;
      current = nullptr;
      emu_switch(&main_stack, kind.second->stack_pointer);
      reporting = false;
    }
  }
}

void RunMeeting(Warp* warp, uint32_t lanes, Meeting kind);

// Lets the lanes go on whose partners are all there.
void CheckMeeting(Warp* warp) {
  uint32_t left = warp->meeting;
  while (left != 0) {
    Fiber* const fiber = warp->lanes[__builtin_ctz(left)];
    const uint32_t lanes = fiber->mask & ~warp->done;
    left &= ~lanes & ~(1u << fiber->lane);
    if ((warp->meeting & lanes) != lanes) continue;
    bool same = true;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      const Fiber* const other = warp->lanes[__builtin_ctz(rest)];
      same &= other->mask == fiber->mask;
      if (other->mask == fiber->mask && other->meeting != fiber->meeting) {
        Fail("lanes %d and %d of a warp execute different operations (%d at %s, %d at %s)",
             fiber->lane, other->lane, static_cast<int>(fiber->meeting), fiber->where.c_str(),
             static_cast<int>(other->meeting), other->where.c_str());
      }
    }
    if (!same) continue;
    RunMeeting(warp, lanes, fiber->meeting);
    warp->meeting &= ~lanes;
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      SetReady(warp->lanes[__builtin_ctz(rest)]);
    }
  }
}

}  // namespace

void Preempt() {
  Fiber* const me = current;
  if (me == nullptr || mood.preempt == 0 || Below(256) >= mood.preempt) return;
  me->warp->priority = static_cast<uint32_t>(Random());
  running = nullptr;
  Yield();
}

void Meet(Meeting kind, uint32_t mask, Exchange* exchange, Where where) {
  Fiber* const me = current;
  Warp* const warp = me->warp;
  if ((mask >> me->lane & 1u) == 0) {
    Fail("a lane is not in the mask %08x of the operation it executes (line %u)", mask,
         where.line());
  }
  me->meeting = kind;
  me->mask = mask;
  me->exchange = exchange;
  warp->meeting |= 1u << me->lane;
  const uint32_t lanes = mask & ~warp->done;
  if ((warp->meeting & lanes) == lanes) {
    // The last one runs on without a switch, unless others with other masks are in the way.
    ClearReady(me);
    me->state = State::kWaiting;
    CheckMeeting(warp);
    if (me->state == State::kReady) {
      // In turn with the other lanes: whoever is asked first goes on.
      if (mood.leave != 0 && Below(256) < mood.leave) Yield();
      return;
    }
    me->what = "lanes of the warp";
    Yield();
    return;
  }
  Block_("lanes of the warp");
}

namespace {

void RunMeeting(Warp* warp, uint32_t lanes, Meeting kind) {
  const auto each = [&](auto&& fn) {
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      fn(warp->lanes[__builtin_ctz(rest)]);
    }
  };
  switch (kind) {
    case Meeting::kSync:
    case Meeting::kAligned: return;
    case Meeting::kShuffle:
      each([&](Fiber* fiber) {
        const int from = fiber->exchange->from;
        if (from < 0 || from > 31 || (lanes >> from & 1u) == 0) {
          Fail("a shuffle reads lane %d, which does not take part (%08x)", from, lanes);
        }
        fiber->exchange->out = warp->lanes[from]->exchange->in;
      });
      return;
    case Meeting::kMma:
    case Meeting::kWgmma: RunWarpProduct(warp->lanes[0]); return;
    default: break;
  }
  uint64_t value = 0;
  bool first = true;
  each([&](Fiber* fiber) {
    const uint64_t in = fiber->exchange->in;
    if (kind == Meeting::kBallot) {
      value |= (in & 1) << fiber->lane;
      return;
    }
    if (first) {
      value = in;
      first = false;
      return;
    }
    const auto a = static_cast<int32_t>(value), b = static_cast<int32_t>(in);
    const auto ua = static_cast<uint32_t>(value), ub = static_cast<uint32_t>(in);
    switch (kind) {
      case Meeting::kAny:
      case Meeting::kOr: value |= in; break;
      case Meeting::kAll:
      case Meeting::kAnd: value &= in; break;
      case Meeting::kXor: value ^= in; break;
      case Meeting::kAdd: value = ua + ub; break;
      case Meeting::kMinSigned: value = static_cast<uint32_t>(std::min(a, b)); break;
      case Meeting::kMaxSigned: value = static_cast<uint32_t>(std::max(a, b)); break;
      case Meeting::kMin: value = std::min(ua, ub); break;
      case Meeting::kMax: value = std::max(ua, ub); break;
      default: Fail("an unknown meeting");
    }
  });
  each([&](Fiber* fiber) { fiber->exchange->out = value; });
}

void CheckBlockBarrier(Block* block, int name) {
  NamedBarrier& b = block->named[name];
  const int expected = b.whole_block ? block->alive : b.expected;
  if (b.arrived == 0 || b.arrived < expected) return;
  if (b.arrived > expected)
    Fail("%d threads arrived at barrier %d of %d", b.arrived, name, expected);
  b.result_sum = b.sum, b.result_any = b.any, b.result_all = b.all;
  b.sum = b.any = 0, b.all = 1;
  b.arrived = b.expected = 0;
  b.whole_block = false;
  std::vector<Fiber*> waiting;
  waiting.swap(b.waiting);
  for (Fiber* fiber : waiting) SetReady(fiber);
  waiting.clear();
  b.waiting.swap(waiting);
}

void Arrive(int name, int threads) {
  Block* const block = current->home;
  NamedBarrier& b = block->named[name];
  if (threads % 32 != 0 || threads < 0 || threads > 1024) {
    Fail("barrier %d of %d threads", name, threads);
  }
  if (b.arrived == 0) {
    b.whole_block = threads == 0;
    b.expected = threads;
  } else if (b.whole_block != (threads == 0) || (threads != 0 && b.expected != threads)) {
    // The two may be the same number.
    const int all = static_cast<int>(launch->block.x * launch->block.y * launch->block.z);
    if ((b.whole_block ? all : b.expected) != (threads == 0 ? all : threads)) {
      Fail("barrier %d is used with %d and with %d threads", name, b.expected, threads);
    }
  }
  ++b.arrived;
}

}  // namespace

void SyncBlock(int name, int threads, Where where) {
  SyncBlockReduce(Meeting::kAdd, 0, where, name, threads);
}
uint64_t SyncBlockReduce(Meeting kind, uint64_t value, Where where) {
  return SyncBlockReduce(kind, value, where, 0, 0);
}
uint64_t SyncBlockReduce(Meeting kind, uint64_t value, Where, int name, int threads) {
  Fiber* const me = current;
  Block* const block = me->home;
  Arrive(name, threads);
  NamedBarrier& b = block->named[name];
  b.sum += value;
  b.any |= value;
  b.all &= value;
  ClearReady(me);
  me->state = State::kWaiting;
  b.waiting.push_back(me);
  CheckBlockBarrier(block, name);
  me->what = "barrier";
  me->which = static_cast<uint64_t>(name);
  if (me->state == State::kReady) {
    running = nullptr;  // anybody may be the first behind a barrier
    me->warp->priority = static_cast<uint32_t>(Random());
  }
  Yield();
  return kind == Meeting::kAny ? b.result_any : kind == Meeting::kAll ? b.result_all : b.result_sum;
}
void ArriveBlock(int name, int threads) {
  Arrive(name, threads);
  CheckBlockBarrier(current->home, name);
  Preempt();
}

// --- shared memory
// -----------------------------------------------------------------------------------

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
namespace {
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
  }
  return block->shared + offset;
}
}  // namespace
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
// ---------------------------------------------------------------------------------------

namespace {

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

}  // namespace

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

namespace {

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

}  // namespace

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
// ------------------------------------------------------------------------------------------

namespace {
void CheckClusterBarrier(Cluster* cluster) {
  if (cluster->arrived == 0 || cluster->arrived < cluster->alive) return;
  cluster->arrived = 0;
  ++cluster->phase;
  std::vector<Fiber*> waiting;
  waiting.swap(cluster->waiting);
  for (Fiber* fiber : waiting) SetReady(fiber);
}
}  // namespace
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
// --------------------------------------------------------------------------------------------

namespace {
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
}  // namespace
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

// --- matrix products
// ---------------------------------------------------------------------------------------

namespace {
struct ProductRequest : Exchange {
  const MmaShape* mma = nullptr;
  const WgmmaShape* wgmma = nullptr;
  uint32_t* d[4];
  uint32_t a[4], b[2], c[4];
  char* to = nullptr;
  uint64_t a_descriptor = 0, b_descriptor = 0;
  bool add = false;
};
}  // namespace

void WarpMma(const MmaShape& shape, uint32_t* const d[4], const uint32_t a[4], const uint32_t b[2],
             const uint32_t c[4]) {
  ProductRequest request;
  request.mma = &shape;
  std::copy_n(d, 4, request.d);
  std::copy_n(a, 4, request.a);
  std::copy_n(b, 2, request.b);
  std::copy_n(c, 4, request.c);
  Meet(Meeting::kMma, 0xffffffffu, &request, Where::current());
}
void WarpgroupMma(const WgmmaShape& shape, void* d, const uint32_t* a, uint64_t a_descriptor,
                  uint64_t b_descriptor, bool add) {
  ProductRequest request;
  request.wgmma = &shape;
  request.to = static_cast<char*>(d);
  if (a != nullptr) std::copy_n(a, 4, request.a);
  request.a_descriptor = a_descriptor;
  request.b_descriptor = b_descriptor;
  request.add = add;
  Meet(Meeting::kWgmma, 0xffffffffu, &request, Where::current());
}

namespace {

// Panels must lie in the block's shared memory.
const char* DescribedByte(const Block* block, uint64_t logical) {
  const uint64_t at = logical ^ ((logical >> 7 & 7) << 4);
  if (at < kFirstShared || at >= block->shared_end) {
    Fail("wgmma reads shared+%lld of %zu", static_cast<long long>(at) - 1024,
         block->shared_end - kFirstShared);
  }
  return block->shared + at;
}

struct Panel {
  uint64_t start, leading, stride;
  explicit Panel(uint64_t descriptor)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) Fail("wgmma: only panels with a swizzle of 128 bytes");
    if ((descriptor >> 49 & 7) != 0) Fail("wgmma: a base offset");
    if (start % 1024 >= 128 && start % 128 != 0)
      Fail("wgmma: a panel that begins nowhere sensible");
  }
};

void RunWgmma(const WarpProduct& p) {
  const WgmmaShape& shape = p.shape;
  const Block* const block = p.block;
  const int n = shape.n;
  const Panel panel(p.b_descriptor);
  if (shape.integers) {
    static int8_t b[256][32];
    for (int row = 0; row < n; ++row) {
      const uint64_t begin = panel.start + static_cast<uint64_t>(row / 8) * panel.stride +
                             static_cast<uint64_t>(row % 8) * 128;
      for (uint64_t piece = 0; piece < 2; ++piece) {
        std::memcpy(&b[row][16 * piece], DescribedByte(block, begin + 16 * piece), 16);
      }
    }
    int32_t a[16][32];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, q = lane % 4;
      for (int i = 0; i < 4; ++i) {
        for (int byte = 0; byte < 4; ++byte) {
          const auto code = static_cast<uint8_t>(p.a[lane][i] >> (8 * byte));
          a[g + 8 * (i & 1)][16 * (i >> 1) + 4 * q + byte] =
              shape.a_signed ? static_cast<int8_t>(code) : code;
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, q = lane % 4;
      auto* const d = reinterpret_cast<int32_t*>(p.d[lane]);
      for (int j = 0; j < n / 8; ++j) {
        for (int i = 0; i < 4; ++i) {
          const int row = g + 8 * (i >> 1), column = 8 * j + 2 * q + (i & 1);
          int32_t sum = p.add ? d[4 * j + i] : 0;
          for (int k = 0; k < 32; ++k) sum += a[row][k] * b[column][k];
          d[4 * j + i] = sum;
        }
      }
    }
    return;
  }
  static double b[16][256];  // [k][column]
  if (!shape.b_transposed) {
    for (int row = 0; row < n; ++row) {
      const uint64_t begin = panel.start + static_cast<uint64_t>(row / 8) * panel.stride +
                             static_cast<uint64_t>(row % 8) * 128;
      for (uint64_t piece = 0; piece < 2; ++piece) {
        uint16_t values[8];
        std::memcpy(values, DescribedByte(block, begin + 16 * piece), 16);
        for (uint64_t i = 0; i < 8; ++i) b[8 * piece + i][row] = FromBf16(values[i]);
      }
    }
  } else {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < n; column += 8) {
        const uint64_t begin = panel.start + static_cast<uint64_t>(column / 64) * panel.leading +
                               static_cast<uint64_t>(k / 8) * panel.stride +
                               static_cast<uint64_t>(k % 8) * 128 +
                               static_cast<uint64_t>(column % 64) * 2;
        uint16_t values[8];
        std::memcpy(values, DescribedByte(block, begin), 16);
        for (int i = 0; i < 8; ++i) b[k][column + i] = FromBf16(values[i]);
      }
    }
  }
  double a[16][16];
  if (p.a_panel == nullptr) {
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, q = lane % 4;
      for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half) {
          a[g + 8 * (i & 1)][8 * (i >> 1) + 2 * q + half] =
              FromBf16(static_cast<uint16_t>(p.a[lane][i] >> (16 * half)));
        }
      }
    }
  } else {
    const Panel a_panel(p.a_descriptor);
    const int first = block->warps.empty() ? 0 : static_cast<int>(p.a[0][0]);  // row of the warp
    for (int r = 0; r < 16; ++r) {
      const int row = first + r;
      const uint64_t begin = a_panel.start + static_cast<uint64_t>(row / 8) * a_panel.stride +
                             static_cast<uint64_t>(row % 8) * 128;
      for (uint64_t piece = 0; piece < 2; ++piece) {
        uint16_t values[8];
        std::memcpy(values, DescribedByte(block, begin + 16 * piece), 16);
        for (uint64_t i = 0; i < 8; ++i) a[r][8 * piece + i] = FromBf16(values[i]);
      }
    }
  }
  alignas(64) static float sums[16][256];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, q = lane % 4;
    const auto* const d = reinterpret_cast<const float*>(p.d[lane]);
    for (int j = 0; j < n / 8; ++j) {
      for (int i = 0; i < 4; ++i) {
        sums[g + 8 * (i >> 1)][8 * j + 2 * q + (i & 1)] = p.add ? d[4 * j + i] : 0.0f;
      }
    }
  }
  MultiplyBf16(a, &b[0][0], 256, n, &sums[0][0], 256);
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, q = lane % 4;
    auto* const d = reinterpret_cast<float*>(p.d[lane]);
    for (int j = 0; j < n / 8; ++j) {
      for (int i = 0; i < 4; ++i) {
        d[4 * j + i] = sums[g + 8 * (i >> 1)][8 * j + 2 * q + (i & 1)];
      }
    }
  }
}

void FinishProducts(Warp* warp, uint32_t through) {
  size_t done = 0;
  while (done < warp->products.size() && warp->products[done].group < through) {
    RunWgmma(warp->products[done++]);
  }
  warp->products.erase(warp->products.begin(), warp->products.begin() + static_cast<long>(done));
}

void RunWarpProduct_(Warp* warp) {
  const auto request = [&](int lane) {
    return static_cast<ProductRequest*>(warp->lanes[lane]->exchange);
  };
  if (warp->done != 0) Fail("a product by a warp of which lanes have ended");
  if (request(0)->wgmma != nullptr) {
    WarpProduct& p = warp->products.emplace_back();
    const ProductRequest& first = *request(0);
    p.shape = *first.wgmma;
    p.block = warp->block;
    p.a_panel = p.shape.a_shared ? warp->block->shared : nullptr;
    p.a_descriptor = first.a_descriptor;
    p.b_descriptor = first.b_descriptor;
    p.add = first.add;
    p.group = warp->product_groups;
    for (int lane = 0; lane < 32; ++lane) {
      const ProductRequest& r = *request(lane);
      if (r.b_descriptor != p.b_descriptor || r.a_descriptor != p.a_descriptor) {
        Fail("wgmma: lanes have different descriptors");
      }
      std::copy_n(r.a, 4, p.a[lane]);
      p.d[lane] = r.to;
    }
    if (p.shape.a_shared) p.a[0][0] = static_cast<uint32_t>(warp->index % 4 * 16);
    return;
  }
  const MmaShape& shape = *request(0)->mma;
  if (shape.integers) {
    int32_t a[16][32], b[32][8];
    for (int lane = 0; lane < 32; ++lane) {
      const ProductRequest& r = *request(lane);
      const int g = lane / 4, q = lane % 4;
      const auto byte_of = [](uint32_t word, int i, bool is_signed) -> int32_t {
        const auto code = static_cast<uint8_t>(word >> (8 * i));
        return is_signed ? static_cast<int8_t>(code) : code;
      };
      for (int i = 0; i < 4; ++i) {
        for (int byte = 0; byte < 4; ++byte) {
          a[g + 8 * (i & 1)][16 * (i >> 1) + 4 * q + byte] = byte_of(r.a[i], byte, shape.a_signed);
        }
      }
      for (int i = 0; i < 2; ++i) {
        for (int byte = 0; byte < 4; ++byte) {
          b[16 * i + 4 * q + byte][g] = byte_of(r.b[i], byte, shape.b_signed);
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const ProductRequest& r = *request(lane);
      const int g = lane / 4, q = lane % 4;
      for (int i = 0; i < 4; ++i) {
        const int row = g + 8 * (i >> 1), column = 2 * q + (i & 1);
        auto sum = static_cast<int32_t>(r.c[i]);
        for (int k = 0; k < 32; ++k) sum += a[row][k] * b[k][column];
        *r.d[i] = static_cast<uint32_t>(sum);
      }
    }
    return;
  }
  double a[16][16];
  alignas(64) double b[16][8];
  alignas(64) float sums[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const ProductRequest& r = *request(lane);
    const int g = lane / 4, q = lane % 4;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i) {
        a[g + 8 * (i & 1)][8 * (i >> 1) + 2 * q + half] =
            FromBf16(static_cast<uint16_t>(r.a[i] >> (16 * half)));
      }
      for (int i = 0; i < 2; ++i) {
        b[8 * i + 2 * q + half][g] = FromBf16(static_cast<uint16_t>(r.b[i] >> (16 * half)));
      }
    }
    for (int i = 0; i < 4; ++i) sums[g + 8 * (i >> 1)][2 * q + (i & 1)] = Bits<float>(r.c[i]);
  }
  MultiplyBf16(a, &b[0][0], 8, 8, &sums[0][0], 8);
  for (int lane = 0; lane < 32; ++lane) {
    const ProductRequest& r = *request(lane);
    const int g = lane / 4, q = lane % 4;
    for (int i = 0; i < 4; ++i) *r.d[i] = Bits<uint32_t>(sums[g + 8 * (i >> 1)][2 * q + (i & 1)]);
  }
}

}  // namespace

void RunWarpProduct(void* fiber) {
  RunWarpProduct_(static_cast<Fiber*>(fiber)->warp);
}
// By every lane: the last one to come does it for all.
void WgmmaCommit() {
  Meet(Meeting::kAligned, 0xffffffffu, nullptr, Where::current());
  Fiber* const me = current;
  if (me->groups >> 31) Fail("too many groups");
  me->warp->product_groups += me->lane == 0 ? 1 : 0;
  Meet(Meeting::kAligned, 0xffffffffu, nullptr, Where::current());
  if (me->lane == 0 && mood.eager != 0 && Below(256) < mood.eager) {
    FinishProducts(me->warp, me->warp->product_groups);
  }
}
void WgmmaWait(uint32_t pending) {
  Preempt();
  Meet(Meeting::kAligned, 0xffffffffu, nullptr, Where::current());
  Warp* const warp = current->warp;
  FinishProducts(warp, warp->product_groups < pending ? 0 : warp->product_groups - pending);
  Meet(Meeting::kAligned, 0xffffffffu, nullptr, Where::current());
}

// --- grids
// -------------------------------------------------------------------------------------------------

namespace {

std::unordered_map<const void*, int> allowed_shared;
std::unordered_map<const void*, bool> allowed_clusters;  // of more than 8 blocks
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

}  // namespace

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

namespace {

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

}  // namespace

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

// --- the runtime
// ---------------------------------------------------------------------------------------------

namespace {

// Memory whose end lies before a page that nobody may touch.
struct Allocation {
  char* mapping;
  size_t mapped;
  size_t bytes, padded;
};
std::map<void*, Allocation>& Allocations() {
  static auto* const allocations = new std::map<void*, Allocation>;
  return *allocations;
}
constexpr uint8_t kGuard = 0xa5;

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** to, size_t bytes) {
  emu::Finish();
  const size_t page = 4096, padded = (bytes + 255) / 256 * 256;
  const size_t pages = (padded + page - 1) / page * page;
  char* const mapping = static_cast<char*>(
      mmap(nullptr, pages + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (mapping == MAP_FAILED) return cudaErrorMemoryAllocation;
  mprotect(mapping, page, PROT_NONE);
  mprotect(mapping + page + pages, page, PROT_NONE);
  char* const data = mapping + page + pages - padded;
  std::memset(mapping + page, kGuard, pages);
  Allocations()[data] = {mapping, pages + 2 * page, bytes, padded};
  *to = data;
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  emu::Finish();
  if (data == nullptr) return cudaSuccess;
  const auto found = Allocations().find(data);
  if (found == Allocations().end()) return cudaErrorInvalidValue;
  const Allocation& a = found->second;
  const char* const begin = static_cast<const char*>(data);
  for (const char* at = a.mapping + 4096; at < begin; ++at) {
    if (static_cast<uint8_t>(*at) != kGuard)
      emu::Fail("something was written before an allocation");
  }
  for (size_t i = a.bytes; i < a.padded; ++i) {
    if (static_cast<uint8_t>(begin[i]) != kGuard) {
      emu::Fail("something was written behind an allocation of %zu bytes (+%zu)", a.bytes, i);
    }
  }
  munmap(a.mapping, a.mapped);
  Allocations().erase(found);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** to, size_t bytes) {
  return cudaMalloc(to, bytes);
}
cudaError_t cudaFreeHost(void* data) {
  return cudaFree(data);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  emu::Finish();
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  emu::Finish();
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  emu::Finish();
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  emu::Finish();
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind) {
  emu::Finish();
  for (size_t i = 0; i < height; ++i) {
    std::memcpy(static_cast<char*>(to) + i * to_pitch,
                static_cast<const char*>(from) + i * from_pitch, width);
  }
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
cudaError_t cudaPeekAtLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "emulated";
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  emu::Finish();
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  emu::Finish();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = 132;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value > 227 * 1024) emu::Fail("%d bytes of shared memory are asked for", value);
    emu::allowed_shared[kernel] = value;
  }
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    emu::allowed_clusters[kernel] = value != 0;
  }
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  *clusters = 16;
  return cudaSuccess;
}

}  // extern "C"
