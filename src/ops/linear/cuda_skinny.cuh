// A product with few rows: weights stream from memory once, straight into registers. A block works
// off a list of jobs, 16 outputs each, and its warps, one per segment of the sum, always have
// the next units of weights on their way, across jobs too.
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

// Outputs out0 .. of a weight, those below out_end; the lane's rows of x.
template <int kRowTiles>
struct SkinnyJob {
  const CudaWeightView* w;
  int out0, out_end;
  int rows;                           // of all tiles
  const __nv_bfloat16* x[kRowTiles];  // row lane / 4 of each tile of 8, or null beyond `rows`
};

template <int kRowTiles>
struct SkinnyShared {
  // Two jobs in turn: one barrier a job.
  float part[2][kSegments][kSkinnyRows * kRowTiles][kSkinnyOutputs];
};

// Units of weights that a lane has on their way.
template <Format F>
inline constexpr int kSkinnyAhead = F == Format::kBF16 ? 2 : 3;

// Does `jobs` jobs; job(i, whole) describes the i-th, without its x unless `whole`. The first
// weights are asked for before the kernel in front has finished. store(job, row, output, value) is
// called once for every element. depth: of every weight.
template <Format F, bool kInterleaved, int kRowTiles, class Job, class Store>
__device__ void SkinnyProducts(int jobs, int depth, SkinnyShared<kRowTiles>& shared, Job&& job,
                               Store&& store) {
  constexpr int kAhead = kSkinnyAhead<F>;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int q = lane & 3;
  const int units = depth / kUnit;
  const int begin = SegmentBegin(warp, units);
  const int per_job = SegmentBegin(warp + 1, units) - begin;
  const int steps = per_job * jobs;

  // Where the next unit to ask for lies. Rows beyond the end are the last one, computed in vain.
  const uint8_t* data[2];
  const uint8_t* scale[2];
  int asked = 0, asked_unit = 0, asked_job = 0;
  RawUnit<F> raw[kAhead][2];
  const auto ask = [&](RawUnit<F>(&to)[2]) {
    if (asked >= steps) return;
    if (asked_unit == 0) {
      const SkinnyJob<kRowTiles> next = job(asked_job, false);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = min(next.out0 + lane / 4 + 8 * i, next.out_end - 1);
        data[i] =
            next.w->data + int64_t{row} * (units * kUnitBytes<F>)+begin * kUnitBytes<F> + 16 * q;
        if constexpr (F == Format::kFp8Block128) {
          scale[i] = next.w->scale + int64_t{row >> 7} * units + begin;
        } else if constexpr (F == Format::kFp4Block32) {
          scale[i] = next.w->scale + int64_t{row} * (4 * units) + begin * 4 + q;
        }
      }
    }
    constexpr int kScales = F == Format::kFp4Block32 ? 4 : 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to[i].Load(data[i] + asked_unit * kUnitBytes<F>, scale[i] + asked_unit * kScales);
    }
    ++asked;
    if (++asked_unit == per_job) asked_unit = 0, ++asked_job;
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) ask(raw[i]);
  WaitForPrevious();

  float sum[kRowTiles][4] = {};
  const auto finish = [&](int index, const SkinnyJob<kRowTiles>& now) {
    auto& part = shared.part[index % 2];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        part[warp][8 * r + 2 * q + (i & 1)][lane / 4 + 8 * (i >> 1)] = sum[r][i];
        sum[r][i] = 0;
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kSkinnyOutputs * now.rows; i += kSkinnyThreads) {
      const int t = i / kSkinnyOutputs;
      const int o = i % kSkinnyOutputs;
      float total = 0;
#pragma unroll
      for (int s = 0; s < kSegments; ++s) total += part[s][t][o];
      if (now.out0 + o < now.out_end) store(t, now.out0 + o, total);
    }
  };

  if (per_job == 0) {
    for (int i = 0; i < jobs; ++i) finish(i, job(i, true));
    return;
  }
  int index = 0, unit = 0;
  SkinnyJob<kRowTiles> now;
  bool wide = false;
  for (int base = 0; base < steps; base += kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (base + a >= steps) break;
      if (unit == 0) {
        now = job(index, true);
        wide = now.w->wide;
      }
      const auto load_x = [&](int r, int e) {
        return now.x[r] == nullptr ? make_uint4(0, 0, 0, 0)
                                   : *reinterpret_cast<const uint4*>(
                                         now.x[r] + (begin + unit) * kUnit + UnitChunk<F>(q, e));
      };
      // One tile leaves registers for the whole unit's activations, asked for at once.
      constexpr int kTogether = kRowTiles == 1 ? 4 : 1;
      uint4 ahead[kTogether];
      if constexpr (kRowTiles == 1) {
#pragma unroll
        for (int e = 0; e < 4; ++e) ahead[e] = load_x(0, e);
      }
      const ChunkScale s0 = MakeScale<F>(raw[a][0].scale);
      const ChunkScale s1 = MakeScale<F>(raw[a][1].scale);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        uint4 x[kRowTiles];
        if constexpr (kRowTiles == 1) {
          x[0] = ahead[e];
        } else {
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) x[r] = load_x(r, e);
        }
        uint32_t a0[4], a1[4];
        raw[a][0].template Expand<kInterleaved>(e, s0, wide, a0);
        raw[a][1].template Expand<kInterleaved>(e, s1, wide, a1);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          Mma(sum[r], a0[0], a1[0], a0[1], a1[1], x[r].x, x[r].y);
          Mma(sum[r], a0[2], a1[2], a0[3], a1[3], x[r].z, x[r].w);
        }
      }
      ask(raw[a]);
      if (++unit == per_job) {
        finish(index, now);
        unit = 0;
        ++index;
      }
    }
  }
}

}  // namespace fathom::ops::cuda
