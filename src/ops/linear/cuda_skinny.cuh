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
//   int rows;  const __nv_bfloat16* x[kRowTiles];  // the lane's rows, lane / 4 of each tile of 8
// and Next(). Rows that do not exist are any that do: their columns are computed in vain.
#pragma once

#include <type_traits>

#include "ops/cuda/hopper.cuh"
#include "ops/linear/cuda_expand.cuh"

namespace fathom::ops::cuda {

inline constexpr int kSkinnyRows = 8;                  // of one tensor core tile
inline constexpr int kSkinnyThreads = 32 * kSegments;  // a warp per segment
inline constexpr int kSkinnyBlocks = 264;              // two on every multiprocessor of an H200

// One lane's 32 weights of a unit, as stored.
template <Format F>
struct RawUnit {
  uint4 load[kUnitPieces<F>];
  uint32_t scale;

  // at: the lane's 16 bytes of the unit's first piece.
  __device__ void Load(const uint8_t* at, const uint8_t* scale_at) {
#pragma unroll
    for (int i = 0; i < kUnitPieces<F>; ++i) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(load[i].x), "=r"(load[i].y), "=r"(load[i].z), "=r"(load[i].w)
                   : "l"(at + kTilePieceBytes * i));
    }
    scale = F == Format::kBF16 ? 0 : __ldg(scale_at);
  }
  // From shared memory.
  __device__ void LoadShared(uint32_t at) {
#pragma unroll
    for (int i = 0; i < kUnitPieces<F>; ++i) {
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(load[i].x), "=r"(load[i].y), "=r"(load[i].z), "=r"(load[i].w)
                   : "r"(at + kTilePieceBytes * i)
                   : "memory");
    }
  }

  __device__ void Expand(int e, const ChunkScale& s, bool wide, uint32_t word[4]) const {
    if constexpr (F == Format::kBF16) {
      word[0] = load[e].x, word[1] = load[e].y, word[2] = load[e].z, word[3] = load[e].w;
    } else if constexpr (F == Format::kFp8Block128) {
      const uint4& v = load[e / 2];
      if (e % 2 == 0) {
        ExpandFp8(v.x, v.y, s, wide, word);
      } else {
        ExpandFp8(v.z, v.w, s, wide, word);
      }
    } else {
      const uint4& v = load[0];
      ExpandFp4(e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w, s, wide, word);
    }
  }
};

// A warp's weights on their way: stages of whole units of one job, about 4 KiB each.
template <Format F>
struct SkinnyStage {
  static constexpr int kUnits = 4096 / (kTile * kUnitBytes<F>);
  static constexpr int kCodes = kUnits * kTile * kUnitBytes<F>;
  static constexpr int kScales = F == Format::kFp4Block32 ? kUnits * kTile * 4 : 0;
  static constexpr int kBytes = kCodes + kScales;
};
inline constexpr int kSkinnyStages = 2;
struct SkinnyRing {
  alignas(128) uint8_t bytes[kSkinnyStages * SkinnyStage<Format::kFp4Block32>::kBytes];
  uint64_t here[kSkinnyStages];  // barriers of the stages
};

template <int kRowTiles>
struct SkinnyShared {
  SkinnyRing ring[kSegments];
  // Of jobs by block. Two jobs in turn: one barrier a job.
  float part[2][kSegments][kSkinnyRows * kRowTiles][kTile];
};

// Units [begin, begin + count) of `jobs` jobs, of rows of `units`. after(cursor, unit, sum) is
// called after each unit, counted within the job; it zeroes `sum` when it has taken it. ready(), in
// which the warp waits for its activations, is called once, when the first weights have been asked
// for. ring: the warp's, used by no earlier call.
template <Format F, int kRowTiles, class Cursor, class Ready, class After>
__device__ void StreamUnits(SkinnyRing& ring, int jobs, int units, int begin, int count,
                            Cursor cursor, Ready&& ready, After&& after) {
  using Stage = SkinnyStage<F>;
  const int lane = threadIdx.x % 32;
  const int q = lane & 3;
  const int steps = jobs * count;

  // The first lane asks, a stage at a time.
  Cursor asking = cursor;
  int asked = 0, asked_unit = 0, slot = 0;
  const auto ask = [&] {
    if (asked >= steps) return;
    if (asked_unit == 0 && asked > 0) asking.Next();
    const int n = min(Stage::kUnits, count - asked_unit);
    const int64_t at = int64_t{asking.out0} * units + int64_t{begin + asked_unit} * kTile;
    uint8_t* const to = ring.bytes + slot * Stage::kBytes;
    const auto codes = static_cast<uint32_t>(n * kTile * kUnitBytes<F>);
    const auto scales = static_cast<uint32_t>(F == Format::kFp4Block32 ? n * kTile * 4 : 0);
    BarrierArriveExpecting(&ring.here[slot], codes + scales);
    CopyBulk(to, asking.data + at * kUnitBytes<F>, codes, &ring.here[slot]);
    if constexpr (F == Format::kFp4Block32) {
      CopyBulk(to + Stage::kCodes, asking.scale + at * 4, scales, &ring.here[slot]);
    }
    asked += n;
    asked_unit += n;
    if (asked_unit == count) asked_unit = 0;
  };
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kSkinnyStages; ++i) BarrierInit(&ring.here[i], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (slot = 0; slot < kSkinnyStages; ++slot) ask();
  }
  slot = 0;
  __syncwarp();
  ready();
  if (steps == 0) return;

  // Activations of the next unit are asked for as those of the present one have been used; so are
  // scales of FP8.
  uint4 v[kRowTiles][4];
  const __nv_bfloat16* x[kRowTiles];
  const uint8_t* scale = nullptr;
  uint32_t next_scale = 0;
  const auto turn_to = [&](const Cursor& job) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) x[r] = job.x[r] + begin * kUnit + UnitChunk<F>(q, 0);
    if constexpr (F == Format::kFp8Block128) scale = job.scale + (job.out0 >> 7) * units + begin;
  };
  const auto fetch = [&](int e) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      v[r][e] = *reinterpret_cast<const uint4*>(x[r] + UnitChunk<F>(0, e));
    }
  };
  const auto fetch_scale = [&] {
    if constexpr (F == Format::kFp8Block128) next_scale = __ldg(scale);
  };
  turn_to(cursor);
  fetch_scale();
