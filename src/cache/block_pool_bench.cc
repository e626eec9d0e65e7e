// Allocation and release at a million blocks, in random order. The bound is 1 us at the 99th
// percentile; the last benchmark reports it.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <vector>

#include "cache/block_pool.h"

namespace fathom {
namespace {

constexpr int32_t kBlocks = 1'000'000;

// All blocks in use, then `count` of them released in random order.
std::vector<BlockId> Shuffled(BlockPool& pool) {
  std::vector<BlockId> blocks;
  for (int32_t i = 0; i < kBlocks; ++i) blocks.push_back(*pool.Allocate());
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(1));
  return blocks;
}

void ReleaseAllocate(benchmark::State& state) {
  BlockPool pool(nullptr, 1'002'240, kBlocks);
  std::vector<BlockId> blocks = Shuffled(pool);
  size_t i = 0;
  for (auto _ : state) {
    pool.Release(blocks[i]);
    benchmark::DoNotOptimize(blocks[i] = *pool.Allocate());
    if (++i == blocks.size()) i = 0;
  }
}
BENCHMARK(ReleaseAllocate);

void ChurnPercentiles(benchmark::State& state) {
  std::vector<double> ns;
  for (auto _ : state) {
    BlockPool pool(nullptr, 1'002'240, kBlocks);
    const std::vector<BlockId> blocks = Shuffled(pool);
    ns.clear();
    const auto timed = [&ns](auto&& operation) {
      const auto begin = std::chrono::steady_clock::now();
      operation();
      ns.push_back(
          std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin)
              .count());
    };
    for (const BlockId block : blocks) timed([&] { pool.Release(block); });
    for (int32_t i = 0; i < kBlocks; ++i) {
      timed([&] { benchmark::DoNotOptimize(pool.Allocate()); });
    }
  }
  const auto percentile = [&ns](double q) {
    const auto at = ns.begin() + static_cast<int64_t>(q * static_cast<double>(ns.size() - 1));
    std::nth_element(ns.begin(), at, ns.end());
    return *at;
  };
  state.counters["p50_ns"] = percentile(0.50);
  state.counters["p99_ns"] = percentile(0.99);
  state.counters["p99.9_ns"] = percentile(0.999);
}
BENCHMARK(ChurnPercentiles)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace fathom

BENCHMARK_MAIN();
