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

#include <type_traits>

#include "ops/sparse_attention/cuda_rows_finish.cuh"
#include "ops/sparse_attention/cuda_rows_produce.cuh"

namespace fathom::ops::cuda {

constexpr int kAttendRowsThreads = kConsumerThreads + kProducerThreads;
// Registers of a thread: 256 consumers and 256 producers share 64K.
__host__ __device__ constexpr int ConsumerRegisters(bool candidate) {
  return candidate ? 192 : 200;
}
__host__ __device__ constexpr int ProducerRegisters(bool candidate) {
  return candidate ? 64 : 56;
}

__host__ __device__ constexpr int TilesOf(int entries) {
  return (entries + kTileRows - 1) / kTileRows;
}
// A range costs a block as much time as three or four tiles, whatever it holds. Of three tiles it
// is the fastest for a single token (128 + 512 rows: 19.0 us, of five 23.2), of five for a large
// batch (128 tokens: 87.9 and 53.7) and for a prompt.
constexpr int kRangeTiles = 5;
__host__ __device__ constexpr int AttentionRanges(int tiles, int range_tiles, int max_ranges) {
  const int ranges = (tiles + range_tiles - 1) / range_tiles;
  return ranges < max_ranges ? ranges : max_ranges;
}

// At the beginning of dynamic shared memory, 1,024-byte aligned.
template <bool kCandidate>
struct AttendRowsShared {
  union {
    TileRing ring;
    // From the other ranges, once all tiles are read.
    HeadSums received[kBlockHeads + MaxRanges(kCandidate)];
  };
  union {
    char q[kTileBytes];
    HeadSums sums[kBlockHeads];  // of the range, once all scores are there
  };
  union {
    char weights[kPanelBytes];  // of the tile at hand [heads][rows], bf16, swizzled
    RangeFactors<kCandidate> factors[kBlockHeads / 2];  // of the block's heads, in the end
  };
  StagedCodes staged;
  float keep[kBlockHeads];                   // factors of the sums so far
  float max[kBlockHeads], sum[kBlockHeads];  // of the range's weights
  TileBarriers barriers;
  uint64_t arrived;  // what the other ranges send
};
static_assert(sizeof(HeadSums) * kBlockHeads % 1024 == 0);
template <bool kCandidate>
constexpr int kAttendRowsBytes = static_cast<int>(sizeof(AttendRowsShared<kCandidate>)) + 1024;
static_assert(kAttendRowsBytes<true> == kAttendRowsBytes<false>);

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

// A descriptor and those beside it, which differ in the low word alone: found anew each takes as
// many cycles as its product.
struct Descriptors {
  uint32_t low, high;

