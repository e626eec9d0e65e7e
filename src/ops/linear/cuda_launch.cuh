// The kernels of a plain product y = W x and of the grouped one (output_projection): group g of G
// takes inputs [g*depth, (g+1)*depth) of a row to outputs [g*R, (g+1)*R), R = out / G.
#pragma once

#include "ops/linear/cuda_float.cuh"
#include "ops/linear/cuda_prepare.cuh"
#include "ops/linear/cuda_skinny.cuh"
#include "ops/linear/cuda_tile.cuh"
#include "ops/linear/cuda_wide.cuh"

namespace fathom::ops::cuda {

template <class T>
struct Output {
  T* y;
  int64_t stride;
  bool round;
  bool vector;  // groups begin, and rows lie, so that 4 outputs may be stored at once
};

template <class T>
Output<T> OutputOf(const MatrixView& y, int groups, bool round) {
  return {static_cast<T*>(y.data), y.stride, round, RowsAligned(y) && y.cols / groups % 4 == 0};
}

// One-dimensional grid: block b does jobs b, b + grid, ...; a job is 16 * kTiles outputs of a
// group.
template <Format F, bool kInterleaved, int kRowTiles, class T>
__global__ void __launch_bounds__(kSkinnyThreads, kRowTiles == 1 ? 2 : 1)
    SkinnyKernel(const __grid_constant__ CudaWeightView w, const __nv_bfloat16* x, int64_t x_stride,
                 int rows, int rank, int jobs, Output<T> out) {
  __shared__ SkinnyShared<kRowTiles> shared;
  LetNextStart();
  const int per_group = (rank + kSkinnyOutputs - 1) / kSkinnyOutputs;
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const int r = static_cast<int>(threadIdx.x) % 32 / 4;
  SkinnyProducts<F, kInterleaved, kRowTiles>(
      (jobs - block + blocks - 1) / blocks, w.depth, shared,
      [&](int i, bool) {
        const int index = block + i * blocks;
        const int group = index / per_group;
        SkinnyJob<kRowTiles> job;
        job.w = &w;
        job.out0 = group * rank + index % per_group * kSkinnyOutputs;
        job.out_end = (group + 1) * rank;
        job.rows = rows;
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          const int row = 8 * tile + r;
          job.x[tile] = row < rows ? x + row * x_stride + int64_t{group} * w.depth : nullptr;
        }
        return job;
      },
      [&](int t, int o, float v) {
        out.y[t * out.stride + o] = FromFloat<T>(RoundIf(v, out.round));
      });
}

// Grids: x = tiles of rows, y = tiles of a group's outputs, z = groups. Tiles of the same outputs
// run side by side: they share the weight through L2.
template <Format F, bool kInterleaved, int kRows, class T>
__global__ void __launch_bounds__(kTileThreads, kRows > 64 ? 1 : 2)
    TileKernel(CudaWeightView w, const __nv_bfloat16* x, int64_t x_stride, int rows, int rank,
               Output<T> out) {
  extern __shared__ __align__(16) unsigned char tile_memory[];
  const int group = static_cast<int>(blockIdx.z);
  const int64_t row0 = int64_t{blockIdx.x} * kRows;
  const int count = static_cast<int>(min(int64_t{kRows}, rows - row0));
  const __nv_bfloat16* const first = x + row0 * x_stride + int64_t{group} * w.depth;
  TileProduct<F, kInterleaved, kRows>(
      w, group * rank + static_cast<int>(blockIdx.y) * kTileOutputs, (group + 1) * rank, x,
      [&](int r) { return r < count ? first + r * x_stride : nullptr; }, count, tile_memory,
      [&](int r, int o, const float4& v, int n) {
        StoreResults(out.y + (row0 + r) * out.stride + o, v, n, out.round, out.vector);
      });
}

// The same grids with tiles of kWideOutputs.
template <Format F, bool kInterleaved, int kRows, class T>
__global__ void __launch_bounds__(kWideThreads, 1)
    WideKernel(const __grid_constant__ CudaWeightView w, const __nv_bfloat16* x, int64_t x_stride,
               int rows, int rank, Output<T> out) {
  extern __shared__ __align__(16) unsigned char wide_memory[];
  const int group = static_cast<int>(blockIdx.z);
  const int64_t row0 = int64_t{blockIdx.x} * kRows;
  const int count = static_cast<int>(min(int64_t{kRows}, rows - row0));
  const __nv_bfloat16* const first = x + row0 * x_stride + int64_t{group} * w.depth;
  WideProduct<F, kInterleaved, kRows>(
      w, group * rank + static_cast<int>(blockIdx.y) * kWideOutputs, (group + 1) * rank, x,
      [&](int r) { return r < count ? first + r * x_stride : nullptr; }, count, wide_memory,
      [&](int r, int o, const float4& v, int n) {
        StoreResults(out.y + (row0 + r) * out.stride + o, v, n, out.round, out.vector);
      });
}

