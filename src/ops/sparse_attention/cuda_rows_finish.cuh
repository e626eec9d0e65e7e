// The end of AttendRows (cuda_rows.cuh): a range's sums become a token's result. The only range of
// a token stores it; several send each other shares of the heads and add them up in order.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/hopper.cuh"
#include "ops/sparse_attention/cuda_rows_produce.cuh"

namespace fathom::ops::cuda {

constexpr int kBlockHeads = 64;
// Ranges of a token: as many as a portable cluster has blocks. Of the candidate up to twice as
// many, as far as the device has room for such clusters.
__host__ __device__ constexpr int MaxRanges(bool candidate) {
  return candidate ? 16 : 8;
}

// A range's result of a head.
struct HeadSums {
  uint4 channels[kHeadDim / 8];  // 16 bits each
  float max, sum;
  float scale[2];  // of the lower and of the upper half of the channels
};
static_assert(sizeof(HeadSums) == 2 * kHeadDim + 16);  // no bank conflicts between heads

// One consuming warpgroup's state: heads g and g + 8 of its warp's 16, channels of four panels.
struct Attended {
  float acc[2][64];  // of panel i, columns 8j + 2 quad and the next: at 32 i + 4 j, of head g + 8
                     // two on
};

// Of a range's weights, by head: the maximum of the scores, times log2(e), under which they were
// taken, and their sum.
struct RangeStats {
  const float* max;
  const float* sum;
};

// What a head's ranges are multiplied by, in the lower and in the upper half of the channels.
template <bool kCandidate>
using RangeFactors = float2[MaxRanges(kCandidate)];

// A barrier of the two consuming warpgroups.
__device__ inline void ConsumerBarrier() {
  asm volatile("bar.sync 1, 256;" ::: "memory");
}
// Of the consumers of all blocks of the cluster. The candidate does not publish what was written
// before, which would wait for the whole device's memory: it only has to say that reads are over,
// and what blocks send each other is counted by a barrier of its own.
template <bool kCandidate>
__device__ inline void ClusterArrive() {
  if constexpr (kCandidate) {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  } else {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  }
}
__device__ inline void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / (sum + e^sink) under the maximum `max` (times log2(e)).
__device__ inline float InverseOfSum(float max, float sum, float sink) {
  return __fdiv_rn(1.0f, sum + Exp2(__fmaf_rn(sink, 1.4426950408889634f, -max)));
}

// Four pairs of channels of a thread's column, and the table they are rotated back by.
struct OutputColumn {
  int channel;
  bool rotary;
  float table[8];

  __device__ OutputColumn(const AttentionParams& p, int32_t token, int first_channel)
      : channel(first_channel), rotary(p.rope != nullptr && first_channel >= kNopeDim) {
    if (!rotary) return;
    const float* at = p.rope + int64_t{token} * kRopeDim + channel - kNopeDim;
#pragma unroll
    for (int i = 0; i < 8; ++i) table[i] = __ldg(at + i);
  }

  // As output_projection rotates: the same products and sums, never fused.
  template <bool kCandidate>
  __device__ void Store(const AttentionParams& p, int32_t token, int head,
                        const uint4& value) const {
    uint32_t words[4] = {value.x, value.y, value.z, value.w};
    if (rotary) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = Bf16Pair(words[i]);
        const float c = table[2 * i], s = -table[2 * i + 1];
        words[i] = Bf16Word(__fsub_rn(__fmul_rn(v.x, c), __fmul_rn(v.y, s)),
                            __fadd_rn(__fmul_rn(v.x, s), __fmul_rn(v.y, c)));
      }
    }
    auto* const to =
        static_cast<__nv_bfloat16*>(p.out) + token * p.out_stride + head * kHeadDim + channel;
    if constexpr (kCandidate) {
      // One store, which the compiler would cut into four.
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]),
                   "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
    } else {
      *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
    }
  }
};

// Where words of columns 8j + 2 quad of panel i of a warpgroup lie in a HeadSums.
__device__ inline uint32_t* WordOf(HeadSums& head, int group, int i, int j) {
  return reinterpret_cast<uint32_t*>(&head.channels[32 * group + 8 * i + j]) + threadIdx.x % 4;
}

// The sink of a head of the block's; of those beyond the last one that of the last.
__device__ inline float SinkOf(const AttentionParams& p, int head) {
  return __ldg(p.sink + min(head, p.heads - 1));
}

// Stores the result of a token's only range, by way of `sums`. sinks: those of heads g and g + 8 of
// the warp's 16.
template <bool kCandidate>
__device__ inline void StoreRange(const AttentionParams& p, int32_t token, int first_head,
                                  const RangeStats& stats, const float (&sinks)[2],
                                  const Attended& a, HeadSums* sums) {
  const int lane = threadIdx.x % 32, group = threadIdx.x / 128;
  const int first = threadIdx.x / 32 % 4 * 16;  // of the warp
  const OutputColumn column(p, token, 256 * group + 8 * lane);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int in_block = first + lane / 4 + 8 * r;
    HeadSums& head = sums[in_block];
    const float sink = kCandidate ? sinks[r] : SinkOf(p, first_head + in_block);
    const float inverse = InverseOfSum(stats.max[in_block], stats.sum[in_block], sink);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float* at = &a.acc[i / 2][32 * (i % 2) + 4 * j + 2 * r];
        *WordOf(head, group, i, j) = Bf16Word(at[0] * inverse, at[1] * inverse);
      }
    }
  }
  __syncwarp();
#pragma unroll 2
  for (int i = 0; i < 16; ++i) {
    const int head = first_head + first + i;
    if (head < p.heads) {
      column.Store<kCandidate>(p, token, head, sums[first + i].channels[32 * group + lane]);
    }
  }
}

