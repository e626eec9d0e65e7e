// The kernels of a plain product y = W x and of the grouped one (output_projection): group g of G
// takes inputs [g*depth, (g+1)*depth) of a row to outputs [g*R, (g+1)*R), R = out / G.
#pragma once

#include <cmath>
#include <type_traits>

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

// Tiles of 16 outputs that a group may touch: of ranks that are no multiple of 16 one more than it
// does, in some groups.
__host__ __device__ constexpr int GroupTiles(int rank) {
  return rank % kTile == 0 ? rank / kTile : rank / kTile + 2;
}

// Jobs of a plain or grouped product: a tile of a group's outputs each, every step-th one.
// X: const __nv_bfloat16* or FreshRow. kGrouped: of more than one group; else nothing is divided.
template <int kRowTiles, class X = const __nv_bfloat16*, bool kGrouped = true>
struct LinearCursor {
  const uint8_t* data;
  const uint8_t* scale;
  bool wide;
  int out0, out_begin, out_end;
  int rows;
  X x[kRowTiles];
  int rank, depth, last_tile;
  int tile;  // of the group's
  int group_step, tile_step;

  // index: of the first job. step: to the next one.
  __device__ LinearCursor(const CudaWeightView& w, X first_x, int64_t x_stride, int num_rows,
                          int group_rank, int index, int step)
      : data(w.data),
        scale(w.scale),
        wide(w.wide),
        rows(num_rows),
        rank(group_rank),
        depth(w.depth),
        last_tile((w.out - 1) / kTile) {
    const int per_group = GroupTiles(rank);
    const int group = kGrouped ? index / per_group : 0;
    tile = index - group * per_group;
    group_step = kGrouped ? step / per_group : 0;
    tile_step = step - group_step * per_group;
    const int lane_row = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      x[r] = first_x + min(8 * r + lane_row, rows - 1) * x_stride + int64_t{group} * depth;
    }
    out_begin = group * rank;
    Enter();
  }

  __device__ void Next() {
    int groups = group_step;
    tile += tile_step;
    if (tile >= GroupTiles(rank)) tile -= GroupTiles(rank), ++groups;
    out_begin += groups * rank;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) x[r] = x[r] + int64_t{groups} * depth;
    Enter();
  }

 private:
  // A tile beyond the last one is the last one again, of which nothing is wanted.
  __device__ void Enter() {
    const int at = out_begin / kTile + tile;
    out0 = min(at, last_tile) * kTile;
    out_end = at > last_tile ? out_begin : out_begin + rank;
  }
};

// Which jobs of a one-dimensional grid are whose. By block: block b does jobs b, b + grid, ...; by
// warp: the warps of the grid likewise, those of a block side by side.
struct SkinnyShare {
  int first, step, count;

  // most: any worker's jobs at most, ceil(jobs / step), which spares a division.
  __device__ SkinnyShare(bool by_warp, int jobs, int most) {
    constexpr int kWarps = kSkinnyThreads / 32;
    first = static_cast<int>(blockIdx.x);
    step = static_cast<int>(gridDim.x);
    if (by_warp) {
      first = first * kWarps + static_cast<int>(threadIdx.x) / 32;
      step *= kWarps;
    }
    count = first + (most - 1) * step < jobs ? most : most - 1;
  }
};

