// ExpertsCpu on the demo checkpoint's layer and a slice of V4-Flash's, as CSV.
//
//   experts_bench [max_threads]
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "ops/bench_util.h"
#include "ops/experts/experts.h"

namespace fathom::ops {
namespace {

struct Stored {
  std::vector<uint8_t> data;
  std::vector<uint8_t> scale;
  LinearWeight weight;
  Stored(WeightFormat format, int64_t out, int64_t in) {
    std::mt19937 rng(1);
    const bool fp4 = format == WeightFormat::kFp4Block32;
    data.resize(fp4 ? out * in / 2 : out * in);
    for (auto& byte : data) {
      byte = static_cast<uint8_t>(rng());
      if (!fp4 && (byte & 0x7f) == 0x7f) byte = 0;
    }
    scale.assign(fp4 ? out * (in / 32) : ((out + 127) / 128) * ((in + 127) / 128), fp4 ? 122 : 116);
    weight.format = format;
    weight.out = out;
    weight.in = in;
    weight.data = data.data();
    weight.scale = scale.data();
    PackLinearCpu(weight);
  }
};

void Bench(int64_t width, int64_t inner, int count, int k, const bench::Peaks& peaks,
           ThreadPool& pool) {
  std::vector<ExpertWeights> experts;
  for (int e = 0; e <= count; ++e) {
    const auto format = e < count ? WeightFormat::kFp4Block32 : WeightFormat::kFp8Block128;
    experts.push_back({Stored(format, inner, width).weight, Stored(format, width, inner).weight,
                       Stored(format, inner, width).weight});
  }
  std::mt19937 rng(2);
  for (const int64_t rows : {1, 2, 4, 8, 16, 128, 512}) {
    if (rows * (k + 1) * width * inner > 5'000'000'000) continue;
    std::vector<float> z(rows * width);
    for (float& v : z) v = static_cast<float>(static_cast<int>(rng() % 255) - 127) / 64.0f;
    std::vector<float> y(rows * width);
    std::vector<int32_t> chosen(rows * k);
    for (int64_t t = 0; t < rows; ++t) {
      const int first = static_cast<int>(rng() % (count - k + 1));
      for (int j = 0; j < k; ++j) chosen[t * k + j] = first + j;
    }
    const std::vector<float> weights(rows * k, 0.5f);
    const ExpertsArgs args{.z = F32Matrix(z.data(), rows, width),
                           .experts = experts.data(),
                           .num_experts = count,
                           .shared = &experts.back(),
                           .chosen = chosen.data(),
                           .weights = weights.data(),
                           .top_k = k,
                           .y = F32Matrix(y.data(), rows, width)};
    const double flops = 6.0 * static_cast<double>(rows * (k + 1) * width * inner);
    const double used = std::min<double>(count, static_cast<double>(rows * k));
    const double bytes = 3.0 * static_cast<double>(width * inner) * (used * 17 / 32 + 1);
    bench::Print({.op = "experts",
                  .shape = std::to_string(rows) + "x" + std::to_string(width) + "x" +
                           std::to_string(inner) + " top" + std::to_string(k),
                  .threads = pool.size(),
                  .us = bench::TimeUs([&] { ExpertsCpu(args, pool); }, 100),
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
    ops::Bench(256, 256, 8, 2, peaks, pool);
    ops::Bench(4096, 2048, 12, 6, peaks, pool);
  }
}
