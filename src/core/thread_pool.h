// The compute threads of the CPU backend: the caller plus size()-1 workers.
//
//   pool.ParallelFor(rows, 16, [&](int64_t begin, int64_t end, int worker) { ... });
//
// One thread at a time may call ParallelFor (the engine thread); calls do not nest. Workers spin
// for a short while between calls, then sleep, so that the dozens of calls of a decode step cost
// about a microsecond each and an idle server costs nothing.
// Which worker runs which range is not fixed: results must not depend on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>

namespace fathom {

class ThreadPool {
 public:
  // `threads` counts the caller; 0 means one per CPU this process may use.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Calls fn(begin, end, worker) over [0, count) in pieces of `grain` (the last may be shorter);
  // worker is in [0, size()). Returns when all are done. A count of at most one grain runs inline.
  template <class Fn>
  void ParallelFor(int64_t count, int64_t grain, Fn&& fn) {
    if (count <= 0) return;
    if (count <= grain || size_ == 1) {
      for (int64_t begin = 0; begin < count; begin += grain) {
        fn(begin, begin + grain < count ? begin + grain : count, 0);
      }
      return;
    }
    using F = std::remove_reference_t<Fn>;
    Run(count, grain, const_cast<void*>(static_cast<const void*>(&fn)),
        [](void* context, int64_t begin, int64_t end, int worker) {
          (*static_cast<F*>(context))(begin, end, worker);
        });
  }

  // Scratch of at least `bytes`, 64-byte aligned, private to `worker` and kept between calls.
  // A later call for the same worker may move it; nothing is preserved.
  void* Scratch(int worker, size_t bytes);

 private:
  using Function = void (*)(void*, int64_t, int64_t, int);
  void Run(int64_t count, int64_t grain, void* context, Function function);
  struct Impl;
  int size_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fathom
