// OutputProjectionCpu on the demo checkpoint's layer and on V4-Flash's, as CSV.
//
//   output_projection_bench [max_threads]
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "ops/bench_util.h"
#include "ops/norm_rope_insert/rope.h"
#include "ops/output_projection/output_projection.h"

namespace fathom::ops {
namespace {

void Bench(int heads, int groups, int64_t rank, const bench::Peaks& peaks, ThreadPool& pool) {
  std::mt19937 rng(1);
  const int64_t out = groups * rank;
  const int64_t depth = int64_t{kHeadDim} * heads / groups;
  std::vector<uint8_t> data(out * depth);
  for (auto& byte : data) byte = static_cast<uint8_t>(rng() % 0x70);
  const std::vector<uint8_t> scale(((out + 127) / 128) * ((depth + 127) / 128), 118);
  LinearWeight weight{.format = WeightFormat::kFp8Block128,
                      .out = out,
                      .in = depth,
                      .data = data.data(),
                      .scale = scale.data(),
                      .packed = nullptr};
  PackLinearCpu(weight);
  for (const int64_t rows : {1, 2, 4, 8, 16, 128, 512}) {
    if (rows * out * depth > 10'000'000'000) continue;
    std::vector<float> o(rows * heads * kHeadDim, 0.5f);
    std::vector<float> table(rows * kRopeDim);
    for (int64_t t = 0; t < rows; ++t) {
      RopeTableRow(PlainRope(10000), t, table.data() + t * kRopeDim);
    }
    std::vector<float> y(rows * out);
    const OutputProjectionArgs args{.o = F32Matrix(o.data(), rows, int64_t{heads} * kHeadDim),
                                    .rope = table.data(),
                                    .heads = heads,
                                    .groups = groups,
                                    .wo_a = &weight,
                                    .y = F32Matrix(y.data(), rows, out)};
    const double flops = 2.0 * static_cast<double>(rows * out * depth);
    const double bytes = static_cast<double>(data.size()) + 4.0 * (o.size() + y.size());
    bench::Print({.op = "output_projection",
                  .shape = std::to_string(rows) + "x" + std::to_string(out) + "x" +
                           std::to_string(depth) + " h" + std::to_string(heads),
                  .threads = pool.size(),
                  .us = bench::TimeUs([&] { OutputProjectionCpu(args, pool); }, 100),
                  .flops = flops,
                  .bytes = bytes,
                  .bound_us = bench::BoundUs(peaks, flops, bytes, /*bf16=*/false)});
  }
}

}  // namespace
}  // namespace fathom::ops

int main(int argc, char** argv) {
  using namespace fathom;
  const int max_threads = argc > 1 ? std::atoi(argv[1]) : ThreadPool(0).size();
  bench::PrintHeader();
  for (int threads = 1; threads <= max_threads; threads *= 2) {
    ThreadPool pool(threads);
    const bench::Peaks peaks = bench::MeasurePeaks(pool);
    bench::Print(peaks, threads);
    ops::Bench(4, 2, 64, peaks, pool);
    ops::Bench(64, 8, 1024, peaks, pool);
  }
}
