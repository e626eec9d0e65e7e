#include "cuda/product_order_kernels.h"
#include "ops/cuda/hopper.cuh"
#include "ops/linear/cuda_expand.cuh"

namespace fathom::ops {
namespace {

using cuda::SwizzledOffset;

// Words of rows g, g + 8 of a warp's 16, for the 16 channels from `at`.
__device__ void LoadA(const uint16_t* a, int k, int row, int at, uint32_t (&word)[4]) {
  const int q = static_cast<int>(threadIdx.x) % 4;
  for (int i = 0; i < 4; ++i) {
    const uint16_t* from = a + (row + i % 2 * 8) * k + at + i / 2 * 8 + 2 * q;
    word[i] = *reinterpret_cast<const uint32_t*>(from);
  }
}

__global__ void Mma(const uint16_t* a, const uint16_t* b, int k, float* d) {
  const auto thread = static_cast<int>(threadIdx.x);
  const int row = thread / 32 * 16 + thread % 32 / 4, q = thread % 4;
  for (int n = 0; n < 64; n += 8) {
    float sum[4] = {};
    for (int at = 0; at < k; at += 16) {
      uint32_t word[4];
      LoadA(a, k, row, at, word);
      const uint16_t* from = b + (n + thread % 32 / 4) * k + at + 2 * q;
      cuda::Mma(sum, word[0], word[1], word[2], word[3], *reinterpret_cast<const uint32_t*>(from),
                *reinterpret_cast<const uint32_t*>(from + 8));
    }
    for (int i = 0; i < 4; ++i) d[(row + i / 2 * 8) * 64 + n + 2 * q + i % 2] = sum[i];
  }
}

__global__ void Wgmma(const uint16_t* a, const uint16_t* b, int k, float* d) {
  __shared__ __align__(1024) char panel[64 * 128];
  const auto thread = static_cast<int>(threadIdx.x);
  const int row = thread / 32 * 16 + thread % 32 / 4, q = thread % 4;
  float sum[32] = {};
  for (int base = 0; base < k; base += 64) {
    __syncthreads();
    for (int i = thread; i < 64 * 32; i += 128) {
      *reinterpret_cast<uint32_t*>(panel + SwizzledOffset(i / 32, i % 32 * 4)) =
          *reinterpret_cast<const uint32_t*>(b + i / 32 * k + base + i % 32 * 2);
    }
    cuda::FenceForWgmma();
    __syncthreads();
    for (int step = 0; step < 4; ++step) {
      uint32_t word[4];
      LoadA(a, k, row, base + 16 * step, word);
      const uint64_t at = cuda::PanelDescriptor(cuda::SharedAddress(panel) + 32 * step);
      cuda::WgmmaFence();
      cuda::WgmmaBf16<true>(sum, word, at);
      cuda::WgmmaCommit();
      cuda::WgmmaWait<0>();
    }
  }
  for (int j = 0; j < 8; ++j) {
    for (int i = 0; i < 4; ++i) d[(row + i / 2 * 8) * 64 + 8 * j + 2 * q + i % 2] = sum[4 * j + i];
  }
}

}  // namespace

void ChainByMma(const uint16_t* a, const uint16_t* b, int k, float* d) {
  Mma<<<1, 128>>>(a, b, k, d);
  FATHOM_CUDA_CHECK(cudaGetLastError());
}

void ChainByWgmma(const uint16_t* a, const uint16_t* b, int k, float* d) {
  Wgmma<<<1, 128>>>(a, b, k, d);
  FATHOM_CUDA_CHECK(cudaGetLastError());
}

}  // namespace fathom::ops