// A range's sums of a head's half of the channels, as float16 under a power of two of their own:
// what is lost is an eighth of what rounding the result to bf16 loses.
__device__ inline void PackRange(const RangeStats& stats, const Attended& a, HeadSums* sums) {
  const int lane = threadIdx.x % 32, group = threadIdx.x / 128;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int in_block = threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * r;
    HeadSums& head = sums[in_block];
    float most = 0;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float* at = &a.acc[j / 16][4 * (j % 16) + 2 * r];
      most = fmaxf(most, fmaxf(fabsf(at[0]), fabsf(at[1])));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    // The largest becomes 2^14 at least, less than 2^15.
    const int exponent = max(static_cast<int>(__float_as_uint(most) >> 23), 32) - 14;
    const float factor = __uint_as_float(static_cast<uint32_t>(254 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float* at = &a.acc[i / 2][32 * (i % 2) + 4 * j + 2 * r];
        const __half2 pair = __floats2half2_rn(at[0] * factor, at[1] * factor);
        *WordOf(head, group, i, j) = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
    if (lane % 4 == 0) {
      head.scale[group] = __uint_as_float(static_cast<uint32_t>(exponent) << 23);
      if (group == 0) {
        head.max = stats.max[in_block];
        head.sum = stats.sum[in_block];
      }
    }
  }
}

// Heads [begin, end) are the share of block `rank` of a cluster of `ranges`.
template <bool kCandidate>
__device__ inline int ShareBegin(int rank, int ranges) {
  if constexpr (kCandidate) return QuickDivide(kBlockHeads * rank, ranges);
  return kBlockHeads * rank / ranges;
}

// Adds up the ranges of a token, block by block a share of the heads. sums: of this range.
// received: room for the others'; arrived: expects as many bytes as they send. The block has
// arrived at the cluster's barrier after it read its tiles.
template <bool kCandidate>
__device__ inline void MergeRanges(const AttentionParams& p, int32_t token, int first_head,
                                   int ranges, int rank, const HeadSums* sums, HeadSums* received,
                                   RangeFactors<kCandidate>* factors, uint64_t* arrived) {
  FenceForWgmma();
  ConsumerBarrier();
  ClusterWait();  // nobody reads tiles any more
  const int begin = ShareBegin<kCandidate>(rank, ranges),
            count = ShareBegin<kCandidate>(rank + 1, ranges) - begin;
  // A warp sends one copy after the other; the candidate's warps share them.
  const unsigned reader =
      kCandidate ? threadIdx.x / 32 + kConsumerThreads / 32 * (threadIdx.x % 32) : threadIdx.x;
  if (reader < static_cast<unsigned>(ranges) && reader != static_cast<unsigned>(rank)) {
    const auto to = static_cast<int>(reader);
    const int first = ShareBegin<kCandidate>(to, ranges),
              heads = ShareBegin<kCandidate>(to + 1, ranges) - first;
    CopyRemote(received + rank * heads, sums + first,
               static_cast<uint32_t>(heads * sizeof(HeadSums)), arrived, static_cast<uint32_t>(to));
  }
  const int piece = threadIdx.x % 64;
  const OutputColumn column(p, token, 8 * piece);
  const auto sums_of = [&](int range, int head) -> const HeadSums& {
    return range == rank ? sums[begin + head] : received[range * count + head];
  };
  // Eight lanes find the factors of a head's ranges, 32 heads at once; of more ranges, where a
  // block has eight heads at most, sixteen.
  const bool many = kCandidate && ranges > 8;
  const int mine = many ? threadIdx.x / 16 : threadIdx.x / 8;
  const int range = many ? threadIdx.x % 16 : threadIdx.x % 8;
  const float sink = SinkOf(p, first_head + begin + mine);
  BarrierWaitCluster(arrived, 0);
  const bool real = mine < count && range < ranges;
  const float max = real ? sums_of(range, mine).max : -INFINITY;
  float most = GroupMax(max, 8);
  if (many) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 8));
  const float weight = real ? Exp2(max - most) : 0.0f;
  float all = real ? sums_of(range, mine).sum * weight : 0.0f;
  if (many) all += __shfl_xor_sync(0xffffffffu, all, 8);
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) {
    all += __shfl_xor_sync(0xffffffffu, all, offset);
  }
  if (real) {
    const float factor = weight * InverseOfSum(most, all, sink);
    const HeadSums& of = sums_of(range, mine);
    factors[mine][range] = {factor * of.scale[0], factor * of.scale[1]};
  }
  ConsumerBarrier();
  ClusterArrive<kCandidate>();  // what others sent has left them
#pragma unroll 1
  for (int head = threadIdx.x / 64; head < count; head += 4) {
    if (first_head + begin + head >= p.heads) break;
    float total[8] = {};
#pragma unroll 4
    for (int i = 0; i < ranges; ++i) {
      const float2 both = factors[head][i];
      const float factor = piece < 32 ? both.x : both.y;
      const uint4 words = sums_of(i, head).channels[piece];
      const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&pairs[k]));
        total[2 * k] = __fmaf_rn(v.x, factor, total[2 * k]);
        total[2 * k + 1] = __fmaf_rn(v.y, factor, total[2 * k + 1]);
      }
    }
    column.Store<kCandidate>(p, token, first_head + begin + head,
                             {Bf16Word(total[0], total[1]), Bf16Word(total[2], total[3]),
                              Bf16Word(total[4], total[5]), Bf16Word(total[6], total[7])});
  }
  ClusterWait();
}

}  // namespace fathom::ops::cuda
