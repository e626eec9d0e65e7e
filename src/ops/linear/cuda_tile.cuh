// A product with many rows: tiles of 128 outputs x kRows rows through shared memory, two stages of
// 64 inputs each (half a unit). Weights pass through registers, where they are expanded.
#pragma once

#include "ops/linear/cuda_expand.cuh"

namespace fathom::ops::cuda {

inline constexpr int kTileOutputs = 128;
inline constexpr int kTileThreads = 256;
inline constexpr int kStageInputs = 64;
// bf16 elements from one row of a stage to the next: 16 bytes more than the row, so that the
// 16-byte accesses of 8 consecutive lanes (2 rows, 4 quarters) meet 32 different banks.
inline constexpr int kStageStride = kStageInputs + 8;
inline constexpr int kResultStride = kTileOutputs + 4;  // floats

template <int kRows>
inline constexpr int kTileSharedBytes =
    2 * (kTileOutputs + kRows) * kStageStride * 2 > kRows* kResultStride * 4
        ? 2 * (kTileOutputs + kRows) * kStageStride * 2
        : kRows* kResultStride * 4;

// Copies 16 bytes to shared memory without waiting; zeros when not `valid`.
__device__ inline void CopyAsync(void* shared, const void* global, bool valid) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(bytes)
               : "memory");
}
__device__ inline void CopyAsyncWait() {
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
}

// Rows of a bf16 matrix on their way into a stage: kCount rows, each 8 copies of 16 bytes.
template <Format F, int kCount>
struct StageCopy {
  static constexpr int kPerThread = kCount * 8 / kTileThreads;
  const __nv_bfloat16* row[kPerThread];  // null: zeros
  const __nv_bfloat16* any;

  template <class RowOf>
  __device__ StageCopy(const __nv_bfloat16* valid_address, RowOf&& row_of) : any(valid_address) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) row[i] = row_of(threadIdx.x / 8 + i * kTileThreads / 8);
  }
  __device__ void Start(int stage, __nv_bfloat16* shared) const {
    const int c = threadIdx.x % 8;  // quarter c / 2, its chunk c % 2 of this half unit
    const int from = stage / 2 * kUnit + UnitChunk<F>(c / 2, stage % 2 * 2 + c % 2);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int r = threadIdx.x / 8 + i * kTileThreads / 8;
      CopyAsync(shared + r * kStageStride + 8 * c, (row[i] == nullptr ? any : row[i] + from),
                row[i] != nullptr);
    }
  }
};

// FP8 or FP4 rows on their way into a stage: 128 rows of 4 pieces of 16 inputs, 2 a thread.
template <Format F, bool kInterleaved>
struct StageExpand {
  static constexpr int kPerThread = kTileOutputs * 4 / kTileThreads;
  uint4 piece[kPerThread];  // FP4: x and y only
  uint32_t scale[kPerThread];
  int row[kPerThread];

  __device__ StageExpand(int out0, int out_end) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      row[i] = min(out0 + static_cast<int>(threadIdx.x) / 4 + i * kTileThreads / 4, out_end - 1);
    }
  }
  __device__ void Load(const CudaWeightView& w, int stage) {
    const int q = threadIdx.x % 4;
    const int unit = stage / 2;
    const int half = stage % 2;
    constexpr int kBytes = kUnitBytes<F>;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const uint8_t* at = w.data + int64_t{row[i]} * (w.depth / kUnit * kBytes) + unit * kBytes;
      if constexpr (F == Format::kFp8Block128) {
        piece[i] = __ldg(reinterpret_cast<const uint4*>(at + 64 * half + 16 * q));
      } else {
        const uint2 v = __ldg(reinterpret_cast<const uint2*>(at + 16 * q + 8 * half));
        piece[i].x = v.x, piece[i].y = v.y;
      }
      scale[i] = LoadScale<F>(w, row[i], unit, q);
    }
  }
  __device__ void Store(bool wide, __nv_bfloat16* shared) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const ChunkScale s = MakeScale<F>(scale[i]);
      uint32_t a[4], b[4];
      if constexpr (F == Format::kFp8Block128) {
        ExpandFp8<kInterleaved>(piece[i].x, piece[i].y, s, wide, a);
        ExpandFp8<kInterleaved>(piece[i].z, piece[i].w, s, wide, b);
      } else {
        ExpandFp4(piece[i].x, s, wide, a);
        ExpandFp4(piece[i].y, s, wide, b);
      }
      const int r = threadIdx.x / 4 + i * kTileThreads / 4;
      auto* to = reinterpret_cast<uint4*>(shared + r * kStageStride + 16 * (threadIdx.x % 4));
      to[0] = make_uint4(a[0], a[1], a[2], a[3]);
      to[1] = make_uint4(b[0], b[1], b[2], b[3]);
    }
  }
};

