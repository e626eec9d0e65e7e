#include "ops/cuda/hopper.cuh"
#include "ops/head/cuda.h"
#include "ops/hyper_connection/cuda.h"

namespace fathom::ops {
namespace {

constexpr int kThreads = 256;

// A block per (token, kThreads channels); each value is written to all streams.
template <class T>
__global__ void Embed(const __nv_bfloat16* table, const int32_t* token, T* x, int64_t stride,
                      int64_t d) {
  cuda::LetNextStart();
  cuda::WaitForPrevious();
  const int64_t t = blockIdx.x;
  const int64_t i = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (i >= d) return;
  const T value = cuda::FromFloat<T>(cuda::ToFloat(table[token[t] * d + i]));
#pragma unroll
  for (int s = 0; s < kStreams; ++s) x[t * stride + s * d + i] = value;
}

template <class T>
__global__ void Gather(const T* x, int64_t stride, const int32_t* rows, T* out, int64_t out_stride,
                       int64_t n) {
  cuda::LetNextStart();
  cuda::WaitForPrevious();
  const int64_t r = blockIdx.x;
  const int64_t i = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (i < n) out[r * out_stride + i] = x[rows[r] * stride + i];
}

}  // namespace

void EmbedCuda(const EmbedArgs& args, CudaStream stream) {
  const int64_t d = args.x.cols / kStreams;
  const dim3 grid(static_cast<unsigned>(args.x.rows), cuda::Blocks(d, kThreads));
  cuda::WithActivationType(args.x.dtype, [&]<class T>(T) {
    cuda::LaunchOverlapped(Embed<T>, grid, kThreads, 0, stream, 1,
                           reinterpret_cast<const __nv_bfloat16*>(args.table), args.token,
                           static_cast<T*>(args.x.data), args.x.stride, d);
  });
  FATHOM_CUDA_CHECK(cudaGetLastError());
}

void HeadCollapseCuda(const HeadArgs& args, CudaStream stream) {
  const dim3 grid(static_cast<unsigned>(args.num_rows), cuda::Blocks(args.x.cols, kThreads));
  cuda::WithActivationType(args.x.dtype, [&]<class T>(T) {
    cuda::LaunchOverlapped(Gather<T>, grid, kThreads, 0, stream, 1,
                           static_cast<const T*>(args.x.data), args.x.stride, args.rows,
                           static_cast<T*>(args.gathered.data), args.gathered.stride, args.x.cols);
  });
  FATHOM_CUDA_CHECK(cudaGetLastError());
  HyperConnectionCuda({.x = TopRows(args.gathered, args.num_rows),
                       .site = args.site,
                       .u = args.u,
                       .norm = args.norm,
                       .z = args.z,
                       .eps = args.eps,
                       .numerics = args.numerics},
                      stream);
}

}  // namespace fathom::ops
