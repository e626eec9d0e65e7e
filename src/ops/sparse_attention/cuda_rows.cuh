// Attention with up to 64 heads of a token on tensor cores: the product's kernel, for bf16 queries
// and rows of FP8 or bf16.
//
// A block of four warpgroups takes ranges of the token's entries, 64 entries at a time. Two
// warpgroups fetch rows and expand them to bf16 in shared memory, once for all heads, as keys and
// as values alike. Of the other two one computes scores and weights; then each adds up half of the
// channels. A range's result is rounded to float16 under scales of its own, and all ranges are
// added up in order. How many there are depends on the numbers of entries and heads alone, so that
// a token's result has the same bits in every step; how many blocks share them does not matter to
// them. A block that has all of them adds them up; otherwise a second launch does.
#pragma once

#include <cstddef>

#include "ops/sparse_attention/cuda_rows_finish.cuh"
#include "ops/sparse_attention/cuda_rows_produce.cuh"

namespace fathom::ops::cuda {

constexpr int kAttendRowsThreads = kConsumerThreads + kProducerThreads;
// Registers of a thread: 256 consumers and 256 producers share 64K.
constexpr int kConsumerRegisters = 192, kProducerRegisters = 64;

// At the beginning of dynamic shared memory, 1,024-byte aligned.
struct AttendRowsShared {
  TileRing ring;
  union {
    struct {
      char q[kTileBytes];
      float keep[2][kBlockHeads];  // factors of the sums so far, of tiles in turn
    };
    HeadResult results[kBlockHeads];  // of the token's only range, once all scores are there
  };
  char weights[kPanelBytes];  // of the tile at hand [heads][rows], bf16, swizzled
  StagedCodes staged;
  float sinks[kBlockHeads];
  float inverse[kBlockHeads];  // what the sums of a token's only range are multiplied by
  BlockWork work;
  TileBarriers barriers;
};
static_assert(sizeof(HeadResult) * kBlockHeads % 1024 == 0);
constexpr int kAttendRowsBytes = static_cast<int>(sizeof(AttendRowsShared)) + 1024;
static_assert(kAttendRowsBytes <= 227 * 1024);

// Between the warpgroup that computes the weights of a tile and the other one: the factors of the
// sums so far are there, the weights are, they are used. The one that waits synchronises, the other
// one only arrives.
__device__ inline void SyncWeights(int which) {
  asm volatile("bar.sync %0, 256;" ::"r"(which) : "memory");
}
__device__ inline void ArriveWeights(int which) {
  asm volatile("bar.arrive %0, 256;" ::"r"(which) : "memory");
}
constexpr int kWeightsReady = 2, kWeightsUsed = 3, kFactorsReady = 4;

// acc times keep (of heads g and g + 8), where it is not 1.
__device__ inline void Rescale(Attended& a, const float (&keep)[2]) {
  if (!__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 128; ++i) a.acc[i / 64][i % 64] *= keep[i / 2 % 2];
}

// A descriptor and those beside it, which differ in the low word alone: found anew each takes as
// many cycles as its product.
struct Descriptors {
  uint32_t low, high;

  __device__ explicit Descriptors(uint64_t first)
      : low(__shfl_sync(0xffffffffu, static_cast<uint32_t>(first), 0)),
        high(static_cast<uint32_t>(first >> 32)) {}
  __device__ uint64_t At(uint32_t bytes) const { return uint64_t{high} << 32 | (low + bytes / 16); }
};

// Begins to compute the scores of 64 heads and rows.
__device__ inline void BeginScores(float (&score)[32], uint32_t q, uint32_t keys) {
  WgmmaFence();
  const Descriptors a(PanelDescriptor(q)), b(PanelDescriptor(keys));
  WgmmaBf16<false>(score, a.At(0), b.At(0));
#pragma unroll
  for (int k = 1; k < kHeadDim / 16; ++k) {
    const uint32_t at = k / 4 * kPanelBytes + k % 4 * 32;
    WgmmaBf16<true>(score, a.At(at), b.At(at));
  }
  WgmmaCommit();
}

// Begins to add the weights of a tile times its rows, in the warpgroup's channels.
__device__ inline void AddTile(Attended& a, uint32_t weights, uint32_t values) {
  WgmmaFence();
  const Descriptors w(PanelDescriptor(weights)), v(PanelsDescriptor(values));
#pragma unroll
  for (int k = 0; k < kTileRows / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      WgmmaBf16Panels(a.acc[i], w.At(32 * k), v.At(2 * i * kPanelBytes + k * 16 * 128));
    }
  }
  WgmmaCommit();
}

