// A product with few rows: weights stream from memory once, straight into registers. A job is 16
// outputs. Where there are fewer jobs than warps, a block works on one job after the other, each of
// its warps on one segment of the sum; else every warp has jobs of its own and adds the segments up
// by itself, in the same order. Either way a warp always has its next units of weights on their
// way, across jobs too.
//
// Jobs come from a cursor, which knows where it is and how to go on: finding a job anew for each
// would take more instructions than its products. A cursor has, of its present job,
//   const uint8_t* data, *scale;  bool wide;  // CudaWeightView's
//   int out0, out_end;                        // outputs [out0, out0 + 16), those below out_end
//   int rows;  const __nv_bfloat16* x[kRowTiles];  // the lane's rows, lane / 4 of each tile of 8
// and Next(). Rows that do not exist are any that do: their columns are computed in vain.
#pragma once

#include "ops/cuda/hopper.cuh"
#include "ops/linear/cuda_expand.cuh"

namespace fathom::ops::cuda {

inline constexpr int kSkinnyRows = 8;  // of one tensor core tile
inline constexpr int kSkinnyOutputs = 16;
inline constexpr int kSkinnyThreads = 32 * kSegments;  // a warp per segment

// One lane's 32 weights of a unit, as stored.
template <Format F>
struct RawUnit {
  uint4 load[32 / kLoadInputs<F>];
  uint32_t scale;

  // at: the lane's first byte of the unit.
  __device__ void Load(const uint8_t* at, const uint8_t* scale_at) {
#pragma unroll
    for (int i = 0; i < 32 / kLoadInputs<F>; ++i) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(load[i].x), "=r"(load[i].y), "=r"(load[i].z), "=r"(load[i].w)
                   : "l"(at + 64 * i));
    }
    scale = F == Format::kBF16 ? 0 : __ldg(scale_at);
  }

  template <bool kInterleaved>
  __device__ void Expand(int e, const ChunkScale& s, bool wide, uint32_t word[4]) const {
    if constexpr (F == Format::kBF16) {
      word[0] = load[e].x, word[1] = load[e].y, word[2] = load[e].z, word[3] = load[e].w;
    } else if constexpr (F == Format::kFp8Block128) {
      const uint4& v = load[e / 2];
      if (e % 2 == 0) {
        ExpandFp8<kInterleaved>(v.x, v.y, s, wide, word);
      } else {
        ExpandFp8<kInterleaved>(v.z, v.w, s, wide, word);
      }
    } else {
      const uint4& v = load[0];
      ExpandFp4(e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w, s, wide, word);
    }
  }
};

template <int kRowTiles>
struct SkinnyShared {
  // Two jobs in turn: one barrier a job.
  float part[2][kSegments][kSkinnyRows * kRowTiles][kSkinnyOutputs];
};

// Units of weights that a lane has on their way.
template <Format F>
inline constexpr int kSkinnyAhead = F == Format::kBF16 ? 2 : 3;

// Units [begin, begin + count) of `jobs` jobs, of rows of `units`. after(cursor, unit, sum) is
// called after each unit, counted within the job; it zeroes `sum` when it has taken it. ready(), in
// which the warp waits for its activations, is called once, when the first weights have been asked
// for.
template <Format F, bool kInterleaved, int kRowTiles, class Cursor, class Ready, class After>
__device__ void StreamUnits(int jobs, int units, int begin, int count, Cursor cursor, Ready&& ready,
                            After&& after) {
  constexpr int kAhead = kSkinnyAhead<F>;
  // From a unit to the next.
  constexpr int kBytes = kTile * kUnitBytes<F>;
  constexpr int kScales = F == Format::kFp4Block32 ? 4 * kTile : 1;
  const int lane = threadIdx.x % 32;
  const int q = lane & 3;
  const int steps = jobs * count;

  // Slot a of `raw` takes every kAhead-th unit from the a-th on. Addresses are those of slot 0 and
  // move once for all slots; at a job's first unit, in slot a, they are set a units back.
  RawUnit<F> raw[kAhead][2];
  const uint8_t* data[2] = {};
  const uint8_t* scale[2] = {};
  Cursor asking = cursor;
  int asked = 0, asked_unit = 0;
  const auto ask = [&](int a) {
    if (asked >= steps) return;
    if (asked_unit == 0) {
      if (asked > 0) asking.Next();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Rows beyond the end are the last one, computed in vain.
        const int64_t row = min(asking.out0 + lane / 4 + 8 * i, asking.out_end - 1);
        const int64_t at = FirstUnit(row, units) + (begin - a) * kTile;
        data[i] = asking.data + at * kUnitBytes<F> + 16 * q;
        if constexpr (F == Format::kFp8Block128) {
          scale[i] = asking.scale + (row >> 7) * units + begin - a;
        } else if constexpr (F == Format::kFp4Block32) {
          scale[i] = asking.scale + at * 4 + q;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      raw[a][i].Load(data[i] + a * kBytes, scale[i] + a * kScales);
    }
    ++asked;
    if (++asked_unit == count) asked_unit = 0;
  };
  const auto move = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      data[i] += kAhead * kBytes;
      if constexpr (F != Format::kBF16) scale[i] += kAhead * kScales;
    }
  };