#pragma unroll
  for (int e = 0; e < 4; ++e) fetch(e);

  float sum[kRowTiles][4] = {};
  int unit = 0;               // of the job
  int place = 0, filled = 0;  // of the unit in the stage; units of the stage
  uint32_t round = 0;         // of the ring
  // The lane's place in a unit: 16 bytes of the first of its two rows.
  const uint32_t ring_at = SharedAddress(ring.bytes);
  uint32_t codes_at = 0, scales_at = 0;
  Cursor following = cursor;  // of the next job
  for (int step = 0; step < steps; ++step) {
    if (place == filled) {
      BarrierWait(&ring.here[slot], round & 1);
      place = 0;
      filled = min(Stage::kUnits, count - unit);
      codes_at = ring_at + static_cast<uint32_t>(slot * Stage::kBytes) + lane / 4 * 64 + 16 * q;
      scales_at = ring_at + static_cast<uint32_t>(slot * Stage::kBytes) + Stage::kCodes + lane;
    }
    RawUnit<F> raw[2];
    raw[0].LoadShared(codes_at);
    raw[1].LoadShared(codes_at + kTilePieceBytes / 2);
    codes_at += kTile * kUnitBytes<F>;
    if constexpr (F == Format::kFp4Block32) {
      const auto scale_of = [](uint32_t at) {
        uint32_t scale;
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(scale) : "r"(at) : "memory");
        return scale;
      };
      raw[0].scale = scale_of(scales_at);
      raw[1].scale = scale_of(scales_at + kTile * 4 / 2);
      scales_at += kTile * 4;
    } else {
      raw[0].scale = raw[1].scale = next_scale;
    }
    const bool last = unit + 1 == count, more = step + 1 < steps;
    if (!last) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) x[r] += kUnit;
      if constexpr (F == Format::kFp8Block128) ++scale;
    } else if (more) {
      following = cursor;
      following.Next();
      turn_to(following);
    }
    if (more) fetch_scale();
    const auto multiply = [&](auto wide) {
      constexpr bool kWide = decltype(wide)::value;
      const ChunkScale s0 = MakeScale<F>(raw[0].scale, kWide);
      const ChunkScale s1 = MakeScale<F>(raw[1].scale, kWide);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        uint32_t a0[4], a1[4];
        raw[0].Expand(e, s0, kWide, a0);
        raw[1].Expand(e, s1, kWide, a1);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          Mma(sum[r], a0[0], a1[0], a0[1], a1[1], v[r][e].x, v[r][e].y);
          Mma(sum[r], a0[2], a1[2], a0[3], a1[3], v[r][e].z, v[r][e].w);
        }
        if (more) fetch(e);
      }
    };
    // One branch a unit, not one a chunk.
    if (F != Format::kBF16 && cursor.wide) {
      multiply(std::true_type());
    } else {
      multiply(std::false_type());
    }
    after(cursor, unit, sum);
    ++unit;
    if (last) unit = 0, cursor = following;
    if (++place == filled) {
      __syncwarp();  // all lanes have read the stage
      if (lane == 0) ask();
      if (++slot == kSkinnyStages) slot = 0, ++round;
    }
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
    StreamUnits<F, kRowTiles>(
        shared.ring[warp], jobs, units, begin, count, first, [&] { ready(begin, count); },
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
template <Format F, int kRowTiles, class Cursor, class Ready, class Store>
__device__ void SkinnyByWarp(int jobs, int depth, SkinnyShared<kRowTiles>& shared,
                             const Cursor& first, Ready&& ready, Store&& store) {
  const int units = depth / kUnit;
  int segment = 0;
  int segment_end = SegmentBegin(1, units);
  float total[kRowTiles][4] = {};
  StreamUnits<F, kRowTiles>(
      shared.ring[threadIdx.x / 32], jobs, units, 0, units, first, ready,
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
            if (row < cursor.rows && output >= cursor.out_begin && output < cursor.out_end) {
              store(cursor, row, output, total[r][i]);
            }
            total[r][i] = 0;
          }
        }
      });
}

}  // namespace fathom::ops::cuda