// The same with the weights in registers: words 4k .. 4k + 3 of rows 16k .. 16k + 15.
__device__ inline void AddTile(Attended& a, const uint32_t (&weights)[16], uint32_t values) {
  WgmmaFence();
  const Descriptors v(PanelsDescriptor(values));
#pragma unroll
  for (int k = 0; k < kTileRows / 16; ++k) {
    const uint32_t four[4] = {weights[4 * k], weights[4 * k + 1], weights[4 * k + 2],
                              weights[4 * k + 3]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      WgmmaBf16Panels(a.acc[i], four, v.At(2 * i * kPanelBytes + k * 16 * 128));
    }
  }
  WgmmaCommit();
}

__device__ inline void Clear(Attended& a) {
#pragma unroll
  for (int i = 0; i < 128; ++i) asm volatile("mov.b32 %0, 0;" : "=f"(a.acc[i / 64][i % 64]));
}

// The first consuming warpgroup: scores, softmax and the lower channels' sums over the block's
// ranges of a token. Ranges but the last one go to memory; the last one's results are left in `a`
// and returned.
__device__ inline RangeStats ConsumeScores(const AttentionParams& p, AttendRowsShared& s,
                                           Attended& a) {
  constexpr float kLog2e = 1.4426950408889634f;
  constexpr float kScale = kScoreScale * kLog2e;
  const uint32_t q = SharedAddress(s.q);
  int tiles = 0;
  RangeStats stats;
#pragma unroll 1
  for (int range = ReadWork(s.work).ranges.first;; ++range) {
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    Clear(a);
    const BlockRanges b = ReadWork(s.work).ranges;
    const int begin = b.FirstTile(range), end = b.FirstTile(range + 1);
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      const int stage = tiles % kStages;
      const uint32_t keys = SharedAddress(s.ring.keys[stage]);
      BarrierWait(&s.barriers.full[stage], tiles++ / kStages & 1);
      float score[32];  // rows 8j + 2 quad and the next: at 4j, of head + 8 two on
      BeginScores(score, q, keys);
      WgmmaWait<0>();

      const int thread = ThreadNow(), quad = thread % 4;
      const int head = thread / 32 * 16 + thread % 32 / 4;  // and head + 8
      const int count = b.entries - tile * kTileRows;
      if (count < kTileRows) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          if (i / 4 * 8 + i % 2 >= count - 2 * quad) score[i] = -INFINITY;
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
      }
      if (tile > begin) {  // the other warpgroup multiplies while this one computes weights
        if (quad == 0) {
          s.keep[stage][head] = keep[0];
          s.keep[stage][head + 8] = keep[1];
        }
        ArriveWeights(kFactorsReady);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
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
      if (tiles > 1) SyncWeights(kWeightsUsed);
      uint32_t words[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        // Scores 2i and 2i + 1 are of head + 8 (i % 2) and of rows 8 (i / 2) + 2 quad and the next.
        words[i] = Bf16Word(score[2 * i], score[2 * i + 1]);
        *reinterpret_cast<uint32_t*>(
            s.weights + SwizzledOffset(head + 8 * (i % 2), 16 * (i / 2) + 4 * quad)) = words[i];
      }
      FenceForWgmma();
      ArriveWeights(kWeightsReady);
      if (tile > begin) Rescale(a, keep);  // zeros before the first tile
      AddTile(a, words, keys);
      WgmmaWait<0>();
      WarpArrive(&s.barriers.empty[stage]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
      sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
      stats.max[r] = max[r];
      stats.sum[r] = sum[r];
    }
    if (range + 1 == ReadWork(s.work).ranges.last) break;
    PackRange(stats, a, KeptOf(p, range));
  }
  return stats;
}

// The second one: the upper channels' sums.
__device__ inline void ConsumeValues(const AttentionParams& p, AttendRowsShared& s, Attended& a) {
  const int thread = ThreadNow();
  const int head = thread / 32 % 4 * 16 + thread % 32 / 4;
  const uint32_t weights = SharedAddress(s.weights);
  int tiles = 0;
#pragma unroll 1
  for (int range = ReadWork(s.work).ranges.first;; ++range) {
    Clear(a);
    const BlockRanges b = ReadWork(s.work).ranges;
    const int begin = b.FirstTile(range), end = b.FirstTile(range + 1);
    const bool last_range = range + 1 == b.last;
#pragma unroll 1
    for (int tile = begin; tile < end; ++tile) {
      const int stage = tiles % kStages;
      const uint32_t values = SharedAddress(s.ring.keys[stage]) + 4 * kPanelBytes;
      BarrierWait(&s.barriers.full[stage], tiles++ / kStages & 1);
      if (tile > begin) {
        SyncWeights(kFactorsReady);
        const float keep[2] = {s.keep[stage][head], s.keep[stage][head + 8]};
        Rescale(a, keep);
      }
      SyncWeights(kWeightsReady);
      AddTile(a, weights, values);
      WgmmaWait<0>();
      WarpArrive(&s.barriers.empty[stage]);
      if (tile + 1 < end || !last_range) ArriveWeights(kWeightsUsed);
    }
    if (last_range) break;
    PackRange(RangeStats{}, a, KeptOf(p, range));
  }
}

