#include "core/thread_pool.h"

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "core/status.h"

namespace fathom {
namespace {

constexpr int kSpins = 20'000;  // about 200 us: longer than the serial gaps inside a decode step

int AvailableCpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());
}

struct AlignedBuffer {
  void* data = nullptr;
  size_t size = 0;
  ~AlignedBuffer() { std::free(data); }
};

}  // namespace

// A job is open while `state` holds its generation without kClosed. A worker joins by adding one
// to the low bits; the caller closes the job when no index is left and waits for those who joined,
// so a worker that is asleep or descheduled delays nobody.
struct ThreadPool::Impl {
  static constexpr uint32_t kClosed = 1u << 31;
  static constexpr uint64_t kGeneration = 1ull << 32;

  alignas(64) std::atomic<uint64_t> state{kClosed};
  alignas(64) std::atomic<uint32_t> wake{0};  // futex word: bumped for every job and at stop
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<uint32_t> finished{0};
  std::atomic<bool> stop{false};
  int64_t count = 0;
  int64_t grain = 1;
  void* context = nullptr;
  Function function = nullptr;
  std::vector<AlignedBuffer> scratch;
  std::vector<std::thread> threads;

  void Work(int worker) {
    for (;;) {
      const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= count) return;
      function(context, begin, begin + grain < count ? begin + grain : count, worker);
    }
  }

  bool Join() {
    uint64_t seen = state.load(std::memory_order_acquire);
    while ((seen & kClosed) == 0) {
      if (state.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }

  void Loop(int worker) {
    uint32_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < kSpins; ++spin) {
        if (wake.load(std::memory_order_acquire) != seen) break;
        _mm_pause();
      }
      wake.wait(seen, std::memory_order_acquire);
      seen = wake.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_acquire)) return;
      if (!Join()) continue;
      Work(worker);
      finished.fetch_add(1, std::memory_order_release);
    }
  }
};

ThreadPool::ThreadPool(int threads)
    : size_(threads > 0 ? threads : AvailableCpus()), impl_(std::make_unique<Impl>()) {
  if (size_ < 1) size_ = 1;
  impl_->scratch.resize(size_);
  for (int worker = 1; worker < size_; ++worker) {
    impl_->threads.emplace_back([this, worker] { impl_->Loop(worker); });
  }
}

ThreadPool::~ThreadPool() {
  impl_->stop.store(true, std::memory_order_release);
  impl_->wake.fetch_add(1, std::memory_order_release);
  impl_->wake.notify_all();
  for (std::thread& thread : impl_->threads) thread.join();
}

void ThreadPool::Run(int64_t count, int64_t grain, void* context, Function function) {
  Impl& impl = *impl_;
  impl.count = count;
  impl.grain = grain;
  impl.context = context;
  impl.function = function;
  impl.next.store(0, std::memory_order_relaxed);
  impl.finished.store(0, std::memory_order_relaxed);
  const uint64_t generation = (impl.state.load(std::memory_order_relaxed) / Impl::kGeneration + 1);
  impl.state.store(generation * Impl::kGeneration, std::memory_order_release);
  impl.wake.fetch_add(1, std::memory_order_release);
  impl.wake.notify_all();
  impl.Work(0);
  const uint32_t joined =
      static_cast<uint32_t>(impl.state.fetch_or(Impl::kClosed, std::memory_order_acq_rel));
  for (int spin = 0; impl.finished.load(std::memory_order_acquire) != joined; ++spin) {
    _mm_pause();
    if (spin > kSpins) std::this_thread::yield();
  }
}

void* ThreadPool::Scratch(int worker, size_t bytes) {
  AlignedBuffer& buffer = impl_->scratch[worker];
  if (buffer.size < bytes) {
    std::free(buffer.data);
    buffer.size = (bytes + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(64, buffer.size);
    FATHOM_CHECK(buffer.data != nullptr);
  }
  return buffer.data;
}

}  // namespace fathom