  __device__ explicit Descriptors(uint64_t first)
      : low(static_cast<uint32_t>(first)), high(static_cast<uint32_t>(first >> 32)) {}
  __device__ uint64_t At(uint32_t bytes) const { return uint64_t{high} << 32 | (low + bytes / 16); }
};

// Begins to compute the scores of 64 heads and rows.
template <bool kCandidate>
__device__ inline void BeginScores(float (&score)[32], uint32_t q, uint32_t keys) {
  WgmmaFence();
  if constexpr (kCandidate) {
    const Descriptors a(PanelDescriptor(q)), b(PanelDescriptor(keys));
    WgmmaBf16<false>(score, a.At(0), b.At(0));
#pragma unroll
    for (int k = 1; k < kHeadDim / 16; ++k) {
      const uint32_t at = k / 4 * kPanelBytes + k % 4 * 32;
      WgmmaBf16<true>(score, a.At(at), b.At(at));
    }
  } else {
    WgmmaBf16<false>(score, PanelDescriptor(q), PanelDescriptor(keys));
#pragma unroll
    for (int k = 1; k < kHeadDim / 16; ++k) {
      const uint32_t at = k / 4 * kPanelBytes + k % 4 * 32;
      WgmmaBf16<true>(score, PanelDescriptor(q + at), PanelDescriptor(keys + at));
    }
  }
  WgmmaCommit();
}

// Begins to add the weights of a tile times its rows, in the warpgroup's channels.
template <bool kCandidate>
__device__ inline void AddTile(Attended& a, uint32_t weights, uint32_t values) {
  WgmmaFence();
  if constexpr (kCandidate) {
    const Descriptors w(PanelDescriptor(weights)), v(PanelsDescriptor(values));
#pragma unroll
    for (int k = 0; k < kTileRows / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        WgmmaBf16Panels(a.acc[i], w.At(32 * k), v.At(2 * i * kPanelBytes + k * 16 * 128));
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < kTileRows / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        WgmmaBf16Panels(a.acc[i], PanelDescriptor(weights + 32 * k),
                        PanelsDescriptor(values + 2 * i * kPanelBytes + k * 16 * 128));
      }
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

// The first consuming warpgroup: scores, softmax and the lower channels' sums over tiles
// [first_tile, last_tile).
template <bool kCandidate>
__device__ inline void ConsumeScores(const Entries& entries, int first_tile, int last_tile,
                                     AttendRowsShared<kCandidate>& s, Attended& a, float (&max)[2],
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
    BeginScores<kCandidate>(score, q, keys);
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
    uint32_t words[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      // Scores 2i and 2i + 1 are of head + 8 (i % 2) and of rows 8 (i / 2) + 2 quad and the next.
      words[i] = Bf16Word(score[2 * i], score[2 * i + 1]);
      *reinterpret_cast<uint32_t*>(
          s.weights + SwizzledOffset(head + 8 * (i % 2), 16 * (i / 2) + 4 * quad)) = words[i];
    }
    if (quad == 0) {
      s.keep[head] = keep[0];
      s.keep[head + 8] = keep[1];
    }
    FenceForWgmma();
    ArriveWeights(kWeightsReady);
    if (!kCandidate || tile > first_tile) Rescale(a, keep);  // zeros before the first tile
    __syncwarp();  // a warp multiplies weights of its own heads only
    if constexpr (kCandidate) {
      AddTile(a, words, keys);
    } else {
      AddTile<kCandidate>(a, weights, keys);
    }
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
template <bool kCandidate>
__device__ inline void ConsumeValues(int first_tile, int last_tile, AttendRowsShared<kCandidate>& s,
                                     Attended& a) {
  const int head = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  const uint32_t weights = SharedAddress(s.weights);
#pragma unroll 1
  for (int tile = first_tile; tile < last_tile; ++tile) {
    const int stage = (tile - first_tile) % kStages, round = (tile - first_tile) / kStages;
    const uint32_t values = SharedAddress(s.ring.keys[stage]) + 4 * kPanelBytes;
    BarrierWait(&s.barriers.full[stage], round & 1);
    SyncWeights(kWeightsReady);
    if (!kCandidate || tile > first_tile) {
      const float keep[2] = {s.keep[head], s.keep[head + 8]};
      Rescale(a, keep);
    }
    AddTile<kCandidate>(a, weights, values);
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

// The same in two parts. A warp has eight heads in a row, four lanes a head: what follows finds the
// norms of all eight at once.
__device__ inline void AskForQueries(const AttentionParams& p, int32_t token, int first_head,
                                     char* to) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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

// To bf16, as float32: in one instruction.
__device__ inline float QuickRoundBf16(float x) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(x), "f"(0.0f));
  return __uint_as_float(word);
}

// 16 bf16 channels of a head, and where they lie.
struct QueryPart {
  uint4* at[2];

  __device__ QueryPart(char* panel, int head, int part)
      : at{reinterpret_cast<uint4*>(panel + SwizzledOffset(head, 32 * part)),
           reinterpret_cast<uint4*>(panel + SwizzledOffset(head, 32 * part + 16))} {}
  __device__ void Load(float (&v)[16]) const {
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
  }
  __device__ void Store(const float (&v)[16]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *at[i] = {Bf16Word(v[8 * i], v[8 * i + 1]), Bf16Word(v[8 * i + 2], v[8 * i + 3]),
                Bf16Word(v[8 * i + 4], v[8 * i + 5]), Bf16Word(v[8 * i + 6], v[8 * i + 7])};
    }
  }
};

// As norm_rope_insert does it, whose lane l has channels 16 l .. 16 l + 15 of a head and whose
// lanes add up by butterflies of 16, 8, 4, 2 and 1: a thread here stands for eight of those lanes,
// part + 0, 4 .. 28, one in every panel, and adds in the same order. table: of the thread's 16
// channels of the last panel.
__device__ inline void NormAndRotateParts(const float (&table)[16], char* q) {
  const int head = threadIdx.x / 4, part = threadIdx.x % 4;
  float of_pair = 0, of_four = 0, squares = 0;  // of two panels, of four, of all
  // Panels 0 and 4, 2 and 6, 1 and 5, 3 and 7.
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int panel = i / 2 + i % 2 * 2;
    float both[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float v[16];
      QueryPart(q + (panel + 4 * k) * kPanelBytes, head, part).Load(v);
      both[k] = 0.0f;
#pragma unroll
      for (int c = 0; c < 16; ++c) both[k] = __fmaf_rn(v[c], v[c], both[k]);
    }
    const float sum = __fadd_rn(both[0], both[1]);
    squares = __fadd_rn(of_four, __fadd_rn(of_pair, sum));  // counts in the last round
    if (i == 1) of_four = __fadd_rn(of_pair, sum);
    of_pair = sum;
  }
  squares = __fadd_rn(squares, __shfl_xor_sync(0xffffffffu, squares, 2));
  squares = __fadd_rn(squares, __shfl_xor_sync(0xffffffffu, squares, 1));
  const float r = 1.0f / sqrtf(squares / kHeadDim + kNormEps);
#pragma unroll 1
  for (int panel = 0; panel < kPanels - 1; ++panel) {
    const QueryPart of_head(q + panel * kPanelBytes, head, part);
    float v[16];
    of_head.Load(v);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = __fmul_rn(v[i], r);
    of_head.Store(v);
  }
  static_assert(kNopeDim == (kPanels - 1) * 64);
  const QueryPart of_head(q + (kPanels - 1) * kPanelBytes, head, part);
  float v[16];
  of_head.Load(v);
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const float c = table[i], s = table[i + 1];
    const float a = QuickRoundBf16(__fmul_rn(v[i], r)), b = QuickRoundBf16(__fmul_rn(v[i + 1], r));
    v[i] = __fmaf_rn(a, c, -__fmul_rn(b, s));
    v[i + 1] = __fmaf_rn(a, s, __fmul_rn(b, c));
  }
  of_head.Store(v);
}

__device__ inline void AwaitQueries(const AttentionParams& p, int32_t token, char* q) {
  float table[16];
  if (p.rope != nullptr) {
    const auto* from = reinterpret_cast<const std::byte*>(p.rope + int64_t{token} * kRopeDim +
                                                          threadIdx.x % 4 * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 four = LoadNow(from + 16 * i, true);
      table[4 * i] = __uint_as_float(four.x), table[4 * i + 1] = __uint_as_float(four.y);
      table[4 * i + 2] = __uint_as_float(four.z), table[4 * i + 3] = __uint_as_float(four.w);
    }
  }
  CopyAsyncWaitFor<0>();
  __syncwarp();
  if (p.rope != nullptr) NormAndRotateParts(table, q);
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

// The tiles of a block; none where the token is padding or has fewer ranges.
struct BlockTiles {
  int ranges = 0;
  int first = 0, last = 0;

  template <bool kCandidate>
  __device__ BlockTiles(const AttentionParams& p, int32_t token, int rank, Entries* entries,
                        std::bool_constant<kCandidate>) {
    if (!EntriesOf(p, token, entries)) return;
    const int tiles = TilesOf(entries->window + entries->compressed);
    if constexpr (kCandidate) {
      ranges = min(QuickDivide(tiles + p.range_tiles - 1, p.range_tiles), p.max_ranges);
      if (rank >= ranges) return;
      first = __shfl_sync(0xffffffffu, QuickDivide(tiles * rank, ranges), 0);
      last = __shfl_sync(0xffffffffu, QuickDivide(tiles * (rank + 1), ranges), 0);
      return;
    }
    ranges = AttentionRanges(tiles, kRangeTiles, MaxRanges(false));
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
template <bool kCandidate>
__device__ inline void ConsumeRange(const AttentionParams& p, const BlockWork& work,
                                    AttendRowsShared<kCandidate>& s) {
  MoreRegisters<ConsumerRegisters(kCandidate)>();
  WaitForPrevious();
  if constexpr (kCandidate) {
    // Before it is known what the token attends to: both come from memory.
    PrefetchStep(p, work.token, static_cast<int>(threadIdx.x));
    AskForQueries(p, work.token, work.first_head, s.q);
  }
  Entries entries;
  const BlockTiles tiles(p, work.token, work.rank, &entries, std::bool_constant<kCandidate>());
  if (tiles.first == tiles.last) {
    if constexpr (kCandidate) CopyAsyncWaitFor<0>();
    return;
  }
  if constexpr (kCandidate) {
    AwaitQueries(p, work.token, s.q);
  } else {
    LoadQueries(p, work.token, work.first_head, s.q);
  }
  const int lane = threadIdx.x % 32;
  const int head = threadIdx.x / 32 % 4 * 16 + lane / 4;
  if (threadIdx.x == 0 && tiles.ranges > 1) {
    const int heads = ShareBegin<kCandidate>(work.rank + 1, tiles.ranges) -
                      ShareBegin<kCandidate>(work.rank, tiles.ranges);
    BarrierArriveExpecting(&s.arrived,
                           static_cast<uint32_t>((tiles.ranges - 1) * heads * sizeof(HeadSums)));
  }
  FenceForWgmma();
  ConsumerBarrier();
  float sinks[2] = {};
  if constexpr (kCandidate) {
#pragma unroll
    for (int r = 0; r < 2; ++r) sinks[r] = SinkOf(p, work.first_head + head + 8 * r);
  }
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
  if (tiles.ranges > 1) ClusterArrive<kCandidate>();
  ConsumerBarrier();  // nobody reads queries any more
  const RangeStats stats = {s.max, s.sum};
  if (tiles.ranges == 1) {
    StoreRange<kCandidate>(p, work.token, work.first_head, stats, sinks, a, s.sums);
  } else {
    PackRange(stats, a, s.sums);
    MergeRanges<kCandidate>(p, work.token, work.first_head, tiles.ranges, work.rank, s.sums,
                            s.received, s.factors, &s.arrived);
  }
}

// grid: clusters of blocks, one per token and 64 heads; block r of a cluster is range r. The
// candidate's grid is (blocks of a cluster, groups of heads, tokens), so that nothing is divided.
template <bool kFp8, bool kCandidate>
__global__ void __launch_bounds__(kAttendRowsThreads, 1)
    AttendRows(const __grid_constant__ AttentionParams p) {
  extern __shared__ char memory[];
  auto& s = *reinterpret_cast<AttendRowsShared<kCandidate>*>(
      memory + (1024 - (SharedAddress(memory) & 1023u)) % 1024);
  namespace cg = cooperative_groups;
  BlockWork work;
  if constexpr (kCandidate) {
    work = {p.first_token + static_cast<int32_t>(blockIdx.z),
            static_cast<int>(blockIdx.y) * kBlockHeads, static_cast<int>(blockIdx.x)};
  } else {
    const auto blocks = static_cast<int>(cg::this_cluster().num_blocks());
    const int unit = static_cast<int>(blockIdx.x) / blocks;
    work = {unit / p.groups, unit % p.groups * kBlockHeads,
            static_cast<int>(cg::this_cluster().block_rank())};
  }
  if (threadIdx.x == 0) {
    s.barriers.Init();
    BarrierInit(&s.arrived, 1);
    FenceBarrierInit();
  }
  LetNextStart();
  __syncthreads();
  if (threadIdx.x >= kConsumerThreads) {
    FewerRegisters<ProducerRegisters(kCandidate)>();
    WaitForPrevious();
    if constexpr (!kCandidate) {
      PrefetchStep(p, work.token, static_cast<int>(threadIdx.x) - kConsumerThreads);
    }
    Entries entries;
    const BlockTiles tiles(p, work.token, work.rank, &entries, std::bool_constant<kCandidate>());
    if (tiles.first == tiles.last) return;
    if constexpr (!kFp8) {
      ProduceBf16<kCandidate>(p, entries, tiles.first, tiles.last, s.ring, s.barriers);
    } else if constexpr (kCandidate) {
      ProduceFp8Ahead(p, entries, tiles.first, tiles.last, s.ring, s.staged, s.barriers);
    } else {
      ProduceFp8(p, entries, tiles.first, tiles.last, s.ring, s.staged, s.barriers);
    }
  } else {
    ConsumeRange(p, work, s);
  }
}

}  // namespace fathom::ops::cuda