template <class X, class T>
__global__ void __launch_bounds__(kFloatThreads)
    FloatKernel(CudaWeightView w, const X* x, int64_t x_stride, int rows, int rank, Output<T> out) {
  __shared__ FloatShared shared;
  const int group = static_cast<int>(blockIdx.z);
  const int64_t row0 = int64_t{blockIdx.x} * kFloatRows;
  const X* const first = x + row0 * x_stride + int64_t{group} * w.in;
  FloatProduct(
      w, group * rank + static_cast<int>(blockIdx.y) * kFloatOutputs, (group + 1) * rank,
      static_cast<int>(min(int64_t{kFloatRows}, rows - row0)), shared,
      [&](int r, int k) { return ToFloat(first[r * x_stride + k]); },
      [&](int r, int o, float v) {
        out.y[(row0 + r) * out.stride + o] = FromFloat<T>(RoundIf(v, out.round));
      });
}

// x [rows, groups * w.in], f32 or bf16, not rounded.
template <class T>
void LaunchFloat(const CudaWeightView& w, const MatrixView& x, int groups, const Output<T>& out,
                 cudaStream_t stream) {
  const int rank = w.out / groups;
  const dim3 grid(Blocks(x.rows, kFloatRows), Blocks(rank, kFloatOutputs), groups);
  WithActivationType(x.dtype, [&](auto type) {
    using X = decltype(type);
    FloatKernel<X, T><<<grid, kFloatThreads, 0, stream>>>(
        w, static_cast<const X*>(x.data), x.stride, static_cast<int>(x.rows), rank, out);
  });
}

// Whether a product of so many rows takes them in a form of WideForm.
inline bool IsWide(int64_t rows, WeightFormat format) {
  return rows > 4 * kSkinnyRows &&
         (format == Format::kFp8Block128 || format == Format::kFp4Block32);
}

inline constexpr int kSkinnyBlocks = 264;  // two on every multiprocessor of an H200

// x in the form that the number of rows asks for (IsWide).
template <Format F, bool kInterleaved, class T>
void LaunchFormat(const CudaWeightView& w, const __nv_bfloat16* x, int64_t x_stride, int rows,
                  int groups, const Output<T>& out, cudaStream_t stream) {
  const int rank = w.out / groups;
  const auto skinny = [&]<int kRowTiles>() {
    const int jobs = static_cast<int>(Blocks(rank, kSkinnyOutputs)) * groups;
    // Every block the same number of jobs, as far as it goes.
    const int rounds = (jobs + kSkinnyBlocks - 1) / kSkinnyBlocks;
    LaunchOverlapped(SkinnyKernel<F, kInterleaved, kRowTiles, T>, Blocks(jobs, rounds),
                     kSkinnyThreads, 0, stream, 1, w, x, x_stride, rows, rank, jobs, out);
  };
  if (rows <= kSkinnyRows) return skinny.template operator()<1>();
  if (rows <= 2 * kSkinnyRows) return skinny.template operator()<2>();
  if (rows <= 4 * kSkinnyRows) return skinny.template operator()<4>();
  const auto launch = [&](auto kernel, int tile_rows, int outputs, int threads, int bytes) {
    AllowShared(kernel, bytes);
    kernel<<<dim3(Blocks(rows, tile_rows), Blocks(rank, outputs), groups), threads, bytes,
             stream>>>(w, x, x_stride, rows, rank, out);
  };
  if constexpr (F == Format::kBF16) {
    if (rows <= 64) {
      launch(TileKernel<F, kInterleaved, 64, T>, 64, kTileOutputs, kTileThreads,
             kTileSharedBytes<64>);
    } else {
      launch(TileKernel<F, kInterleaved, 128, T>, 128, kTileOutputs, kTileThreads,
             kTileSharedBytes<128>);
    }
  } else if (rows <= 64) {
    launch(WideKernel<F, kInterleaved, 64, T>, 64, kWideOutputs, kWideThreads,
           kWideSharedBytes<64>);
  } else {
    launch(WideKernel<F, kInterleaved, 128, T>, 128, kWideOutputs, kWideThreads,
           kWideSharedBytes<128>);
  }
}

// Whether a product may read x in place: bf16, whole units in each group, 16-byte rows.
inline bool ReadableInPlace(const MatrixView& x, int groups) {
  return x.dtype == DType::kBF16 && x.cols / groups % kUnit == 0 && x.stride % 8 == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

}  // namespace fathom::ops::cuda
