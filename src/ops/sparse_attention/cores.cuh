// How a block of 256 threads attends with 16 heads to a tile of rows in float32 multiply-adds. A
// thread holds 32 accumulators in pairs of neighbouring channels, and the softmax of head h is the
// business of threads 16h .. 16h+15.
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
