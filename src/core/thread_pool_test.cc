#include "core/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace fathom {
namespace {

TEST(ThreadPool, CoversEveryIndexExactlyOnce) {
  ThreadPool pool(3);
  for (int64_t count : {0, 1, 7, 64, 1000}) {
    for (int64_t grain : {1, 3, 100}) {
      std::vector<std::atomic<int>> seen(count);
      pool.ParallelFor(count, grain, [&](int64_t begin, int64_t end, int worker) {
        EXPECT_LT(worker, pool.size());
        for (int64_t i = begin; i < end; ++i) seen[i].fetch_add(1);
      });
      for (auto& hits : seen) EXPECT_EQ(hits.load(), 1);
    }
  }
}

TEST(ThreadPool, ManySmallJobsInARow) {
  ThreadPool pool(2);
  std::atomic<int64_t> sum{0};
  for (int job = 0; job < 20'000; ++job) {
    pool.ParallelFor(4, 1, [&](int64_t begin, int64_t, int) { sum.fetch_add(begin); });
  }
  EXPECT_EQ(sum.load(), 20'000 * 6);
}

}  // namespace
}  // namespace fathom
