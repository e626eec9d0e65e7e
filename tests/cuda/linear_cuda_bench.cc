// LinearCuda, ExpertsCuda and OutputProjectionCuda on V4-Flash's or V4-Pro's layers, as CSV:
//
//   linear_cuda_bench [--pro] [rows ...]        (default 1 2 4 8 16 32 64 128 512 2048)
//
// us is the median of repeats between which a copy larger than L2 passes. bound is the time the
// bytes take at 4.30 TB/s or the operations at 784 (bf16 weights) or 1399 (FP8 and FP4 weights)
// TFLOP/s, whichever is longer; share = bound / us. Bytes are those of the weights that are read
// (of the experts that are chosen), of x and of y.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "ops/experts/cuda.h"
#include "ops/linear/cuda.h"
#include "ops/output_projection/cuda.h"

namespace fathom::ops {
namespace {

constexpr double kBytesPerUs = 4.30e6;
constexpr double kBf16FlopsPerUs = 784e6;
constexpr double kFp8FlopsPerUs = 1399e6;
constexpr int64_t kFlushBytes = int64_t{256} << 20;
constexpr int kRepeats = 15;

// Device memory until the end of the program, zero-filled.
void* Memory(int64_t bytes) {
  void* data = nullptr;
  FATHOM_CUDA_CHECK(cudaMalloc(&data, static_cast<size_t>(bytes)));
  FATHOM_CUDA_CHECK(cudaMemset(data, 0, static_cast<size_t>(bytes)));
  return data;
}

double MedianUs(const std::function<void()>& run) {
  static void* const flush = Memory(kFlushBytes);
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  FATHOM_CUDA_CHECK(cudaEventCreate(&begin));
  FATHOM_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> us;
  for (int i = 0; i < kRepeats + 2; ++i) {
    // The flush also keeps the device busy while the launches queue up behind it.
    FATHOM_CUDA_CHECK(cudaMemsetAsync(flush, i, kFlushBytes, nullptr));
    FATHOM_CUDA_CHECK(cudaEventRecord(begin, nullptr));
    run();
    FATHOM_CUDA_CHECK(cudaEventRecord(end, nullptr));
    FATHOM_CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    FATHOM_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) us.push_back(ms * 1e3f);
  }
  FATHOM_CUDA_CHECK(cudaEventDestroy(begin));
  FATHOM_CUDA_CHECK(cudaEventDestroy(end));
  std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
  return us[us.size() / 2];
}

void Print(const std::string& op, const std::string& shape, double us, double bytes, double flops,
           bool bf16) {
  const double bound =
      std::max(bytes / kBytesPerUs, flops / (bf16 ? kBf16FlopsPerUs : kFp8FlopsPerUs));
  std::printf("%s,%s,%.2f,%.0f,%.1f,%.3f\n", op.c_str(), shape.c_str(), us, bytes / us * 1e-3,
              flops / us * 1e-6, bound / us);
  std::fflush(stdout);
}

std::mt19937& Rng() {
  static std::mt19937 rng(1);
  return rng;
}

const char* Name(WeightFormat format) {
  constexpr const char* kNames[] = {"f32", "bf16", "fp8", "fp4"};
  return kNames[static_cast<int>(format)];
}

// Random finite codes; small scales.
LinearWeight Weight(WeightFormat format, int64_t out, int64_t in) {
  LinearWeight w{
      .format = format, .out = out, .in = in, .data = nullptr, .scale = nullptr, .packed = nullptr};
  std::vector<uint8_t> data(CudaWeightBytes(w));
  std::vector<uint8_t> scale(out * ((in + 31) / 32), 118);
  for (size_t i = 0; i + 4 <= data.size(); i += 4) {
    uint32_t bits = Rng()();
    bits &= format == WeightFormat::kFp4Block32 ? 0xffffffffu
            : format == WeightFormat::kBF16     ? 0xbfffbfffu
                                                : 0xf7f7f7f7u;
    std::copy_n(reinterpret_cast<const uint8_t*>(&bits), 4, data.data() + i);
  }
  w.data = data.data();
  w.scale = scale.data();
  PackLinearCuda(w);
  w.data = nullptr;  // the vectors end here
  w.scale = nullptr;
  return w;
}

int64_t StoredBytes(const LinearWeight& w) {
  switch (w.format) {
    case WeightFormat::kF32: return w.out * w.in * 4;
    case WeightFormat::kBF16: return w.out * w.in * 2;
    case WeightFormat::kFp8Block128: return w.out * w.in;
    case WeightFormat::kFp4Block32: return w.out * w.in / 2 + w.out * w.in / 32;
  }
  return 0;
}

// bf16 values of order 1.
MatrixView Activations(int64_t rows, int64_t cols) {
  std::vector<uint16_t> host(rows * cols);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < host.size(); ++i) {
    host[i] = i < 100'003 ? F32ToBf16(normal(Rng())) : host[i % 100'003];
  }
  void* data = nullptr;
  FATHOM_CUDA_CHECK(cudaMalloc(&data, host.size() * 2));
  FATHOM_CUDA_CHECK(cudaMemcpy(data, host.data(), host.size() * 2, cudaMemcpyHostToDevice));
  return {data, DType::kBF16, rows, cols, cols};
}

