// Times a hyper-connection seam (post, pre with Sinkhorn, norm) of V4-Flash and V4-Pro, with the L2
// cache overwritten before each run. Prints CSV; bound is the time of the bytes at 4.30 TB/s.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "ops/hyper_connection/cuda.h"

namespace fathom::ops {
namespace {

template <class T>
T* Memory(int64_t count) {
  void* data = nullptr;
  FATHOM_CUDA_CHECK(cudaMalloc(&data, static_cast<size_t>(count) * sizeof(T)));
  std::vector<T> host(count);
  for (int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(i * 7919 % 1009) * 1e-3f - 0.5f;
    if constexpr (sizeof(T) == 2) {
      host[i] = F32ToBf16(value);
    } else {
      host[i] = value;
    }
  }
  FATHOM_CUDA_CHECK(cudaMemcpy(data, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return static_cast<T*>(data);
}

void Bench(const char* name, int64_t d, int64_t rows) {
  constexpr int64_t kFlushBytes = int64_t{256} << 20;
  static char* const flush = reinterpret_cast<char*>(Memory<float>(kFlushBytes / 4));
  const HyperConnectionSite site{Memory<float>(24 * 4 * d), Memory<float>(24), Memory<float>(3),
                                 24};
  const auto matrix = [&](int64_t cols) {
    return MatrixView{Memory<bf16_t>(rows * cols), DType::kBF16, rows, cols, cols};
  };
  const HyperConnectionArgs args{.x = matrix(4 * d),
                                 .o = matrix(d),
                                 .site = &site,
                                 .post = Memory<float>(rows * 4),
                                 .comb = Memory<float>(rows * 16),
                                 .u = matrix(d),
                                 .norm = Memory<float>(d),
                                 .z = matrix(d)};
  cudaEvent_t begin, end;
  FATHOM_CUDA_CHECK(cudaEventCreate(&begin));
  FATHOM_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 23; ++i) {
    FATHOM_CUDA_CHECK(cudaMemsetAsync(flush, i, kFlushBytes, nullptr));
    FATHOM_CUDA_CHECK(cudaEventRecord(begin, nullptr));
    HyperConnectionCuda(args, nullptr);
    FATHOM_CUDA_CHECK(cudaEventRecord(end, nullptr));
    FATHOM_CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    FATHOM_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(1e3f * ms);
  }
  std::nth_element(times.begin(), times.begin() + 10, times.end());
  const double bytes = 24.0 * 4 * d * 4 + static_cast<double>(rows) * d * (8 + 2 + 8 + 2 + 2);
  const double bound = bytes / 4.30e6;
  std::printf("seam,%s,%ld,%.2f,%.2f,%.3f\n", name, rows, times[10], bound, bound / times[10]);
}

}  // namespace
}  // namespace fathom::ops

int main() {
  std::printf("op,case,rows,us,bound_us,share\n");
  for (const int64_t rows : {1, 8, 32, 128, 2048}) {
    fathom::ops::Bench("flash 4096", 4096, rows);
    fathom::ops::Bench("pro 7168", 7168, rows);
  }
}
