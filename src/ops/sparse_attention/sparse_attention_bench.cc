// sparse_attention over the shapes of a two-core machine (4 heads) and of V4-Flash (64 heads).
// The bound counts both products of every entry at peak, and no expansion of the rows.
#include <cstdlib>

#include "ops/bench_util.h"
#include "ops/sparse_attention/scenario.h"

namespace fathom::ops {
namespace {

struct Case {
  const char* name;
  ScenarioOptions options;
};

std::vector<ScenarioSequence> Decoding(int32_t count, int32_t first) {
  std::vector<ScenarioSequence> sequences;
  for (int32_t s = 0; s < count; ++s) sequences.push_back({first + 37 * s, 1});
  return sequences;
}

void RunCase(const Case& c, ThreadPool& pool, const bench::Peaks& peaks) {
  AttentionScenario scenario(c.options);
  const StepView& step = scenario.step();
  double entries = 0;
  for (int32_t t = 0; t < step.num_tokens; ++t) {
    const int32_t p = step.position[t];
    entries += std::min(p + 1, kWindow);
    if (c.options.compressed == Compressed::kCsa) entries += scenario.args().counts[t];
    if (c.options.compressed == Compressed::kHca) entries += (p + 1) / 128;
  }
  const double flops = entries * c.options.heads * kHeadDim * 4;
  // Each visit at most reads a row; shared rows cost less.
  const double bytes = entries * static_cast<double>(RowDataBytes(c.options.format, kHeadDim));
  const double us = bench::TimeUs([&] { SparseAttentionCpu(scenario.args(), pool); });
  bench::Print({.op = "sparse_attention",
                .shape = c.name,
                .threads = pool.size(),
                .us = us,
                .flops = flops,
                .bytes = bytes,
                .bound_us = bench::BoundUs(peaks, flops, 0, /*bf16=*/false)});
}

}  // namespace
}  // namespace fathom::ops

int main(int argc, char** argv) {
  using namespace fathom;
  using namespace fathom::ops;
  ThreadPool pool(argc > 1 ? std::atoi(argv[1]) : 0);
  const bench::Peaks peaks = bench::MeasurePeaks(pool);
  const std::vector<Case> cases = {
      {"prefill128 h4 window fp8", {.sequences = {{4096, 128}}}},
      {"prefill512 h4 window fp8", {.sequences = {{4096, 512}}}},
      {"prefill128 h4 csa128 4K fp8", {.sequences = {{4096, 128}}, .compressed = Compressed::kCsa}},
      {"prefill128 h4 csa128 4K bf16",
       {.sequences = {{4096, 128}}, .compressed = Compressed::kCsa, .format = RowFormat::kBf16}},
      {"prefill128 h4 csa128 32K scattered fp8",
       {.sequences = {{32768, 128}}, .compressed = Compressed::kCsa, .clustered = false}},
      {"prefill128 h4 hca 4K fp8", {.sequences = {{4096, 128}}, .compressed = Compressed::kHca}},
      {"prefill128 h4 hca 128K fp8",
       {.sequences = {{131072, 128}}, .compressed = Compressed::kHca}},
      {"prefill128 h4 csa128 4K f32 reference",
       {.sequences = {{4096, 128}},
        .compressed = Compressed::kCsa,
        .format = RowFormat::kF32,
        .numerics = Numerics::kReference}},
      {"decode1 h4 window 4K fp8", {.sequences = {{4096, 1}}}},
      {"decode1 h4 csa128 4K fp8", {.sequences = {{4096, 1}}, .compressed = Compressed::kCsa}},
      {"decode1 h4 hca 1M fp8", {.sequences = {{1'048'575, 1}}, .compressed = Compressed::kHca}},
      {"decode16 h4 csa128 4K fp8",
       {.sequences = Decoding(16, 4096), .compressed = Compressed::kCsa}},
      {"decode64 h4 csa128 4K fp8",
       {.sequences = Decoding(64, 4096), .compressed = Compressed::kCsa}},
      {"decode1 h64 csa512 32K fp8",
       {.sequences = {{32768, 1}}, .heads = 64, .compressed = Compressed::kCsa, .top_k = 512}},
      {"prefill128 h64 csa512 32K fp8",
       {.sequences = {{32768, 128}}, .heads = 64, .compressed = Compressed::kCsa, .top_k = 512}},
  };
  bench::PrintHeader();
  for (const Case& c : cases) RunCase(c, pool, peaks);
}