// The weight of the two kernels below is no __grid_constant__: nvcc 13.0 then takes a cursor, whose
// first members are copies of the parameter's, for the parameter itself, and reads others past it.
// Groups of 8 * kRowTiles rows along y.
template <Format F, int kRowTiles, bool kByWarp, class T>
__global__ void __launch_bounds__(kSkinnyThreads, kRowTiles <= 2 ? 2 : 1)
    SkinnyKernel(CudaWeightView w, const __nv_bfloat16* x, int64_t x_stride, int rows, int rank,
                 int jobs, int most, Output<T> out) {
  using Cursor = LinearCursor<kRowTiles>;
  LetNextStart();
  const SkinnyShare share(kByWarp, jobs, most);
  const auto first_row = static_cast<int>(blockIdx.y) * kSkinnyRows * kRowTiles;
  x += first_row * x_stride;
  out.y += first_row * out.stride;
  const Cursor cursor(w, x, x_stride, min(rows - first_row, kSkinnyRows * kRowTiles), rank,
                      share.first, share.step);
  const auto store = [&](const Cursor&, int t, int o, float v) {
    out.y[t * out.stride + o] = FromFloat<T>(RoundIf(v, out.round));
  };
  auto& shared = SharedOf<SkinnyShared<kRowTiles>>();
  if constexpr (kByWarp) {
    SkinnyByWarp<F, kRowTiles>(
        share.count, w.depth, shared, cursor, [] { WaitForPrevious(); }, store);
  } else {
    SkinnyByBlock<F, kRowTiles>(
        share.count, w.depth, shared, cursor, [](int, int) { WaitForPrevious(); }, store);
  }
}

// Elements between the rows of activations in shared memory: two rows' chunks lie in different
// banks.
__host__ __device__ constexpr int64_t FreshStride(int64_t depth) {
  return depth + 32;
}

// The same of up to 8 rows that each block quantises for itself while its first weights come.
// Dynamic shared memory: SkinnyShared<1>, then [rows][FreshStride(depth)] bf16.
template <Format F, bool kByWarp, class X, class T>
__global__ void __launch_bounds__(kSkinnyThreads, 2)
    SkinnyFreshKernel(CudaWeightView w, Preparation<X> x, int jobs, int most, Output<T> out) {
  using Cursor = LinearCursor<1, FreshRow<F>, false>;
  auto& shared = SharedOf<SkinnyShared<1>>();
  const FreshRow<F> fresh{SharedAddress(&shared + 1)};
  const int64_t stride = FreshStride(w.depth);
  LetNextStart();
  const SkinnyShare share(kByWarp, jobs, most);
  const Cursor cursor(w, fresh, stride, x.rows, w.out, share.first, share.step);
  // Four units at a time.
  const auto prepare = [&](int t, int first, int end) {
    FourUnits<X> units;
    units.Load(x.x + t * x.stride, x.in, x.vector, first, end);
    units.Store(first, end, fresh + t * stride);
  };
  const auto store = [&](const Cursor&, int t, int o, float v) {
    out.y[t * out.stride + o] = FromFloat<T>(RoundIf(v, out.round));
  };
  if constexpr (kByWarp) {
    SkinnyByWarp<F, 1>(
        share.count, w.depth, shared, cursor,
        [&] {
          WaitForPrevious();
          const int fours = (x.units + 3) / 4;
          for (int i = static_cast<int>(threadIdx.x) / 32; i < x.rows * fours;
               i += kSkinnyThreads / 32) {
            prepare(i / fours, i % fours * 4, x.units);
          }
          __syncthreads();
        },
        store);
  } else {
    SkinnyByBlock<F, 1>(
        share.count, w.depth, shared, cursor,
        [&](int begin, int count) {
          WaitForPrevious();
          for (int t = 0; t < x.rows; ++t) {
            for (int first = begin; first < begin + count; first += 4) {
              prepare(t, first, begin + count);
            }
          }
          __syncwarp();
        },
        store);
  }
}

// Grids: x = tiles of rows, y = tiles of a group's outputs, z = groups. Tiles of the same outputs
// run side by side: they share the weight through L2.
template <int kRows, class T>
__global__ void __launch_bounds__(kTileThreads, kRows > 64 ? 1 : 2)
    TileKernel(CudaWeightView w, const __nv_bfloat16* x, int64_t x_stride, int rows, int rank,
               Output<T> out) {
  extern __shared__ __align__(16) unsigned char tile_memory[];
  const int group = static_cast<int>(blockIdx.z);
  const int64_t row0 = int64_t{blockIdx.x} * kRows;
  const int count = static_cast<int>(min(int64_t{kRows}, rows - row0));
  const __nv_bfloat16* const first = x + row0 * x_stride + int64_t{group} * w.depth;
  TileProduct<kRows>(
      w, group * rank + static_cast<int>(blockIdx.y) * kTileOutputs, (group + 1) * rank, x,
      [&](int r) { return r < count ? first + r * x_stride : nullptr; }, count, tile_memory,
      [&](int r, int o, const float4& v, int n) {
        StoreResults(out.y + (row0 + r) * out.stride + o, v, n, out.round, out.vector);
      });
}

