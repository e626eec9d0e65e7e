// Attention with up to 64 heads of a token on tensor cores: the product's kernel, for bf16 queries
// and rows of FP8 or bf16.
//
// A block of four warpgroups takes a range of the token's entries, 64 at a time. Two warpgroups
// fetch rows and expand them to bf16 in shared memory, once for all heads, as keys and as values
// alike. Of the other two one computes scores and weights; then each adds up half of the channels.
// Ranges of one token form a cluster, whose blocks send each other their results, as float16 under
// scales of their own, and add them up in order. How many ranges there are depends on the number of
// entries alone, so that a token's result has the same bits in every step.
#pragma once

#include <cooperative_groups.h>

#include "ops/sparse_attention/cuda_rows_finish.cuh"
#include "ops/sparse_attention/cuda_rows_produce.cuh"

namespace fathom::ops::cuda {

constexpr int kAttendRowsThreads = kConsumerThreads + kProducerThreads;
// Registers of a thread: 256 consumers and 256 producers share 64K.
constexpr int kConsumerRegisters = 200, kProducerRegisters = 56;

__host__ __device__ constexpr int TilesOf(int entries) {
  return (entries + kTileRows - 1) / kTileRows;
}
// A range costs a block as much time as three or four tiles, whatever it holds. Of three tiles it
// is the fastest for a single token (128 + 512 rows: 19.0 us, of five 23.2), of five for a large
// batch (128 tokens: 87.9 and 53.7) and for a prompt.
__host__ __device__ constexpr int AttentionRanges(int tiles) {
  const int ranges = (tiles + 4) / 5;
  return ranges < kMaxRanges ? ranges : kMaxRanges;
}

// At the beginning of dynamic shared memory, 1,024-byte aligned.
struct AttendRowsShared {
  union {
    TileRing ring;
    HeadSums received[kBlockHeads + kMaxRanges];  // from the other ranges, once all tiles are read
  };
  union {
    char q[kTileBytes];
    HeadSums sums[kBlockHeads];  // of the range, once all scores are there
  };
  union {
    char weights[kPanelBytes];              // of the tile at hand [heads][rows], bf16, swizzled
    RangeFactors factors[kBlockHeads / 2];  // of the block's share of the heads, in the end
  };
  StagedCodes staged;
  float keep[kBlockHeads];                   // factors of the sums so far
  float max[kBlockHeads], sum[kBlockHeads];  // of the range's weights
  TileBarriers barriers;
  uint64_t arrived;  // what the other ranges send
};
static_assert(sizeof(HeadSums) * kBlockHeads % 1024 == 0);
constexpr int kAttendRowsBytes = static_cast<int>(sizeof(AttendRowsShared)) + 1024;

// Between the warpgroup that computes the weights of a tile and the other one: they are there, they
// are used. The one that waits synchronises, the other one only arrives.
__device__ inline void SyncWeights(int which) {
  asm volatile("bar.sync %0, 256;" ::"r"(which) : "memory");
}
__device__ inline void ArriveWeights(int which) {
  asm volatile("bar.arrive %0, 256;" ::"r"(which) : "memory");
}
constexpr int kWeightsReady = 2, kWeightsUsed = 3;

// acc times keep (of heads g and g + 8), where it is not 1.
__device__ inline void Rescale(Attended& a, const float (&keep)[2]) {
  if (!__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 128; ++i) a.acc[i / 64][i % 64] *= keep[i / 2 % 2];
}

// Begins to add the weights of a tile times its rows, in the warpgroup's channels.
__device__ inline void AddTile(Attended& a, uint32_t weights, uint32_t values) {
  WgmmaFence();
#pragma unroll
  for (int k = 0; k < kTileRows / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      WgmmaBf16Panels(a.acc[i], PanelDescriptor(weights + 32 * k),
                      PanelsDescriptor(values + 2 * i * kPanelBytes + k * 16 * 128));
    }
  }
  WgmmaCommit();
}