void Free(const MatrixView& m) {
  FATHOM_CUDA_CHECK(cudaFree(m.data));
}

void BenchLinear(const char* what, WeightFormat format, int64_t out, int64_t in, bool round,
                 const std::vector<int64_t>& all_rows) {
  const LinearWeight w = Weight(format, out, in);
  for (const int64_t rows : all_rows) {
    const MatrixView x = Activations(rows, in);
    MatrixView y{nullptr, round ? DType::kBF16 : DType::kF32, rows, out, out};
    y.data = Memory(rows * out * ElementBytes(y.dtype));
    void* scratch = Memory(LinearCudaScratchBytes(rows, in));
    const double us = MedianUs([&] {
      LinearCuda({.x = x, .weight = &w, .y = y, .round_output = round}, scratch, nullptr);
    });
    const double bytes = static_cast<double>(StoredBytes(w)) + 2.0 * rows * in +
                         static_cast<double>(rows * out * ElementBytes(y.dtype));
    Print(std::string("linear ") + what,
          std::to_string(rows) + "x" + std::to_string(out) + "x" + std::to_string(in) + " " +
              Name(format),
          us, bytes, 2.0 * rows * out * in, format == WeightFormat::kBF16);
    Free(x);
    Free(y);
    FATHOM_CUDA_CHECK(cudaFree(scratch));
  }
}

void BenchExperts(int count, int k, int64_t hidden, int64_t inner,
                  const std::vector<int64_t>& all_rows) {
  // Every expert has memory of its own with the same contents.
  ExpertWeights pattern;
  std::vector<uint8_t> data(hidden * inner);
  const std::vector<uint8_t> scale(hidden * inner / 32, 118);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(Rng()() & 0xf7);
  const auto bind = [&](WeightFormat format) {
    const LinearWeight up{.format = format,
                          .out = inner,
                          .in = hidden,
                          .data = data.data(),
                          .scale = scale.data(),
                          .packed = nullptr};
    LinearWeight down = up;
    std::swap(down.out, down.in);
    return ExpertWeights{up, down, up};
  };
  std::vector<ExpertWeights> experts(count, bind(WeightFormat::kFp4Block32));
  ExpertWeights shared = bind(WeightFormat::kFp8Block128);
  PackExpertsCuda(experts.data(), count, shared);

  for (const int64_t rows : all_rows) {
    const MatrixView z = Activations(rows, hidden);
    const MatrixView y{Memory(rows * hidden * 2), DType::kBF16, rows, hidden, hidden};
    std::vector<int32_t> chosen;
    std::vector<int32_t> ids(count);
    for (int e = 0; e < count; ++e) ids[e] = e;
    for (int64_t t = 0; t < rows; ++t) {
      std::shuffle(ids.begin(), ids.end(), Rng());
      std::vector<int32_t> mine(ids.begin(), ids.begin() + k);
      std::sort(mine.begin(), mine.end());
      chosen.insert(chosen.end(), mine.begin(), mine.end());
    }
    const std::vector<float> weights(rows * k, 0.25f);
    auto* device_chosen = static_cast<int32_t*>(Memory(rows * k * 4));
    auto* device_weights = static_cast<float*>(Memory(rows * k * 4));
    FATHOM_CUDA_CHECK(
        cudaMemcpy(device_chosen, chosen.data(), chosen.size() * 4, cudaMemcpyHostToDevice));
    FATHOM_CUDA_CHECK(
        cudaMemcpy(device_weights, weights.data(), weights.size() * 4, cudaMemcpyHostToDevice));
    const ExpertsArgs args{.z = z,
                           .experts = experts.data(),
                           .num_experts = count,
                           .shared = &shared,
                           .chosen = device_chosen,
                           .weights = device_weights,
                           .top_k = k,
                           .y = y};
    void* scratch = Memory(ExpertsCudaScratchBytes(args, rows));
    const double us = MedianUs([&] { ExpertsCuda(args, scratch, nullptr); });
    const auto distinct =
        static_cast<double>(std::set<int32_t>(chosen.begin(), chosen.end()).size());
    const auto matrix = static_cast<double>(hidden * inner);
    const double bytes =
        distinct * 3 * matrix * (0.5 + 1 / 32.0) + 3 * matrix + 4.0 * rows * hidden;
    Print("experts",
          std::to_string(rows) + "x" + std::to_string(hidden) + "x" + std::to_string(inner) + " " +
              std::to_string(k) + "of" + std::to_string(count),
          us, bytes, 2.0 * rows * (k + 1) * 3 * matrix, false);
    Free(z);
    Free(y);
    FATHOM_CUDA_CHECK(cudaFree(device_chosen));
    FATHOM_CUDA_CHECK(cudaFree(device_weights));
    FATHOM_CUDA_CHECK(cudaFree(scratch));
  }
}