// Asks for the token's queries as panels, a warp's eight heads; zeros beyond the last head.
__device__ inline void AskForQueries(const AttentionParams& p, int32_t token, int first_head,
                                     char* to) {
  const int thread = ThreadNow();
  const int warp = thread / 32, lane = thread % 32;
  const auto* q = static_cast<const __nv_bfloat16*>(p.q) + token * p.q_stride;
#pragma unroll 2
  for (int i = 0; i < 8; ++i) {
    const int head = 8 * warp + i;
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
}

// What the walk to the rows reads one after the other comes into L2 at once; in decode a token's
// index is its sequence's. i: of 256 threads.
__device__ inline void PrefetchStep(const AttentionParams& p, int32_t token, int i) {
  const int sequence = min(token, p.step.num_sequences - 1);
  if (32 * i < p.heads) PrefetchToL2(p.sink + 32 * i);
  if (p.selected != nullptr && 32 * i < p.top_k) {
    PrefetchToL2(p.selected + int64_t{token} * p.top_k + 32 * i);
  }
  if (p.compressed.base != nullptr && i >= 128 && 32 * (i - 128) < p.step.max_blocks) {
    PrefetchToL2(p.step.block_table + int64_t{sequence} * p.step.max_blocks + 32 * (i - 128));
  }
}

// One token's ranges, for the two consuming warpgroups.
__device__ inline void ConsumeToken(const AttentionParams& p, int32_t token, int first_head,
                                    int block, AttendRowsShared& s) {
  const int thread = ThreadNow();
  // Before it is known what the token attends to: both come from memory.
  PrefetchStep(p, token, thread);
  AskForQueries(p, token, first_head, s.q);
  {
    Entries entries;
    const BlockRanges b(p, token, block, &entries);
    if (b.None()) {
      CopyAsyncWaitFor<0>();
      return;
    }
    if (thread == 0) s.work = {token, first_head, b};
  }
  if (thread < kBlockHeads) {
    s.sinks[thread] = __ldg(p.sink + min(first_head + thread, p.heads - 1));
  }
  CopyAsyncWaitFor<0>();
  FenceForWgmma();
  ConsumerBarrier();
  Attended a;
  RangeStats stats = {};
  const bool first_group = __shfl_sync(0xffffffffu, thread / 128, 0) == 0;
  if (first_group) {
    stats = ConsumeScores(p, s, a);
  } else {
    ConsumeValues(p, s, a);
  }
  const BlockWork work = ReadWork(s.work);
  const int head = thread / 32 % 4 * 16 + thread % 32 / 4;
  if (work.ranges.ranges == 1) {
    if (first_group && thread % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int of = head + 8 * r;
        s.inverse[of] = InverseOfSum(stats.max[r], stats.sum[r], s.sinks[of]);
      }
    }
    ConsumerBarrier();
    const float inverse[2] = {s.inverse[head], s.inverse[head + 8]};
    StoreRange(p, work.token, work.first_head, inverse, a, s.results);
    return;
  }
  PackRange(stats, a, KeptOf(p, work.ranges.last - 1));
  if (work.ranges.blocks > 1) return;
  __syncthreads();  // the ranges are in memory, and nobody reads tiles and queries any more
  MergeKeptRanges(p, work, s.sinks, reinterpret_cast<KeptUnit*>(s.ring.keys));
}

// grid (blocks of a token, groups of 64 heads, tokens).
template <bool kFp8>
__global__ void __launch_bounds__(kAttendRowsThreads, 1)
    AttendRows(const __grid_constant__ AttentionParams p) {
  extern __shared__ char memory[];
  auto& s = *reinterpret_cast<AttendRowsShared*>(memory +
                                                 (1024 - (SharedAddress(memory) & 1023u)) % 1024);
  const int32_t token = p.first_token + static_cast<int32_t>(blockIdx.z);
  const auto block = static_cast<int>(blockIdx.x);
  if (threadIdx.x == 0) {
    s.barriers.Init();
    FenceBarrierInit();
  }
  LetNextStart();
  __syncthreads();
  if (threadIdx.x >= kConsumerThreads) {
    FewerRegisters<kProducerRegisters>();
    WaitForPrevious();
    Entries entries;
    const BlockRanges b(p, token, block, &entries);
    if (b.None()) return;
    const int begin = b.FirstTile(b.first), end = b.FirstTile(b.last);
    if constexpr (kFp8) {
      ProduceFp8(p, entries, begin, end, s.ring, s.staged, s.barriers);
    } else {
      ProduceBf16(p, entries, begin, end, s.ring, s.barriers);
    }
    if (b.blocks == 1 && b.ranges > 1) __syncthreads();  // the tiles' place is used again
  } else {
    MoreRegisters<kConsumerRegisters>();
    WaitForPrevious();
    ConsumeToken(p, token, static_cast<int>(blockIdx.y) * kBlockHeads, block, s);
  }
}

}  // namespace fathom::ops::cuda
