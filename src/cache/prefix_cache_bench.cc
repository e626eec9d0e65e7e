// What bookkeeping costs at a million blocks: a block from a full cache (that is, by eviction), a
// lookup of a million tokens, and a save at their end.
#include <benchmark/benchmark.h>

#include <memory>
#include <numeric>

#include "cache/prefix_cache.h"

namespace fathom {
namespace {

constexpr int32_t kBlocks = 1 << 20;
constexpr int kBlockTokens = 256;

// A cache whose blocks are all cached, in paths of `path_blocks` blocks that end in a bundle.
struct Full {
  explicit Full(int64_t path_blocks)
      : blocks(nullptr, 1, kBlocks),
        bundles(nullptr, 1, static_cast<int32_t>(kBlocks / path_blocks) + 16),
        cache({.block_tokens = kBlockTokens}, blocks, bundles, nullptr, &ops) {
    for (TokenId first = 0; blocks.free_count() >= path_blocks; ++first) {
      tokens.assign(static_cast<size_t>(path_blocks * kBlockTokens + 1), first);
      std::iota(tokens.begin() + 1, tokens.end(), 0);
      PrefixPath path = cache.Open("");
      std::vector<BlockId> table;
      while (static_cast<int64_t>(table.size()) < path_blocks) table.push_back(*blocks.Allocate());
      cache.Extend(&path, tokens, path_blocks * kBlockTokens, &table);
      cache.Save(path, tokens, path_blocks * kBlockTokens, table, SlotId{0}, ++now);
      cache.Leave(&path, &table, now);
      ops.clear();
    }
  }
  double now = 0;
  std::vector<CacheOp> ops;
  BlockPool blocks;
  BundlePool bundles;
  PrefixCache cache;
  std::vector<TokenId> tokens;  // of the path that came last
};

void BM_AllocateByEviction(benchmark::State& state) {
  Full full(state.range(0));
  for (auto _ : state) {
    if (full.blocks.available() == 0) {
      state.SkipWithError("everything is evicted");
      break;
    }
    benchmark::DoNotOptimize(full.cache.AllocateBlock(++full.now));
  }
}
BENCHMARK(BM_AllocateByEviction)->Arg(16)->Arg(1024)->Iterations(200'000);

void BM_FindAMillionTokens(benchmark::State& state) {
  Full full(4096);
  for (auto _ : state) {
    PrefixPath path = full.cache.Open("");  // names are computed anew
    benchmark::DoNotOptimize(full.cache.Find(path, full.tokens, full.now));
    std::vector<BlockId> none;
    full.cache.Leave(&path, &none, full.now);
  }
}
BENCHMARK(BM_FindAMillionTokens)->Unit(benchmark::kMicrosecond);

void BM_FindAgain(benchmark::State& state) {  // as a waiting sequence does in every step
  Full full(4096);
  PrefixPath path = full.cache.Open("");
  for (auto _ : state) benchmark::DoNotOptimize(full.cache.Find(path, full.tokens, full.now));
  std::vector<BlockId> none;
  full.cache.Leave(&path, &none, full.now);
}
BENCHMARK(BM_FindAgain)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace fathom

BENCHMARK_MAIN();