void BenchOutputProjection(int heads, int groups, int64_t rank,
                           const std::vector<int64_t>& all_rows) {
  const int64_t depth = int64_t{kHeadDim} * heads / groups;
  const LinearWeight w = Weight(WeightFormat::kFp8Block128, groups * rank, depth);
  for (const int64_t rows : all_rows) {
    const MatrixView o = Activations(rows, int64_t{kHeadDim} * heads);
    const MatrixView y{Memory(rows * w.out * 2), DType::kBF16, rows, w.out, w.out};
    auto* rope = static_cast<float*>(Memory(rows * kRopeDim * 4));
    const OutputProjectionArgs args{
        .o = o, .rope = rope, .heads = heads, .groups = groups, .wo_a = &w, .y = y};
    void* scratch = Memory(OutputProjectionCudaScratchBytes(args, rows));
    const double us = MedianUs([&] { OutputProjectionCuda(args, scratch, nullptr); });
    FATHOM_CUDA_CHECK(cudaFree(scratch));
    const double bytes = static_cast<double>(StoredBytes(w)) + 2.0 * rows * (o.cols + w.out);
    Print("output_projection",
          std::to_string(rows) + "x" + std::to_string(w.out) + "x" + std::to_string(depth) + " h" +
              std::to_string(heads),
          us, bytes, 2.0 * rows * w.out * depth, true);
    Free(o);
    Free(y);
    FATHOM_CUDA_CHECK(cudaFree(rope));
  }
}

}  // namespace
}  // namespace fathom::ops

int main(int argc, char** argv) {
  using namespace fathom::ops;
  using fathom::ops::WeightFormat;
  std::vector<int64_t> rows;
  bool pro = false;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--pro") pro = true;
    else rows.push_back(std::atoll(argv[i]));
  }
  if (rows.empty()) rows = {1, 2, 4, 8, 16, 32, 64, 128, 512, 2048};
  std::vector<int64_t> few;
  for (const int64_t r : rows) {
    if (r <= 128) few.push_back(r);
  }
  std::printf("op,shape,us,gbs,tflops,share\n");
  constexpr auto kFp8 = WeightFormat::kFp8Block128;
  constexpr auto kBf16 = WeightFormat::kBF16;
  struct Model {
    int64_t hidden, q_rank;
    int heads, groups, experts;
    int64_t inner;
  };
  const Model m = pro ? Model{7168, 1536, 128, 16, 384, 3072} : Model{4096, 1024, 64, 8, 256, 2048};
  BenchLinear("wq_a", kFp8, m.q_rank, m.hidden, true, rows);
  BenchLinear("wq_b", kFp8, int64_t{512} * m.heads, m.q_rank, true, rows);
  BenchLinear("wkv", kFp8, 512, m.hidden, true, rows);
  BenchLinear("wo_b", kFp8, m.hidden, int64_t{1024} * m.groups, true, rows);
  BenchLinear("gate", kBf16, m.experts, m.hidden, false, rows);
  BenchLinear("compressor", kBf16, 1024, m.hidden, false, rows);
  BenchLinear("expert", WeightFormat::kFp4Block32, m.inner, m.hidden, true, rows);
  BenchLinear("head", kBf16, 129280, m.hidden, false, few);
  BenchOutputProjection(m.heads, m.groups, 1024, rows);
  BenchExperts(m.experts, 6, m.hidden, m.inner, rows);
}
