// Fibers for threads: switching, choosing who goes on, and what lanes, warps and blocks wait for.
#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <map>

#include "machine.h"

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

// --- switching

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

void Block_(const char* what, uint64_t which, uint64_t detail) {
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

}  // namespace emu