// The first consuming warpgroup: scores, softmax and the lower channels' sums over tiles
// [first_tile, last_tile).
__device__ inline void ConsumeScores(const Entries& entries, int first_tile, int last_tile,
                                     AttendRowsShared& s, Attended& a, float (&max)[2],
                                     float (&sum)[2]) {
  constexpr float kLog2e = 1.4426950408889634f;
  constexpr float kScale = kScoreScale * kLog2e;
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const int head = threadIdx.x / 32 * 16 + lane / 4;  // and head + 8
  const uint32_t q = SharedAddress(s.q), weights = SharedAddress(s.weights);
  const int total = entries.window + entries.compressed;
  max[0] = max[1] = -INFINITY;
  sum[0] = sum[1] = 0;
#pragma unroll 1
  for (int tile = first_tile; tile < last_tile; ++tile) {
    const int stage = (tile - first_tile) % kStages, round = (tile - first_tile) / kStages;
    const uint32_t keys = SharedAddress(s.ring.keys[stage]);
    BarrierWait(&s.barriers.full[stage], round & 1);
    float score[32];  // rows 8j + 2 quad and the next: at 4j, of head + 8 two on
    WgmmaFence();
    WgmmaBf16<false>(score, PanelDescriptor(q), PanelDescriptor(keys));
#pragma unroll
    for (int k = 1; k < kHeadDim / 16; ++k) {
      const uint32_t at = k / 4 * kPanelBytes + k % 4 * 32;
      WgmmaBf16<true>(score, PanelDescriptor(q + at), PanelDescriptor(keys + at));
    }
    WgmmaCommit();
    WgmmaWait<0>();

    const int count = total - tile * kTileRows;
    if (count < kTileRows) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (i / 4 * 8 + 2 * quad + i % 2 >= count) score[i] = -INFINITY;
      }
    }
    float keep[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = fmaxf(score[2 * r], score[2 * r + 1]);
#pragma unroll
      for (int j = 1; j < 8; ++j) {
        most = fmaxf(most, fmaxf(score[4 * j + 2 * r], score[4 * j + 2 * r + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = kScale * fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      most = fmaxf(max[r], most);
      keep[r] = Exp2(max[r] - most);
      max[r] = most;
      float part = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = score[4 * j + 2 * r + c];
          x = Exp2(__fmaf_rn(x, kScale, -max[r]));
          part += x;
        }
      }
      sum[r] = __fmaf_rn(sum[r], keep[r], part);
    }
    if (tile > first_tile) SyncWeights(kWeightsUsed);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      // Scores 2i and 2i + 1 are of head + 8 (i % 2) and of rows 8 (i / 2) + 2 quad and the next.
      *reinterpret_cast<uint32_t*>(s.weights +
                                   SwizzledOffset(head + 8 * (i % 2), 16 * (i / 2) + 4 * quad)) =
          Bf16Word(score[2 * i], score[2 * i + 1]);
    }
    if (quad == 0) {
      s.keep[head] = keep[0];
      s.keep[head + 8] = keep[1];
    }
    FenceForWgmma();
    ArriveWeights(kWeightsReady);
    Rescale(a, keep);
    __syncwarp();  // a warp multiplies weights of its own heads only
    AddTile(a, weights, keys);
    WgmmaWait<0>();
    WarpArrive(&s.barriers.empty[stage]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
  }
}

// The second one: the upper channels' sums.
__device__ inline void ConsumeValues(int first_tile, int last_tile, AttendRowsShared& s,
                                     Attended& a) {
  const int head = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  const uint32_t weights = SharedAddress(s.weights);
#pragma unroll 1
  for (int tile = first_tile; tile < last_tile; ++tile) {
    const int stage = (tile - first_tile) % kStages, round = (tile - first_tile) / kStages;
    const uint32_t values = SharedAddress(s.ring.keys[stage]) + 4 * kPanelBytes;
    BarrierWait(&s.barriers.full[stage], round & 1);
    SyncWeights(kWeightsReady);
    const float keep[2] = {s.keep[head], s.keep[head + 8]};
    Rescale(a, keep);
    AddTile(a, weights, values);
    WgmmaWait<0>();
    WarpArrive(&s.barriers.empty[stage]);
    if (tile + 1 < last_tile) ArriveWeights(kWeightsUsed);
  }
}

