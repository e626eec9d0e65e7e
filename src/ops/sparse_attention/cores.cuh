// The two ways a block of 256 threads attends with 16 heads to a tile of rows. Both keep the same
// shape: a thread holds 32 accumulators in pairs of neighbouring channels, and the softmax of head
// h is the business of threads 16h .. 16h+15.
//
//   Bf16Core  tensor cores; a tile of 64 rows is expanded to bf16 in shared memory once and serves
//             as keys and as values. Scores: a warp per 8 rows; values: a warp per 64 channels.
//   F32Core   float32 multiply-adds on tiles of 32 rows.
#pragma once

#include "ops/sparse_attention/entries.cuh"

namespace fathom::ops::cuda {

constexpr int kPairs = 16;  // pairs of accumulators of a thread

// Updates a head's softmax by one tile and returns the factor for what was accumulated before.
// score: the thread's kMine scores, -inf for what is masked; they become the weights p.
template <int kMine>
__device__ float SoftmaxTile(float (&score)[kMine], Softmax* state) {
  float max = state->max;
#pragma unroll
  for (int i = 0; i < kMine; ++i) max = fmaxf(max, score[i]);
  max = GroupMax(max, 16);
  const float keep = expf(__fsub_rn(state->max, max));
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    score[i] = expf(__fsub_rn(score[i], max));
    sum = __fadd_rn(sum, score[i]);
  }
  for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  state->max = max;
  state->sum = __fmaf_rn(state->sum, keep, sum);
  return keep;
}

__device__ inline void LoadMatrix4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

__device__ inline void LoadMatrix4Transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

__device__ inline void MmaBf16(float* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four e4m3 codes times a power of two: exact in bf16.
__device__ inline uint2 ExpandFp8(uint32_t codes, float scale) {
  const auto two = [scale](uint32_t word) {
    const __half2 half{
        __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(word), __NV_E4M3)};
    const float2 value = __half22float2(half);
    return Bf16Word(value.x * scale, value.y * scale);
  };
  return {two(codes & 0xffffu), two(codes >> 16)};
}

class Bf16Core {
 public:
  static constexpr int kTile = 64;

  struct Shared {
    static constexpr int kPitch = kHeadDim + 8;  // rows start 16 bytes apart modulo all banks
    alignas(16) __nv_bfloat16 q[kGroupHeads][kPitch];
    alignas(16) __nv_bfloat16 rows[kTile][kPitch];
    alignas(16) __nv_bfloat16 p[kGroupHeads][kTile + 8];
    alignas(16) float score[kGroupHeads][kTile + 4];
    float keep[kGroupHeads];
  };

  __device__ explicit Bf16Core(Shared* shared) : s_(*shared) {}

  // Head and first channel of pair i of the thread's accumulators.
  __device__ static int Head(int i) { return threadIdx.x % 32 / 4 + i % 2 * 8; }
  __device__ static int Channel(int i) {
    return threadIdx.x / 32 * 64 + i / 2 * 8 + threadIdx.x % 4 * 2;
  }

  __device__ void LoadQuery(const AttentionParams& p, int32_t token, int first_head) const {
    const auto* q = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q) +
                                                   token * p.q_stride + first_head * kHeadDim);
    for (int i = threadIdx.x; i < kGroupHeads * kHeadDim / 8; i += kAttendThreads) {
      const int head = i / (kHeadDim / 8), at = i % (kHeadDim / 8);
      reinterpret_cast<uint4*>(s_.q[head])[at] =
          first_head + head < p.heads ? q[i] : uint4{0, 0, 0, 0};
    }
  }

  // Attends to `count` <= kTile rows: acc and state take them in. Starts and ends with a barrier.
  __device__ void Tile(const RowRef* rows, int count, bool, float (&acc)[kPairs][2],
                       Softmax* state) const {
    __syncthreads();
    LoadRows(rows, count);
    __syncthreads();
    Scores();
    __syncthreads();
    const int head = threadIdx.x / 16, at = threadIdx.x % 16 * 4;
    const float4 four = *reinterpret_cast<const float4*>(&s_.score[head][at]);
    float score[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      score[i] = at + i < count ? __fmul_rn(score[i], kScoreScale) : -INFINITY;
    }
    const float keep = SoftmaxTile(score, state);
    *reinterpret_cast<uint2*>(&s_.p[head][at]) = {Bf16Word(score[0], score[1]),
                                                  Bf16Word(score[2], score[3])};
    if (at == 0) s_.keep[head] = keep;
    __syncthreads();
    Values(acc);
  }

 private:
  // A warp per row, 16 channels a lane.
  __device__ void LoadRows(const RowRef* rows, int count) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int kBatch = 4;  // rows in flight
