// A product with at most 8 rows: weights stream from memory once, straight into registers.
#pragma once

#include "ops/linear/cuda_expand.cuh"

namespace fathom::ops::cuda {

inline constexpr int kSkinnyRows = 8;
inline constexpr int kSkinnyThreads = 32 * kSegments;  // a warp per segment

// One lane's 32 weights of a unit, as stored.
template <Format F>
struct RawUnit {
  uint4 load[32 / kLoadInputs<F>];
  uint32_t scale;

  __device__ void Load(const CudaWeightView& w, int row, int unit, int q) {
    constexpr int kBytes = kUnitBytes<F>;
    const uint8_t* at = w.data + int64_t{row} * (w.depth / kUnit * kBytes) + unit * kBytes + 16 * q;
#pragma unroll
    for (int i = 0; i < 32 / kLoadInputs<F>; ++i) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(load[i].x), "=r"(load[i].y), "=r"(load[i].z), "=r"(load[i].w)
                   : "l"(at + 64 * i));
    }
    scale = LoadScale<F>(w, row, unit, q);
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

template <int kTiles>
struct SkinnyShared {
  float part[kSegments][kSkinnyRows][16 * kTiles];
};

// Outputs out0 .. out0 + 16*kTiles - 1 (those below w.out) of `rows` rows, by one block of
// kSkinnyThreads. x: the activation row of this lane's row (lane / 4), or null beyond `rows`.
// store(row, output, value) is called once for every element.
template <Format F, bool kInterleaved, int kTiles, class Store>
__device__ void SkinnyProduct(const CudaWeightView& w, int out0, int out_end,
                              const __nv_bfloat16* x, int rows, SkinnyShared<kTiles>& shared,
                              Store&& store) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int q = lane & 3;
  const int units = w.depth / kUnit;
  const int begin = SegmentBegin(warp, units);
  const int end = SegmentBegin(warp + 1, units);

  int row[kTiles][2];  // weight rows of this lane; beyond the end the last one, computed in vain
  float sum[kTiles][4] = {};
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    row[m][0] = min(out0 + 16 * m + lane / 4, out_end - 1);
    row[m][1] = min(out0 + 16 * m + lane / 4 + 8, out_end - 1);
  }

  RawUnit<F> next[kTiles][2];
  if (begin < end) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      next[m][0].Load(w, row[m][0], begin, q);
      next[m][1].Load(w, row[m][1], begin, q);
    }
  }
  for (int unit = begin; unit < end; ++unit) {
    RawUnit<F> raw[kTiles][2];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) raw[m][0] = next[m][0], raw[m][1] = next[m][1];
    if (unit + 1 < end) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        next[m][0].Load(w, row[m][0], unit + 1, q);
        next[m][1].Load(w, row[m][1], unit + 1, q);
      }
    }
    uint4 b[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      b[e] = x == nullptr ? make_uint4(0, 0, 0, 0)
                          : *reinterpret_cast<const uint4*>(x + unit * kUnit + UnitChunk<F>(q, e));
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const ChunkScale s0 = MakeScale<F>(raw[m][0].scale);
      const ChunkScale s1 = MakeScale<F>(raw[m][1].scale);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        uint32_t a0[4], a1[4];
        raw[m][0].template Expand<kInterleaved>(e, s0, w.wide, a0);
        raw[m][1].template Expand<kInterleaved>(e, s1, w.wide, a1);
        Mma(sum[m], a0[0], a1[0], a0[1], a1[1], b[e].x, b[e].y);
        Mma(sum[m], a0[2], a1[2], a0[3], a1[3], b[e].z, b[e].w);
      }
    }
  }

#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      shared.part[warp][2 * q + (i & 1)][16 * m + lane / 4 + 8 * (i >> 1)] = sum[m][i];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * kTiles * rows; i += kSkinnyThreads) {
    const int t = i / (16 * kTiles);
    const int o = i % (16 * kTiles);
    float total = 0;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) total += shared.part[s][t][o];
    if (out0 + o < out_end) store(t, out0 + o, total);
  }
}

}  // namespace fathom::ops::cuda