// A bf16 weight's part of a stage: no registers in between.
template <bool kInterleaved>
struct StageExpand<Format::kBF16, kInterleaved> {
  static_assert(!kInterleaved);
  int out0, out_end;
  __device__ StageExpand(int first, int end) : out0(first), out_end(end) {}
  __device__ void Load(const CudaWeightView&, int) {}
  __device__ void Store(bool, __nv_bfloat16*) const {}
  __device__ void Start(const CudaWeightView& w, int stage, __nv_bfloat16* shared) const {
    const auto* data = reinterpret_cast<const __nv_bfloat16*>(w.data);
    const StageCopy<Format::kBF16, kTileOutputs> copy(
        data, [&](int r) { return data + int64_t{min(out0 + r, out_end - 1)} * w.depth; });
    copy.Start(stage, shared);
  }
};

// Outputs out0 .. out0 + 127 (those below out_end) of up to kRows rows, by a block of kTileThreads
// with kTileSharedBytes<kRows> of shared memory. row_of(r) is the activation row of tile row r, or
// null beyond the last; any_x is an address that may be read. store(r, output, values, count) gets
// up to 4 consecutive outputs of a row.
template <Format F, bool kInterleaved, int kRows, class RowOf, class Store>
__device__ void TileProduct(const CudaWeightView& w, int out0, int out_end,
                            const __nv_bfloat16* any_x, RowOf&& row_of, int rows, void* shared,
                            Store&& store) {
  constexpr int kRowTiles = kRows / 16;  // a warp: 32 outputs x kRows / 2 rows
  auto* const w_stages = static_cast<__nv_bfloat16*>(shared);
  __nv_bfloat16* const x_stages = w_stages + 2 * kTileOutputs * kStageStride;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int q = lane & 3;
  const int warp_out = warp % 4 * 32;
  const int warp_row = warp / 4 * (kRows / 2);
  const int units = w.depth / kUnit;
  const int stages = 2 * units;

  float sum[2][kRowTiles][4] = {};
  float total[2][kRowTiles][4] = {};
  int segment = 1;
  while (segment < kSegments && SegmentBegin(segment, units) == 0) ++segment;
  int boundary = SegmentBegin(segment, units);

  const StageCopy<F, kRows> x_copy(any_x, row_of);
  StageExpand<F, kInterleaved> w_copy(out0, out_end);
  const auto start = [&](int stage) {
    x_copy.Start(stage, x_stages + stage % 2 * kRows * kStageStride);
    if constexpr (F == Format::kBF16) {
      w_copy.Start(w, stage, w_stages + stage % 2 * kTileOutputs * kStageStride);
    }
    w_copy.Load(w, stage);
  };
  const auto finish = [&](int stage) {
    w_copy.Store(w.wide, w_stages + stage % 2 * kTileOutputs * kStageStride);
  };

  start(0);
  finish(0);
  for (int stage = 0; stage < stages; ++stage) {
    CopyAsyncWait();
    __syncthreads();  // this stage is there, and nobody reads the other one any more
    if (stage + 1 < stages) start(stage + 1);
    if (stage == 2 * boundary) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) total[m][n][i] += sum[m][n][i], sum[m][n][i] = 0;
        }
      }
      do {
        boundary = SegmentBegin(++segment, units);
      } while (segment < kSegments && 2 * boundary == stage);
    }
    const __nv_bfloat16* const ws =
        w_stages + (stage % 2 * kTileOutputs + warp_out + lane / 4) * kStageStride + 16 * q;
    const __nv_bfloat16* const xs =
        x_stages + (stage % 2 * kRows + warp_row + lane / 4) * kStageStride + 16 * q;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      uint4 a[2][2];
      uint4 b[kRowTiles];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          a[m][i] = *reinterpret_cast<const uint4*>(ws + (16 * m + 8 * i) * kStageStride + 8 * e);
        }
      }
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        b[n] = *reinterpret_cast<const uint4*>(xs + 8 * n * kStageStride + 8 * e);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          Mma(sum[m][n], a[m][0].x, a[m][1].x, a[m][0].y, a[m][1].y, b[n].x, b[n].y);
        }
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          Mma(sum[m][n], a[m][0].z, a[m][1].z, a[m][0].w, a[m][1].w, b[n].z, b[n].w);
        }
      }
    }
    if (stage + 1 < stages) finish(stage + 1);
  }
  __syncthreads();

  auto* const result = static_cast<float*>(shared);  // [kRows][kResultStride]
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = warp_row + 8 * n + 2 * q + (i & 1);
        const int o = warp_out + 16 * m + lane / 4 + 8 * (i >> 1);
        result[r * kResultStride + o] = total[m][n][i] + sum[m][n][i];
      }
    }
  }
  __syncthreads();
  const int o = out0 + 4 * lane;
  for (int r = warp; r < rows; r += kTileThreads / 32) {
    if (o < out_end) {
      store(r, o, reinterpret_cast<const float4*>(result + r * kResultStride)[lane],
            min(4, out_end - o));
    }
  }
}

}  // namespace fathom::ops::cuda