#pragma unroll
    for (int first = 0; first < kTile; first += 8 * kBatch) {
      uint4 x[kBatch], y[kBatch];
      float scale[kBatch];
      bool fp8[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = first + 8 * i + warp;
        x[i] = y[i] = uint4{0, 0, 0, 0};
        scale[i] = 0;
        fp8[i] = false;
        if (row >= count) continue;
        const RowRef ref = rows[row];
        fp8[i] = ref.format == RowFormat::kFp8Main && lane < 28;
        if (fp8[i]) {
          x[i] = reinterpret_cast<const uint4*>(ref.data)[lane];
          scale[i] = FromE8m0(static_cast<uint8_t>(ref.scale[lane / 4]));
        } else {
          const auto* data = reinterpret_cast<const uint4*>(
              ref.data +
              (ref.format == RowFormat::kFp8Main ? kNopeDim + 32 * (lane - 28) : 32 * lane));
          x[i] = data[0];
          y[i] = data[1];
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (fp8[i]) {
          const uint2 a = ExpandFp8(x[i].x, scale[i]), b = ExpandFp8(x[i].y, scale[i]);
          const uint2 c = ExpandFp8(x[i].z, scale[i]), d = ExpandFp8(x[i].w, scale[i]);
          x[i] = uint4{a.x, a.y, b.x, b.y};
          y[i] = uint4{c.x, c.y, d.x, d.y};
        }
        auto* out = reinterpret_cast<uint4*>(s_.rows[first + 8 * i + warp] + 16 * lane);
        out[0] = x[i];
        out[1] = y[i];
      }
    }
  }

  __device__ void Scores() const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const __nv_bfloat16* q = s_.q[lane % 16] + lane / 16 * 8;
    const __nv_bfloat16* k = s_.rows[8 * warp + lane % 8] + lane / 8 * 8;
    float sum[4][4] = {};  // four chains
#pragma unroll
    for (int channel = 0; channel < kHeadDim; channel += 32) {
      uint32_t a[4], b[4];
      LoadMatrix4(b, k + channel);
      float(&even)[4] = sum[channel / 32 % 2 * 2];
      float(&odd)[4] = sum[channel / 32 % 2 * 2 + 1];
      LoadMatrix4(a, q + channel);
      MmaBf16(even, a, b[0], b[1]);
      LoadMatrix4(a, q + channel + 16);
      MmaBf16(odd, a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      *reinterpret_cast<float2*>(&s_.score[lane / 4 + 4 * i][8 * warp + lane % 4 * 2]) = {
          (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]),
          (sum[0][i + 1] + sum[1][i + 1]) + (sum[2][i + 1] + sum[3][i + 1])};
    }
  }

  __device__ void Values(float (&acc)[kPairs][2]) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float keep[2] = {s_.keep[lane / 4], s_.keep[lane / 4 + 8]};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      acc[i][0] *= keep[i % 2];
      acc[i][1] *= keep[i % 2];
    }
