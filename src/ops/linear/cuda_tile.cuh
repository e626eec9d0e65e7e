// A product of BF16 weights with many rows: tiles of 128 outputs x kRows rows through shared
// memory, two stages of 64 inputs each (half a unit).
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

// Rows of a bf16 matrix on their way into a stage: kCount rows, each 8 copies of 16 bytes. kPiece:
// elements from 64 bytes of a row to the next.
template <int kCount, int kPiece>
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
    const int from = (2 * stage + c % 2) * kPiece + 8 * (c / 2);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int r = threadIdx.x / 8 + i * kTileThreads / 8;
      CopyAsync(shared + r * kStageStride + 8 * c, (row[i] == nullptr ? any : row[i] + from),
                row[i] != nullptr);
    }
  }
};

// Outputs out0 .. out0 + 127 (those below out_end) of up to kRows rows, by a block of kTileThreads
// with kTileSharedBytes<kRows> of shared memory. row_of(r) is the activation row of tile row r, or
// null beyond the last; any_x is an address that may be read. store(r, output, values, count) gets
// up to 4 consecutive outputs of a row.
template <int kRows, class RowOf, class Store>
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

  const auto* const data = reinterpret_cast<const __nv_bfloat16*>(w.data);
  const StageCopy<kRows, kPieceBytes / 2> x_copy(any_x, row_of);
  const StageCopy<kTileOutputs, kTilePieceBytes / 2> w_copy(data, [&](int r) {
    const int row = min(out0 + r, out_end - 1);
    return data + PieceOf(row, 0, units * kUnitPieces<Format::kBF16>) * (kPieceBytes / 2);
  });
  const auto start = [&](int stage) {
    x_copy.Start(stage, x_stages + stage % 2 * kRows * kStageStride);
    w_copy.Start(stage, w_stages + stage % 2 * kTileOutputs * kStageStride);
  };

  start(0);
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