#pragma unroll
  for (int a = 0; a < kAhead; ++a) ask(a);
  move();
  ready();

  if (steps == 0) return;

  // Activations of the next unit are asked for as those of the present one have been used.
  uint4 v[kRowTiles][4];
  const __nv_bfloat16* x[kRowTiles];
  Cursor fetching = cursor;
  int fetched = 0, fetched_unit = 0;
  const auto turn = [&] {
    if (fetched_unit == 0) {
      if (fetched > 0) fetching.Next();
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        x[r] = fetching.x[r] + begin * kUnit + UnitChunk<F>(q, 0);
      }
    } else {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) x[r] += kUnit;
    }
    ++fetched;
    if (++fetched_unit == count) fetched_unit = 0;
  };
  const auto fetch = [&](int e) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      v[r][e] = *reinterpret_cast<const uint4*>(x[r] + UnitChunk<F>(0, e));
    }
  };
  turn();
#pragma unroll
  for (int e = 0; e < 4; ++e) fetch(e);

  float sum[kRowTiles][4] = {};
  int unit = 0;
  for (int base = 0; base < steps; base += kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (base + a >= steps) break;
      if (unit == 0 && base + a > 0) cursor.Next();
      const bool more = fetched < steps;
      if (more) turn();
      const ChunkScale s0 = MakeScale<F>(raw[a][0].scale);
      const ChunkScale s1 = MakeScale<F>(raw[a][1].scale);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        uint32_t a0[4], a1[4];
        raw[a][0].template Expand<kInterleaved>(e, s0, cursor.wide, a0);
        raw[a][1].template Expand<kInterleaved>(e, s1, cursor.wide, a1);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          Mma(sum[r], a0[0], a1[0], a0[1], a1[1], v[r][e].x, v[r][e].y);
          Mma(sum[r], a0[2], a1[2], a0[3], a1[3], v[r][e].z, v[r][e].w);
        }
        if (more) fetch(e);
      }
      ask(a);
      after(cursor, unit, sum);
      if (++unit == count) unit = 0;
    }
    move();
  }
}

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
template <Format F, bool kInterleaved, int kRowTiles, class Cursor, class Ready, class Store>
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
    for (int i = threadIdx.x; i < kSkinnyOutputs * cursor.rows; i += kSkinnyThreads) {
      const int t = i / kSkinnyOutputs;
      const int o = i % kSkinnyOutputs;
      float total = 0;
#pragma unroll
      for (int s = 0; s < kSegments; ++s) total += part[s][t][o];
      if (cursor.out0 + o < cursor.out_end) store(cursor, t, cursor.out0 + o, total);
    }
  };
  if (count > 0) {
    StreamUnits<F, kInterleaved, kRowTiles>(
        jobs, units, begin, count, first, [&] { ready(begin, count); },
        [&](const Cursor& cursor, int unit, float(&sum)[kRowTiles][4]) {
          if (unit + 1 == count) finish(cursor, sum);
        });
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
template <Format F, bool kInterleaved, int kRowTiles, class Cursor, class Ready, class Store>
__device__ void SkinnyByWarp(int jobs, int depth, const Cursor& first, Ready&& ready,
                             Store&& store) {
  const int units = depth / kUnit;
  int segment = 0;
  int segment_end = SegmentBegin(1, units);
  float total[kRowTiles][4] = {};
  StreamUnits<F, kInterleaved, kRowTiles>(
      jobs, units, 0, units, first, ready,
      [&](const Cursor& cursor, int unit, float(&sum)[kRowTiles][4]) {
        if (unit + 1 < segment_end) return;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            total[r][i] += sum[r][i];
            sum[r][i] = 0;
          }
        }
        // Of fewer units than segments some segments are empty: they begin where the next one does.
        while (segment + 1 < kSegments && segment_end <= unit + 1) {
          segment_end = SegmentBegin(++segment + 1, units);
        }
        if (unit + 1 < units) return;
        segment = 0;
        segment_end = SegmentBegin(1, units);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = 8 * r + MmaRow(i), output = cursor.out0 + MmaOutput(i);
            if (row < cursor.rows && output < cursor.out_end)
              store(cursor, row, output, total[r][i]);
            total[r][i] = 0;
          }
        }
      });
}

}  // namespace fathom::ops::cuda
