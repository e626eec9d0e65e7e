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

#include <type_traits>

#include "ops/linear/cuda_stream_runs.cuh"
#include "ops/linear/cuda_units.cuh"

namespace fathom::ops::cuda {

inline constexpr int kSkinnyRows = 8;                  // of one tensor core tile
inline constexpr int kSkinnyThreads = 32 * kSegments;  // a warp per segment
inline constexpr int kSkinnyBlocks = 264;              // two on every multiprocessor of an H200

// Blocks that a multiprocessor has room for, where shared memory permits. The grids are made for
// two; the third place is for the first blocks of the next kernel, which ask for their first
// weights while the last ones of this kernel end.
inline constexpr int kSkinnyResident = kCudaCandidates ? 3 : 2;
// Shared memory of a third of a multiprocessor, less what a block takes for itself.
inline constexpr size_t kThirdBytes = (228 << 10) / 3 - (1 << 10);

// kParts: for SkinnyByBlock too.
template <int kRowTiles, class Ring = AnyRing, bool kParts = true>
struct SkinnyShared {
  Ring ring[kSegments];
  // Of jobs by block. Two jobs in turn: one barrier a job.
  float part[2][kSegments][kSkinnyRows * kRowTiles][kTile];
};
template <int kRowTiles, class Ring>
struct SkinnyShared<kRowTiles, Ring, false> {
  Ring ring[kSegments];
};

// Units [begin, begin + count) of `jobs` jobs, of rows of `units`. after(cursor, unit, sum) is
// called after each unit, counted within the job; it zeroes `sum` when it has taken it. ready(), in
// which the warp waits for its activations, is called once, when the first weights have been asked
// for. ring: the warp's, used by no earlier call.
template <Format F, int kRowTiles, class Ring, class Cursor, class Ready, class After>
__device__ void StreamUnits(Ring& ring, int jobs, int units, int begin, int count, Cursor cursor,
                            Ready&& ready, After&& after) {
  using Stage = typename Ring::template Stage<F>;
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
    CopyBulkOnce(to, asking.data + at * kUnitBytes<F>, codes, &ring.here[slot]);
    if constexpr (F == Format::kFp4Block32) {
      CopyBulkOnce(to + Stage::kCodes, asking.scale + at * 4, scales, &ring.here[slot]);
    }
    asked += n;
    asked_unit += n;
    if (asked_unit == count) asked_unit = 0;
  };
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < Stage::kStages; ++i) BarrierInit(&ring.here[i], 1);
    FenceBarrierInit();
    for (slot = 0; slot < Stage::kStages; ++slot) ask();
  }
  slot = 0;
  __syncwarp();
  uint32_t next_scale = 0;  // of FP8, on its way too
  if (F == Format::kFp8Block128 && steps > 0) {
    next_scale = __ldg(cursor.scale + (cursor.out0 >> 7) * units + begin);
  }
  ready();
  if (steps == 0) return;

  // Activations of the next unit are asked for as those of the present one have been used; so are
  // scales of FP8. After the last one they are asked for once more.
  using X = std::remove_cvref_t<decltype(cursor.x[0])>;
  uint4 v[kRowTiles][4];
  X x[kRowTiles], next_x[kRowTiles];  // of the stage at hand, and of what follows it
  const uint8_t *scale = nullptr, *next_stage_scale = nullptr;
  const auto turn_to = [&](const Cursor& job) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
      next_x[r] = job.x[r] + (begin * kUnit + ChunkOf<F>(job.x[r], q, 0));
    if constexpr (F == Format::kFp8Block128) {
      next_stage_scale = job.scale + (job.out0 >> 7) * units + begin;
    }
  };
  turn_to(cursor);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
      v[r][e] = LoadChunk(next_x[r] + ChunkOf<F>(next_x[r], 0, e));
  }

  float sum[kRowTiles][4] = {};
  int unit = 0;        // of the job
  uint32_t phase = 0;  // of the ring
  // The lane's place in a stage: 16 bytes of the first of its two rows.
  const uint32_t ring_at = SharedAddress(ring.bytes);
  Cursor following = cursor;  // of the next job
  for (int left = steps; left > 0;) {
    const int filled = min(Stage::kUnits, count - unit);
    left -= filled;
    const bool last = unit + filled == count;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) x[r] = next_x[r];
    scale = next_stage_scale;
    if (!last) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) next_x[r] = x[r] + Stage::kUnits * kUnit;
      next_stage_scale = scale + Stage::kUnits;
    } else if (left > 0) {
      following = cursor;
      following.Next();
      turn_to(following);
    }
    BarrierWait(&ring.here[slot], phase);
    const uint32_t stage_at = ring_at + static_cast<uint32_t>(slot * Stage::kBytes);
    const auto multiply = [&](int place, bool last_unit, auto wide) {
      constexpr bool kWide = decltype(wide)::value;
      RawUnit<F> raw[2];
      const uint32_t codes_at =
          stage_at + lane / 4 * 64 + 16 * q + static_cast<uint32_t>(place * kTile * kUnitBytes<F>);
      raw[0].LoadShared(codes_at);
      raw[1].LoadShared(codes_at + kTilePieceBytes / 2);
      if constexpr (F == Format::kFp4Block32) {
        const uint32_t scales_at =
            stage_at + Stage::kCodes + lane + static_cast<uint32_t>(place * kTile * 4);
        raw[0].scale = SharedAt<uint8_t>(scales_at);
        raw[1].scale = SharedAt<uint8_t>(scales_at + kTile * 4 / 2);
      } else if constexpr (F == Format::kFp8Block128) {
        raw[0].scale = raw[1].scale = next_scale;
        next_scale = __ldg(last_unit ? next_stage_scale : scale + place + 1);
      }
      X after_x[kRowTiles];
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        after_x[r] = last_unit ? next_x[r] : x[r] + (place + 1) * kUnit;
      }
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
          v[r][e] = LoadChunk(after_x[r] + ChunkOf<F>(after_x[r], 0, e));
        }
      }
      after(cursor, unit + place, sum);
    };
    if (F != Format::kBF16 && cursor.wide) {
#pragma unroll 1
      for (int place = 0; place < filled; ++place) {
        multiply(place, place + 1 == filled, std::true_type());
      }
    } else {
#pragma unroll 1
      for (int place = 0; place < filled; ++place) {
        multiply(place, place + 1 == filled, std::false_type());
      }
    }
    unit += filled;
    if (last) unit = 0, cursor = following;
    __syncwarp();  // all lanes have read the stage
    if (lane == 0) ask();
    if (++slot == Stage::kStages) slot = 0, phase ^= 1;
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
template <Format F, int kRowTiles, class Shared, class Cursor, class Ready, class Store>
__device__ void SkinnyByBlock(int jobs, int depth, Shared& shared, const Cursor& first,
                              Ready&& ready, Store&& store) {
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
  if constexpr (kCudaCandidates) {
    if (count > 0) {
      StreamRuns<F, kRowTiles, 1>(
          shared.ring[warp], jobs, units, warp, first, [&] { ready(begin, count); },
          [&](const Cursor& cursor, float(&sum)[kRowTiles][4], bool) { finish(cursor, sum); });
      return;
    }
  } else if (count > 0) {
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
template <Format F, int kRowTiles, class Shared, class Cursor, class Ready, class Store>
__device__ void SkinnyByWarp(int jobs, int depth, Shared& shared, const Cursor& first,
                             Ready&& ready, Store&& store) {
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
  if constexpr (kCudaCandidates) {
    StreamRuns<F, kRowTiles, kSegments>(
        shared.ring[threadIdx.x / 32], jobs, units, 0, first, ready,
        [&](const Cursor& cursor, float(&sum)[kRowTiles][4], bool last) {
          add(sum);
          if (last) finish(cursor);
        });
  } else {
    int segment = 0;
    int segment_end = SegmentBegin(1, units);
    StreamUnits<F, kRowTiles>(shared.ring[threadIdx.x / 32], jobs, units, 0, units, first, ready,
                              [&](const Cursor& cursor, int unit, float(&sum)[kRowTiles][4]) {
                                if (unit + 1 < segment_end) return;
                                add(sum);
                                if (units % kSegments == 0) {
                                  segment_end += units / kSegments;
                                }
                                // Of fewer units than segments some segments are empty: they begin
                                // where the next one does.
                                while (segment + 1 < kSegments && segment_end <= unit + 1) {
                                  segment_end = SegmentBegin(++segment + 1, units);
                                }
                                if (unit + 1 < units) return;
                                segment = 0;
                                segment_end = SegmentBegin(1, units);
                                finish(cursor);
                              });
  }
}

}  // namespace fathom::ops::cuda