// The same grids with tiles of kWideOutputs.
template <Format F, int kRows, class T>
__global__ void __launch_bounds__(kWideThreads, 1)
    WideKernel(const __grid_constant__ CudaWeightView w, const __nv_bfloat16* x, int64_t x_stride,
               int rows, int rank, Output<T> out) {
  extern __shared__ __align__(16) unsigned char wide_memory[];
  const int group = static_cast<int>(blockIdx.z);
  const int64_t row0 = int64_t{blockIdx.x} * kRows;
  const int count = static_cast<int>(min(int64_t{kRows}, rows - row0));
  const __nv_bfloat16* const first = x + row0 * x_stride + int64_t{group} * w.depth;
  WideProduct<F, kRows>(
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

inline constexpr int kStreamRows = 4 * kSkinnyRows;  // of one pass over the weights, at most

// Whether a product streams its weights past the rows, once for every kStreamRows of them, rather
// than cut into tiles of outputs and rows, of which few outputs make too few. Compares the times of
// the two in microseconds as an H200 takes them: 700 units of 16 outputs and 32 rows, or a unit of
// a tile on each multiprocessor, in 1.4 (FP8, FP4: warpgroup products) or 4.1 (BF16).
inline bool Streams(int64_t rows, const CudaWeightView& w, int groups, CudaWay way) {
  if (rows <= kStreamRows) return true;
  if (way != CudaWay::kFaster) return way == CudaWay::kStream;
  constexpr double kUnits = 700, kProcessors = 132;
  const auto units = static_cast<double>(w.depth / kUnit);
  const int64_t jobs = int64_t{Blocks(rows, kStreamRows)} * GroupTiles(w.out / groups) * groups;
  const int64_t tiles = int64_t{Blocks(rows, 128)} * Blocks(w.out / groups, 128) * groups;
  const double stream = static_cast<double>(jobs) * units / kUnits;
  const double tile = ceil(static_cast<double>(tiles) / kProcessors) * units *
                      (w.format == Format::kBF16 ? 4.1 : 1.4);
  return stream < tile;
}

// Whether a product takes its rows in a form of WideForm.
inline bool IsWide(int64_t rows, const CudaWeightView& w, int groups, CudaWay way) {
  return (w.format == Format::kFp8Block128 || w.format == Format::kFp4Block32) &&
         !Streams(rows, w, groups, way);
}

// Whether jobs are warps' and not blocks': where they keep half of the warps of so many blocks
// busy.
constexpr bool JobsByWarp(int jobs, int blocks) {
  return jobs >= blocks * (kSkinnyThreads / 32) / 2;
}

// Launches a kernel of SkinnyShare for so many groups of rows: workers(true, blocks, most) for jobs
// by warp (JobsByWarp), else workers(false, blocks, most).
template <class Workers>
void LaunchSkinny(int jobs, int groups, Workers&& workers) {
  constexpr int kWarps = kSkinnyThreads / 32;
  const int all_blocks = max(1, kSkinnyBlocks / groups);
  const auto launch = [&](auto by_warp, int per_block) {
    // Every worker the same number of jobs, as far as it goes.
    const int all_workers = all_blocks * per_block;
    const int most = (jobs + all_workers - 1) / all_workers;
    workers(by_warp, Blocks(jobs, most * per_block), most);
  };
  if (JobsByWarp(jobs, all_blocks)) {
    launch(std::true_type(), kWarps);
  } else {
    launch(std::false_type(), 1);
  }
}

// Bytes beside SkinnyShared, of two blocks on a multiprocessor.
inline constexpr int64_t kMostFreshBytes = 33 << 10;

// Whether a product takes activations as they come, without a kernel that prepares them.
inline bool TakesFresh(int64_t rows, const CudaWeightView& w) {
  return rows <= kSkinnyRows && rows * FreshStride(w.depth) * 2 <= kMostFreshBytes &&
         (w.format == Format::kFp8Block128 || w.format == Format::kFp4Block32);
}

template <Format F, class T>
void LaunchFresh(const CudaWeightView& w, const MatrixView& x, const Output<T>& out,
                 cudaStream_t stream) {
  const int jobs = GroupTiles(w.out);
  if (x.rows == 0) return;
  WithActivationType(x.dtype, [&]<class X>(X) {
    const auto p = MakePreparation<X>(x, Form::kQuantised, nullptr);
    LaunchSkinny(jobs, 1, [&](auto by_warp, unsigned blocks, int most) {
      const auto kernel = SkinnyFreshKernel<F, decltype(by_warp)::value, X, T>;
      const auto shared =
          static_cast<int64_t>(sizeof(SkinnyShared<1>)) + x.rows * FreshStride(w.depth) * 2;
      AllowShared(kernel, shared);
      LaunchOverlapped(kernel, blocks, kSkinnyThreads, shared, stream, 1, w, p, jobs, most, out);
    });
  });
}

// x in the form that the number of rows asks for (IsWide).
template <Format F, class T>
void LaunchFormat(const CudaWeightView& w, const __nv_bfloat16* x, int64_t x_stride, int rows,
                  int groups, const Output<T>& out, cudaStream_t stream, CudaWay way) {
  const int rank = w.out / groups;
  const auto skinny = [&]<int kRowTiles>() {
    const int jobs = GroupTiles(rank) * groups;
    const unsigned row_groups = Blocks(rows, kSkinnyRows * kRowTiles);
    LaunchSkinny(jobs, static_cast<int>(row_groups), [&](auto by_warp, unsigned blocks, int most) {
      const auto kernel = SkinnyKernel<F, kRowTiles, decltype(by_warp)::value, T>;
      constexpr auto kShared = static_cast<int64_t>(sizeof(SkinnyShared<kRowTiles>));
      AllowShared(kernel, kShared);
      LaunchOverlapped(kernel, dim3(blocks, row_groups), kSkinnyThreads, kShared, stream, 1, w, x,
                       x_stride, rows, rank, jobs, most, out);
    });
  };
  if (rows == 0) return;
  if (rows <= kSkinnyRows) return skinny.template operator()<1>();
  if (rows <= 2 * kSkinnyRows) return skinny.template operator()<2>();
  if (Streams(rows, w, groups, way)) return skinny.template operator()<4>();
  const auto launch = [&](auto kernel, int tile_rows, int outputs, int threads, int bytes) {
    AllowShared(kernel, bytes);
    kernel<<<dim3(Blocks(rows, tile_rows), Blocks(rank, outputs), groups), threads, bytes,
             stream>>>(w, x, x_stride, rows, rank, out);
  };
  if constexpr (F == Format::kBF16) {
    if (rows <= 64) {
      launch(TileKernel<64, T>, 64, kTileOutputs, kTileThreads, kTileSharedBytes<64>);
    } else {
      launch(TileKernel<128, T>, 128, kTileOutputs, kTileThreads, kTileSharedBytes<128>);
    }
  } else if (rows <= 64) {
    launch(WideKernel<F, 64, T>, 64, kWideOutputs, kWideThreads, kWideSharedBytes<64>);
  } else {
    launch(WideKernel<F, 128, T>, 128, kWideOutputs, kWideThreads, kWideSharedBytes<128>);
  }
}

// Whether a product may read x in place: bf16, whole units in each group, 16-byte rows.
inline bool ReadableInPlace(const MatrixView& x, int groups) {
  return x.dtype == DType::kBF16 && x.cols / groups % kUnit == 0 && x.stride % 8 == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

}  // namespace fathom::ops::cuda
