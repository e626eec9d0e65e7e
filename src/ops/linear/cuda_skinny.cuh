// A product with few rows: weights stream from memory once, by bulk copies into shared memory, a
// ring of them a warp. A job is a tile of 16 outputs. Where there are fewer jobs than warps, a
// block works on one job after the other, each of its warps on one segment of the sum; else every
// warp has jobs of its own and adds the segments up by itself, in the same order. Either way a warp
// always has its next units of weights on their way, across jobs too.
//
// Jobs come from a cursor, which knows where it is and how to go on: finding a job anew for each
// would take more instructions than its products. A cursor has, of its present job,
//   const uint8_t* data, *scale;  bool wide;  // CudaWeightView's
//   int out0;                                 // the tile's first output, a multiple of 16
//   int out_begin, out_end;                   // those of it that are wanted
//   int rows;  X x[kRowTiles];                // the lane's rows, lane / 4 of each tile of 8
// and Next(); X is const __nv_bfloat16* or FreshRow. Rows that do not exist are any that
// do: their columns are computed in vain.
#pragma once

#include "ops/linear/cuda_stream_runs.cuh"
#include "ops/linear/cuda_units.cuh"

namespace fathom::ops::cuda {

inline constexpr int kSkinnyRows = 8;                  // of one tensor core tile
inline constexpr int kSkinnyThreads = 32 * kSegments;  // a warp per segment
inline constexpr int kSkinnyBlocks = 264;              // two on every multiprocessor of an H200

template <int kRowTiles>
struct SkinnyShared {
  SkinnyRing ring[kSegments];
  // Of jobs by block. Two jobs in turn: one barrier a job.
  float part[2][kSegments][kSkinnyRows * kRowTiles][kTile];
};

// Element i of a lane's share of a tile of 8 rows: its row, and its output among 16.
__device__ inline int MmaRow(int i) {
  return 2 * (static_cast<int>(threadIdx.x) & 3) + (i & 1);
}
__device__ inline int MmaOutput(int i) {
  return static_cast<int>(threadIdx.x) % 32 / 4 + 8 * (i >> 1);
}

// `jobs` jobs from the cursor on, the same ones in every warp of the block: a warp per segment.
// store(cursor, row, output, value) is called once for every element. depth: of every weight.
// ready(begin, count): waits for the activations of units [begin, begin + count).
template <Format F, int kRowTiles, class Cursor, class Ready, class Store>
__device__ void SkinnyByBlock(int jobs, int depth, SkinnyShared<kRowTiles>& shared,
                              const Cursor& first, Ready&& ready, Store&& store) {
  const int warp = threadIdx.x / 32;
  const int units = depth / kUnit;
  const int begin = SegmentBegin(warp, units);
  const int count = SegmentBegin(warp + 1, units) - begin;
  int index = 0;
  const auto finish = [&](const Cursor& cursor, float(&sum)[kRowTiles][4]) {
    auto& part = shared.part[index++ % 2];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        part[warp][8 * r + MmaRow(i)][MmaOutput(i)] = sum[r][i];
        sum[r][i] = 0;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kTile * cursor.rows; i += kSkinnyThreads) {
      const int t = i / kTile;
      const int o = i % kTile;
      float total = 0;
#pragma unroll
      for (int s = 0; s < kSegments; ++s) total += part[s][t][o];
      const int output = cursor.out0 + o;
      if (output >= cursor.out_begin && output < cursor.out_end) store(cursor, t, output, total);
    }
  };
  if (count > 0) {
    StreamRuns<F, kRowTiles, 1>(
        shared.ring[warp], jobs, units, warp, first, [&] { ready(begin, count); },
        [&](const Cursor& cursor, float(&sum)[kRowTiles][4], bool) { finish(cursor, sum); });
    return;
  }
  ready(begin, 0);
  Cursor cursor = first;
  float none[kRowTiles][4] = {};
  for (int i = 0; i < jobs; ++i) {
    if (i > 0) cursor.Next();
    finish(cursor, none);
  }
}

// The same with jobs of the warp's own. ready(): waits for all activations.
template <Format F, int kRowTiles, class Cursor, class Ready, class Store>
__device__ void SkinnyByWarp(int jobs, int depth, SkinnyShared<kRowTiles>& shared,
                             const Cursor& first, Ready&& ready, Store&& store) {
  const int units = depth / kUnit;
  float total[kRowTiles][4] = {};
  // Takes a segment's sum.
  const auto add = [&](float(&sum)[kRowTiles][4]) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[r][i] += sum[r][i];
        sum[r][i] = 0;
      }
    }
  };
  // Gives the job's.
  const auto finish = [&](const Cursor& cursor) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = 8 * r + MmaRow(i), output = cursor.out0 + MmaOutput(i);
        if (row < cursor.rows && output >= cursor.out_begin && output < cursor.out_end) {
          store(cursor, row, output, total[r][i]);
        }
        total[r][i] = 0;
      }
    }
  };
  StreamRuns<F, kRowTiles, kSegments>(
      shared.ring[threadIdx.x / 32], jobs, units, 0, first, ready,
      [&](const Cursor& cursor, float(&sum)[kRowTiles][4], bool last) {
        add(sum);
        if (last) finish(cursor);
      });
}

}  // namespace fathom::ops::cuda