#pragma unroll
    for (int row = 0; row < kTile; row += 16) {
      uint32_t a[4];
      LoadMatrix4(a, s_.p[lane % 16] + row + lane / 16 * 8);
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {  // of channel tiles
        uint32_t b[4];
        LoadMatrix4Transposed(b, s_.rows[row + lane % 16] + 64 * warp + 16 * pair + lane / 16 * 8);
        MmaBf16(acc[4 * pair], a, b[0], b[1]);
        MmaBf16(acc[4 * pair + 2], a, b[2], b[3]);
      }
    }
  }

  Shared& s_;
};

class F32Core {
 public:
  static constexpr int kTile = 32;

  struct Shared {
    static constexpr int kPitch = kHeadDim + 4;
    alignas(16) float q[kGroupHeads][kPitch];
    alignas(16) float rows[kTile][kPitch];
    alignas(16) float p[kTile][kGroupHeads];
    float keep[kGroupHeads];
  };

  __device__ explicit F32Core(Shared* shared) : s_(*shared) {}

  __device__ static int Head(int i) { return i; }
  __device__ static int Channel(int) { return threadIdx.x * 2; }

  __device__ void LoadQuery(const AttentionParams& p, int32_t token, int first_head) const {
    const int64_t at = token * p.q_stride + first_head * kHeadDim;
    for (int i = threadIdx.x; i < kGroupHeads * kHeadDim; i += kAttendThreads) {
      float value = 0;
      if (first_head + i / kHeadDim < p.heads) {
        value = p.q_bf16 ? ToFloat(static_cast<const __nv_bfloat16*>(p.q)[at + i])
                         : static_cast<const float*>(p.q)[at + i];
      }
      s_.q[i / kHeadDim][i % kHeadDim] = value;
    }
  }

  __device__ void Tile(const RowRef* rows, int count, bool round_p, float (&acc)[kPairs][2],
                       Softmax* state) const {
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int row = warp; row < kTile; row += kAttendThreads / 32) {
      float v[16] = {};
      if (row < count) {
        const RowRef ref = rows[row];
        DecodeWarpRow(ref.format, ref.data, ref.scale, v, lane);
      }
      StoreWarpRow(v, s_.rows[row], lane);
    }
    __syncthreads();
    const int head = threadIdx.x / 16, row = threadIdx.x % 16;
    float score[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      score[i] = row + 16 * i < count ? Dot(s_.q[head], s_.rows[row + 16 * i]) : -INFINITY;
    }
    const float keep = SoftmaxTile(score, state);
    s_.p[row][head] = RoundIf(score[0], round_p);
    s_.p[row + 16][head] = RoundIf(score[1], round_p);
    if (row == 0) s_.keep[head] = keep;
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kGroupHeads; ++h) {
      acc[h][0] *= s_.keep[h];
      acc[h][1] *= s_.keep[h];
    }
    for (int r = 0; r < count; ++r) {
      const float2 value = *reinterpret_cast<const float2*>(&s_.rows[r][2 * threadIdx.x]);
#pragma unroll
      for (int h = 0; h < kGroupHeads; ++h) {
        acc[h][0] = __fmaf_rn(s_.p[r][h], value.x, acc[h][0]);
        acc[h][1] = __fmaf_rn(s_.p[r][h], value.y, acc[h][1]);
      }
    }
  }

 private:
  __device__ static float Dot(const float* q, const float* k) {
    float sum[4] = {};
#pragma unroll 8
    for (int c = 0; c < kHeadDim; c += 4) {
      const float4 a = *reinterpret_cast<const float4*>(q + c);
      const float4 b = *reinterpret_cast<const float4*>(k + c);
      sum[0] = __fmaf_rn(a.x, b.x, sum[0]);
      sum[1] = __fmaf_rn(a.y, b.y, sum[1]);
      sum[2] = __fmaf_rn(a.z, b.z, sum[2]);
      sum[3] = __fmaf_rn(a.w, b.w, sum[3]);
    }
    return __fmul_rn(__fadd_rn(__fadd_rn(sum[0], sum[1]), __fadd_rn(sum[2], sum[3])), kScoreScale);
  }

  Shared& s_;
};

}  // namespace fathom::ops::cuda
