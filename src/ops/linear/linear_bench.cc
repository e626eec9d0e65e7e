// LinearCpu over the shapes of the demo checkpoint and of DeepSeek-V4, as CSV.
//
//   linear_bench [demo|real|all] [max_threads]
//
// The bound is the larger of the arithmetic at the measured f32 multiply-add peak and, beyond what
// the caches hold, the bytes of weight, x and y at the measured streaming rate. One row of a cached
// weight is bound by neither but by expanding it: about 9 cycles per 64 FP8 and 6 per 64 FP4
// weights on a Sapphire Rapids core, against 2 for the products.
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/cpu_features.h"
#include "ops/bench_util.h"
#include "ops/linear/linear.h"
#include "ops/linear/packed_weight.h"

namespace fathom::ops {
namespace {

struct Shape {
  const char* name;
  int64_t out;
  int64_t in;
  WeightFormat format;
};

constexpr auto kFp8 = WeightFormat::kFp8Block128;
constexpr auto kFp4 = WeightFormat::kFp4Block32;
constexpr auto kBf16 = WeightFormat::kBF16;

constexpr Shape kDemo[] = {
    {"wq_b", 512, 128, kFp8},        {"wkv", 512, 256, kFp8},          {"wo_b", 256, 128, kFp8},
    {"index_wq_b", 1024, 128, kFp8}, {"compressor", 1024, 256, kBf16}, {"gate", 8, 256, kBf16},
    {"head", 4096, 256, kBf16},      {"expert", 256, 256, kFp4},
};
constexpr Shape kReal[] = {
    {"wq_a", 1024, 4096, kFp8},
    {"wq_b", 32768, 1024, kFp8},
    {"compressor", 1024, 4096, kBf16},
    {"expert", 2048, 4096, kFp4},
};

const char* Name(WeightFormat f) {
  return f == kFp8 ? "fp8" : f == kFp4 ? "fp4" : f == kBf16 ? "bf16" : "f32";
}

void Bench(const Shape& shape, const bench::Peaks& peaks, ThreadPool& pool) {
  std::mt19937 rng(7);
  std::vector<uint8_t> data(PanelBytes(shape.format, shape.in) / 32 * shape.out);
  for (auto& byte : data) {
    byte = static_cast<uint8_t>(rng());
    if (shape.format == kFp8 && (byte & 0x7f) == 0x7f) byte = 0;
  }
  if (shape.format == kBf16) {  // ordinary magnitudes
    for (size_t i = 1; i < data.size(); i += 2) data[i] = (data[i] & 0x80) | 0x3f;
  }
  std::vector<uint8_t> scale(shape.out * (shape.in / 32 + 1), 120);
  LinearWeight weight{.format = shape.format,
                      .out = shape.out,
                      .in = shape.in,
                      .data = data.data(),
                      .scale = scale.data(),
                      .packed = nullptr};
  PackLinearCpu(weight);
  for (const int64_t rows : {1, 2, 4, 8, 16, 128, 512}) {
    if (rows * shape.out * shape.in > int64_t{20'000'000'000}) continue;
    std::vector<float> x(rows * shape.in);
    for (float& v : x) v = static_cast<float>(static_cast<int>(rng() % 255) - 127) / 64.0f;
    std::vector<float> y(rows * shape.out);
    const LinearArgs args{.x = F32Matrix(x.data(), rows, shape.in),
                          .weight = &weight,
                          .y = F32Matrix(y.data(), rows, shape.out)};
    const double flops = 2.0 * rows * shape.out * shape.in;
    const double bytes = static_cast<double>(data.size()) + 4.0 * (x.size() + y.size());
    bench::Print({.op = std::string("linear_") + shape.name,
                  .shape = std::to_string(rows) + "x" + std::to_string(shape.out) + "x" +
                           std::to_string(shape.in) + " " + Name(shape.format),
                  .threads = pool.size(),
                  .us = bench::TimeUs([&] { LinearCpu(args, pool); }, 60),
                  .flops = flops,
                  .bytes = bytes,
                  .bound_us = bench::BoundUs(peaks, flops, bytes, /*bf16=*/false)});
  }
}

}  // namespace
}  // namespace fathom::ops

int main(int argc, char** argv) {
  using namespace fathom;
  const std::string which = argc > 1 ? argv[1] : "all";
  const int max_threads = argc > 2 ? std::atoi(argv[2]) : ThreadPool(0).size();
  bench::PrintHeader();
  for (int threads = 1; threads <= max_threads; threads *= 2) {
    ThreadPool pool(threads);
    const bench::Peaks peaks = bench::MeasurePeaks(pool);
    bench::Print(peaks, threads);
    if (which != "real") {
      for (const auto& shape : ops::kDemo) ops::Bench(shape, peaks, pool);
    }
    if (which != "demo") {
      for (const auto& shape : ops::kReal) ops::Bench(shape, peaks, pool);
    }
  }
}