// Normalises and rotates a warp's queries where they lie, as norm_rope_insert does it, lane by
// lane: 16 channels of a head each.
__device__ inline void NormAndRotate(const AttentionParams& p, int32_t token, char* q) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool rotary = lane >= kNopeDim / 16;
  float table[16] = {};
  if (rotary) {
    LoadWarpRow(p.rope + int64_t{token} * kRopeDim - kNopeDim, table, lane);
  }
#pragma unroll 1
  for (int head = warp; head < kBlockHeads; head += kConsumerThreads / 32) {
    uint4* const at[2] = {
        reinterpret_cast<uint4*>(q + lane / 4 * kPanelBytes + SwizzledOffset(head, lane % 4 * 32)),
        reinterpret_cast<uint4*>(q + lane / 4 * kPanelBytes +
                                 SwizzledOffset(head, lane % 4 * 32 + 16))};
    float v[16];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 four = *at[i];
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 pair = Bf16Pair(words[k]);
        v[8 * i + 2 * k] = pair.x;
        v[8 * i + 2 * k + 1] = pair.y;
      }
    }
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) squares += v[i] * v[i];
    const float r = 1.0f / sqrtf(WarpSum(squares) / kHeadDim + kNormEps);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = RoundBf16(v[i] * r);
    if (rotary) {
#pragma unroll
      for (int i = 0; i < 16; i += 2) {
        const float c = table[i], s = table[i + 1];
        const float a = v[i], b = v[i + 1];
        v[i] = RoundBf16(a * c - b * s);
        v[i + 1] = RoundBf16(a * s + b * c);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *at[i] = {Bf16Word(v[8 * i], v[8 * i + 1]), Bf16Word(v[8 * i + 2], v[8 * i + 3]),
                Bf16Word(v[8 * i + 4], v[8 * i + 5]), Bf16Word(v[8 * i + 6], v[8 * i + 7])};
    }
  }
}

// The token's queries as panels, a warp's heads as NormAndRotate takes them; zeros beyond the last
// head.
__device__ inline void LoadQueries(const AttentionParams& p, int32_t token, int first_head,
                                   char* to) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto* q = static_cast<const __nv_bfloat16*>(p.q) + token * p.q_stride;
#pragma unroll 2
  for (int head = warp; head < kBlockHeads; head += kConsumerThreads / 32) {
    const bool real = first_head + head < p.heads;
    const auto* from = q + (real ? first_head + head : 0) * int64_t{kHeadDim} + 8 * lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      CopyAsync16(SharedAddress(to) + (lane / 8 + 4 * half) * kPanelBytes +
                      SwizzledOffset(head, lane % 8 * 16),
                  from + 256 * half, real);
    }
  }
  CopyAsyncCommit();
  CopyAsyncWaitFor<0>();
  __syncwarp();
  if (p.rope != nullptr) NormAndRotate(p, token, to);
}

// What the walk to the rows reads one after the other comes into L2 at once; in decode a token's
// index is its sequence's.
__device__ inline void PrefetchStep(const AttentionParams& p, int32_t token) {
  const int i = static_cast<int>(threadIdx.x) - kConsumerThreads;
  const int sequence = min(token, p.step.num_sequences - 1);
  if (32 * i < p.heads) PrefetchToL2(p.sink + 32 * i);
  if (p.selected != nullptr && 32 * i < p.top_k) {
    PrefetchToL2(p.selected + int64_t{token} * p.top_k + 32 * i);
  }
  if (p.compressed.base != nullptr && i >= 128 && 32 * (i - 128) < p.step.max_blocks) {
    PrefetchToL2(p.step.block_table + int64_t{sequence} * p.step.max_blocks + 32 * (i - 128));
  }
}

// The tiles of a block; none where the token is padding or has fewer ranges.
struct BlockTiles {
  int ranges = 0;
  int first = 0, last = 0;

