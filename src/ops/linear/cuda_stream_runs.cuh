// A warp's units of weights through its ring, and their products. The units are cut into runs that
// end where a stage or a segment ends, or with the unit before a job's last: within a run nothing
// is decided, and every address moves on by a constant.
#pragma once

#include <type_traits>

#include "ops/linear/cuda_units.cuh"

namespace fathom::ops::cuda {

// Segments [first, first + kCount) of the sums of `jobs` jobs, of rows of `units`: no units at all,
// or at least one. after(cursor, sum, last) is called at the end of each segment that has units, in
// ascending order, and zeroes `sum`: a segment is one chain of products from zero. last: of its
// job. ready(), in which the warp waits for its activations, is called once, when the first weights
// have been asked for. ring: the warp's, used by no earlier call.
//
// A stage of the ring is filled again when all lanes have read it, before what follows the end of a
// segment. Its barrier completes one phase for each filling, and the first lane asks for a filling
// only after the warp has waited for the one before: no wait can be passed by an older phase.
template <Format F, int kRowTiles, int kCount, class Cursor, class Ready, class After>
__device__ void StreamRuns(SkinnyRing& ring, int jobs, int units, int first, Cursor cursor,
                           Ready&& ready, After&& after) {
  using Stage = SkinnyStage<F>;
  static_assert(SkinnyRing::kStages * Stage::kBytes <= sizeof(SkinnyRing::bytes));
  using X = std::remove_cvref_t<decltype(cursor.x[0])>;
  constexpr int kRowBytes = kTile * kUnitBytes<F>;  // of a unit's codes
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int q = lane & 3;
  const int begin = SegmentBegin(first, units);
  const int count = SegmentBegin(first + kCount, units) - begin;
  int jobs_left = count > 0 ? jobs : 0;

  // The first lane asks, a stage at a time: for `ask_left` more units of this job from ask_at on,
  // in rows of units, then for those of the next one.
  Cursor asking = cursor;
  int ask_jobs = jobs_left, ask_left = 0;
  uint32_t ask_at = 0;
  const auto enter = [&] {
    ask_at = static_cast<uint32_t>(asking.out0 * units + begin * kTile);
    ask_left = count;
  };
  const auto ask = [&](int slot) {
    if (ask_left == 0) return;
    const int n = min(Stage::kUnits, ask_left);
    uint8_t* const to = ring.bytes + slot * Stage::kBytes;
    const auto codes = static_cast<uint32_t>(n * kRowBytes);
    const auto scales = static_cast<uint32_t>(F == Format::kFp4Block32 ? n * kTile * 4 : 0);
    BarrierArriveExpecting(&ring.here[slot], codes + scales);
    CopyBulkOnce(to, asking.data + uint64_t{ask_at} * kUnitBytes<F>, codes, &ring.here[slot]);
    if constexpr (F == Format::kFp4Block32) {
      CopyBulkOnce(to + Stage::kCodes, asking.scale + uint64_t{ask_at} * 4, scales,
                   &ring.here[slot]);
    }
    ask_at += static_cast<uint32_t>(n * kTile);
    ask_left -= n;
    if (ask_left > 0) return;
    if (--ask_jobs > 0) asking.Next(), enter();
  };
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < SkinnyRing::kStages; ++i) BarrierInit(&ring.here[i], 1);
    FenceBarrierInit();
    if (jobs_left > 0) enter();
    for (int i = 0; i < SkinnyRing::kStages; ++i) ask(i);
  }
  __syncwarp();
  // Of FP8: the next unit's scale, on its way too, and where that of the one after it lies.
  uint32_t next_scale = 0;
  const uint8_t* scale_at = nullptr;
  const auto scale_of = [&](const Cursor& job) {
    return job.scale + (job.out0 >> 7) * units + begin;
  };
  if (F == Format::kFp8Block128 && jobs_left > 0) {
    scale_at = scale_of(cursor);
    PrefetchToL2(scale_at);  // before the wait, behind which the load may be
    next_scale = __ldg(scale_at++);
  }
  ready();
  if (jobs_left == 0) return;

  // Activations of the next unit are asked for as those of the present one have been used, so are
  // scales of FP8: of the next job's first unit in a job's last one, of this job's in the very
  // last.
  uint4 v[kRowTiles][4];
  X next_x[kRowTiles];
  const int first_x = begin * kUnit + ChunkOf<F>(cursor.x[0], q, 0);
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) next_x[r] = cursor.x[r] + first_x;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      v[r][e] = LoadChunk(next_x[r] + ChunkOf<F>(next_x[r], 0, e));
    }
  }
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) next_x[r] = next_x[r] + kUnit;

  float sum[kRowTiles][4] = {};
  // Where the present segment's last unit ends, and eight times that, counted from the row's begin.
  int segment_end = count, eighths = first * units;
  const auto enter_segment = [&](int unit) {
    if constexpr (kCount > 1) {
      do {
        eighths += units;
        segment_end = static_cast<int>(static_cast<unsigned>(eighths) / kSegments) - begin;
      } while (segment_end <= unit);  // an empty one
    }
  };
  enter_segment(0);

  // The lane's place in the ring: 16 bytes of the first of its two rows; its scales'.
  const uint32_t ring_at = SharedAddress(ring.bytes);
  const uint32_t ring_codes = ring_at + static_cast<uint32_t>(lane / 4 * kPieceBytes + 16 * q);
  const uint32_t ring_scales = ring_at + static_cast<uint32_t>(Stage::kCodes + lane);
  uint32_t codes_at = 0, scales_at = 0, phase = 0;
  int slot = 0, unit = 0, filled = 0;  // unit: of the job; filled: left in the stage
  Cursor following = cursor;           // of the next job; while a job's last stage is at hand
  for (;;) {
    if (filled == 0) {
      filled = min(Stage::kUnits, count - unit);
      if (unit + filled == count) {
        following = cursor;
        if (jobs_left > 1) following.Next();
      }
      codes_at = ring_codes + static_cast<uint32_t>(slot * Stage::kBytes);
      scales_at = ring_scales + static_cast<uint32_t>(slot * Stage::kBytes);
      BarrierWait(&ring.here[slot], phase);
    }
    int n = 1;
    if (unit + 1 == count) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) next_x[r] = following.x[r] + first_x;
      if constexpr (F == Format::kFp8Block128) scale_at = scale_of(following);
    } else if (Stage::kUnits > 1) {
      n = min(min(segment_end, count - 1) - unit, filled);
    }
    unit += n;
    filled -= n;

    const auto multiply = [&](auto wide) {
      constexpr bool kWide = decltype(wide)::value;
      RawUnit<F> raw[2];
      raw[0].LoadShared(codes_at);
      raw[1].LoadShared(codes_at + kTilePieceBytes / 2);
      if constexpr (F == Format::kFp4Block32) {
        raw[0].scale = SharedAt<uint8_t>(scales_at);
        raw[1].scale = SharedAt<uint8_t>(scales_at + kTile * 4 / 2);
        scales_at += kTile * 4;
      } else if constexpr (F == Format::kFp8Block128) {
        raw[0].scale = raw[1].scale = next_scale;
        next_scale = __ldg(scale_at++);
      }
      codes_at += kRowBytes;
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
          v[r][e] = LoadChunk(next_x[r] + ChunkOf<F>(next_x[r], 0, e));
        }
      }
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) next_x[r] = next_x[r] + kUnit;
    };
    if (F != Format::kBF16 && cursor.wide) {
#pragma unroll 1
      do multiply(std::true_type());
      while (--n > 0);
    } else {
#pragma unroll 1
      do multiply(std::false_type());
      while (--n > 0);
    }

    if (filled == 0) {
      __syncwarp();  // all lanes have read the stage
      if (lane == 0) ask(slot);
      if (++slot == SkinnyRing::kStages) slot = 0, phase ^= 1;
    }
    if (unit < segment_end) continue;
    const bool last = unit == count;
    after(cursor, sum, last);
    if (last) {
      if (--jobs_left == 0) return;
      cursor = following;
      unit = 0;
      eighths = first * units;
    }
    enter_segment(unit);
  }
}

}  // namespace fathom::ops::cuda
