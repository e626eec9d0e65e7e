#include "cuda/quantise_kernels.h"
#include "ops/quantise/cuda.cuh"

namespace fathom::ops {
namespace {

template <int N>
__global__ void Kernel(RowRounding rounding, PagedRows out, const float* x, float* decoded,
                       float* decoded_channels) {
  const int row = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t begin = int64_t{row} * 32 * N;
  float v[N];
  cuda::LoadWarpRow(x + begin, v, lane);
  if constexpr (N == 16) {
    if (rounding == RowRounding::kKv) cuda::RoundKvWarpRow(v, lane);
  } else {
    if (rounding == RowRounding::kHadamard) cuda::HadamardWarpRow(v, lane, true);
    if (rounding == RowRounding::kHadamardUnrounded) cuda::HadamardWarpRow(v, lane, false);
    if (rounding == RowRounding::kFp4) cuda::RoundFp4WarpRow(v);
    if (rounding == RowRounding::kFp8Block) cuda::RoundFp8WarpBlock(v);
  }
  std::byte* data = cuda::RowData(out, 0, row);
  std::byte* scale = cuda::RowScale(out, 0, row);
  cuda::EncodeWarpRow(out.format, v, data, scale, lane);
  __syncwarp();
  float back[N];
  cuda::DecodeWarpRow(out.format, data, scale, back, lane);
  cuda::StoreWarpRow(back, decoded + begin, lane);
  for (int c = lane; c < 32 * N; c += 32) {
    decoded_channels[begin + c] = cuda::DecodeChannel(out.format, data, scale, c);
  }
}

}  // namespace

void RoundEncodeDecode(RowRounding rounding, const PagedRows& out, int rows, const float* x,
                       float* decoded, float* decoded_channels, CudaStream stream) {
  const auto kernel = out.channels == 512 ? Kernel<16> : Kernel<4>;
  kernel<<<rows, 32, 0, stream>>>(rounding, out, x, decoded, decoded_channels);
  FATHOM_CUDA_CHECK(cudaGetLastError());
}

}  // namespace fathom::ops