  __device__ BlockTiles(const AttentionParams& p, int32_t token, int rank, Entries* entries) {
    if (!EntriesOf(p, token, entries)) return;
    const int tiles = TilesOf(entries->window + entries->compressed);
    ranges = AttentionRanges(tiles);
    if (rank >= ranges) return;
    // The compiler learns that all lanes agree.
    first = __shfl_sync(0xffffffffu, tiles * rank / ranges, 0);
    last = __shfl_sync(0xffffffffu, tiles * (rank + 1) / ranges, 0);
  }
};

// What a block works on.
struct BlockWork {
  int32_t token;
  int first_head;
  int rank;  // in its cluster
};

// The two consuming warpgroups.
__device__ inline void ConsumeRange(const AttentionParams& p, const BlockWork& work,
                                    AttendRowsShared& s) {
  MoreRegisters<kConsumerRegisters>();
  WaitForPrevious();
  Entries entries;
  const BlockTiles tiles(p, work.token, work.rank, &entries);
  if (tiles.first == tiles.last) return;
  LoadQueries(p, work.token, work.first_head, s.q);
  const int lane = threadIdx.x % 32;
  const int head = threadIdx.x / 32 % 4 * 16 + lane / 4;
  if (threadIdx.x == 0 && tiles.ranges > 1) {
    const int heads = ShareBegin(work.rank + 1, tiles.ranges) - ShareBegin(work.rank, tiles.ranges);
    BarrierArriveExpecting(&s.arrived,
                           static_cast<uint32_t>((tiles.ranges - 1) * heads * sizeof(HeadSums)));
  }
  FenceForWgmma();
  ConsumerBarrier();
  Attended a;
#pragma unroll
  for (int i = 0; i < 128; ++i) a.acc[i / 64][i % 64] = 0;
  if (__shfl_sync(0xffffffffu, threadIdx.x / 128, 0) == 0) {
    float max[2], sum[2];
    ConsumeScores(entries, tiles.first, tiles.last, s, a, max, sum);
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        s.max[head + 8 * r] = max[r];
        s.sum[head + 8 * r] = sum[r];
      }
    }
  } else {
    ConsumeValues(tiles.first, tiles.last, s, a);
  }
  if (tiles.ranges > 1) ClusterArrive();
  ConsumerBarrier();  // nobody reads queries any more
  const RangeStats stats = {s.max, s.sum};
  if (tiles.ranges == 1) {
    StoreRange(p, work.token, work.first_head, stats, a, s.sums);
  } else {
    PackRange(stats, a, s.sums);
    MergeRanges(p, work.token, work.first_head, tiles.ranges, work.rank, s.sums, s.received,
                s.factors, &s.arrived);
  }
}

// grid: clusters of blocks, one per token and 64 heads; block r of a cluster is range r.
template <bool kFp8>
__global__ void __launch_bounds__(kAttendRowsThreads, 1)
    AttendRows(const __grid_constant__ AttentionParams p) {
  extern __shared__ char memory[];
  auto& s = *reinterpret_cast<AttendRowsShared*>(memory +
                                                 (1024 - (SharedAddress(memory) & 1023u)) % 1024);
  namespace cg = cooperative_groups;
  const auto blocks = static_cast<int>(cg::this_cluster().num_blocks());
  const int unit = static_cast<int>(blockIdx.x) / blocks;
  const BlockWork work = {unit / p.groups, unit % p.groups * kBlockHeads,
                          static_cast<int>(cg::this_cluster().block_rank())};
  if (threadIdx.x == 0) {
    s.barriers.Init();
    BarrierInit(&s.arrived, 1);
    FenceBarrierInit();
  }
  LetNextStart();
  __syncthreads();
  if (threadIdx.x >= kConsumerThreads) {
    FewerRegisters<kProducerRegisters>();
    WaitForPrevious();
    PrefetchStep(p, work.token);
    Entries entries;
    const BlockTiles tiles(p, work.token, work.rank, &entries);
    if (tiles.first == tiles.last) return;
    if constexpr (kFp8) {
      ProduceFp8(p, entries, tiles.first, tiles.last, s.ring, s.staged, s.barriers);
    } else {
      ProduceBf16(p, entries, tiles.first, tiles.last, s.ring, s.barriers);
    }
  } else {
    ConsumeRange(p, work, s);
  }
}

}  // namespace fathom::ops::cuda
