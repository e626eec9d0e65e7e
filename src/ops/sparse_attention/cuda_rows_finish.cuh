// The end of a token in AttendRows (cuda_rows.cuh): sums of ranges become its result. The only
// range of a token stores it. Several go to memory, where L2 keeps them, and are added up in order
// by the block, if it has them all, or by a launch of its own.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/hopper.cuh"
#include "ops/sparse_attention/cuda_rows_produce.cuh"

namespace fathom::ops::cuda {

constexpr int kBlockHeads = 64;
// A token of up to three tiles of 64 entries is one range, others have ranges of two tiles. Two
// groups of heads fill the device sooner: with them ranges of more than twelve tiles have three.
// Ranges get longer where they would be more than 20. Short ranges are for one token, long ones,
// which keep less, for many.
constexpr int kMaxRanges = 20;
__host__ __device__ constexpr int TilesOf(int entries) {
  return (entries + kTileRows - 1) / kTileRows;
}
__host__ __device__ constexpr int AttentionRanges(int tiles, int groups) {
  if (tiles <= 3) return 1;
  const int ranges = groups > 1 && tiles > 12 ? (tiles + 2) / 3 : (tiles + 1) / 2;
  return ranges < kMaxRanges ? ranges : kMaxRanges;
}

// A head's result on its way to memory.
struct alignas(16) HeadResult {
  uint4 channels[kHeadDim / 8];  // bf16
  uint4 padding;                 // no bank conflicts between heads
};
// A range's result in memory, by units of 8 heads and half of their channels: unit 2 h + g is of
// heads 8 h .. 8 h + 7 and channels 256 g and on. Lane 4 of_unit + q of four f there holds the
// pairs of channels 32 f + 8 t + 2 q and the next, t = 0 .. 3, of head of_unit: what a thread of
// the products has, so that a warp stores whole lines.
constexpr int kUnitHeads = 8, kUnits = 2 * kBlockHeads / kUnitHeads, kUnitFours = kHeadDim / 2 / 32;
struct KeptUnit {
  uint4 channels[kUnitFours][32];  // float16
};
struct alignas(128) KeptRange {
  KeptUnit units[kUnits];
  float4 stats[kBlockHeads];  // maximum, sum, scale of the lower and of the upper channels
};

// One consuming warpgroup's state: heads g and g + 8 of its warp's 16, channels of four panels.
struct Attended {
  float acc[2][64];  // of panel i, columns 8j + 2 quad and the next: at 32 i + 4 j, of head g + 8
                     // two on
};

// Of a range's weights, of heads g and g + 8: the maximum of the scores, times log2(e), under which
// they were taken, and their sum. Known to the first consuming warpgroup.
struct RangeStats {
  float max[2], sum[2];
};

// What a head's ranges are multiplied by, in the lower and in the upper half of the channels.
using HeadFactors = float2[kMaxRanges];

// threadIdx.x, read here and now: what follows from it is not kept in registers through the loops
// over ranges and tiles, where sums need them.
__device__ inline int ThreadNow() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// A barrier of the two consuming warpgroups.
__device__ inline void ConsumerBarrier() {
  asm volatile("bar.sync 1, 256;" ::: "memory");
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

// The ranges of a token that a block works on; none where the token is padding or has fewer ranges
// than blocks.
struct BlockRanges {
  int entries = 0, tiles = 0, ranges = 0;  // of the token
  int blocks = 0;                          // that have ranges of it
  int first = 0, last = 0;                 // ranges [first, last)

  BlockRanges() = default;
  __device__ BlockRanges(const AttentionParams& p, int32_t token, int block, Entries* of_token) {
    if (!EntriesOf(p, token, of_token)) return;
    entries = of_token->window + of_token->compressed;
    tiles = TilesOf(entries);
    ranges = AttentionRanges(tiles, p.groups);
    blocks = min(p.blocks, ranges);
    if (block >= blocks) return;
    first = FirstRange(block);
    last = FirstRange(block + 1);
  }
  __device__ bool None() const { return first == last; }
  __device__ int FirstRange(int block) const { return QuickDivide(ranges * block, blocks); }
  // The compiler learns that all lanes agree.
  __device__ int FirstTile(int range) const {
    return __shfl_sync(0xffffffffu, QuickDivide(tiles * range, ranges), 0);
  }
};

// What a block works on, kept in shared memory: the consumers' registers are full of sums.
struct BlockWork {
  int32_t token;
  int first_head;
  BlockRanges ranges;
};
static_assert(sizeof(BlockWork) == 32);
// Read anew, whatever the compiler remembers of it.
__device__ inline BlockWork ReadWork(const BlockWork& work) {
  int words[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    asm volatile("ld.shared.u32 %0, [%1];"
                 : "=r"(words[i])
                 : "r"(SharedAddress(&work) + 4 * i)
                 : "memory");
  }
  BlockWork read;
  read.token = words[0], read.first_head = words[1];
  BlockRanges& b = read.ranges;
  b.entries = words[2], b.tiles = words[3], b.ranges = words[4], b.blocks = words[5];
  b.first = words[6], b.last = words[7];
  return read;
}
// Where a range goes when a token has several.
__device__ inline KeptRange& KeptOf(const AttentionParams& p, int range) {
  const auto token = static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y);  // and heads
  return static_cast<KeptRange*>(p.kept)[token * p.max_ranges + range];
}

// Word t of lane q of four becomes word q of lane t.
__device__ inline void TransposeOfFour(uint32_t (&w)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? w[i] : w[i + 2], 2);
    (upper ? w[i] : w[i + 2]) = other;
  }
}

// Stores a head's channels 8 piece and the next seven, where there is that head; in one store,
// which the compiler would cut into four.
__device__ inline void StorePiece(const AttentionParams& p, int32_t token, int head, int piece,
                                  const uint4& words) {
  if (head >= p.heads) return;
  const auto* to =
      static_cast<const __nv_bfloat16*>(p.out) + token * p.out_stride + head * kHeadDim + 8 * piece;
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}

// Stores the result of a token's only range, by way of `results`, where channels lie in their
// order. inverse: InverseOfSum of heads g and g + 8 of the warp's 16.
__device__ inline void StoreRange(const AttentionParams& p, int32_t token, int first_head,
                                  const float (&inverse)[2], const Attended& a,
                                  HeadResult* results) {
  const int thread = ThreadNow();
  const int lane = thread % 32, group = thread / 128;
  const int first = thread / 32 % 4 * 16;  // of the warp
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    auto* const words =
        reinterpret_cast<uint32_t*>(results[first + lane / 4 + 8 * r].channels + 32 * group) +
        lane % 4;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float* at = &a.acc[j / 16][4 * (j % 16) + 2 * r];
      words[4 * j] = Bf16Word(at[0] * inverse[r], at[1] * inverse[r]);
    }
  }
  __syncwarp();
#pragma unroll 2
  for (int i = 0; i < 16; ++i) {
    StorePiece(p, token, first_head + first + i, 32 * group + lane,
               results[first + i].channels[32 * group + lane]);
  }
}

// A range's sums, as float16 under a power of two of each head's half of the channels: what is lost
// is an eighth of what rounding the result to bf16 loses.
__device__ inline void PackRange(const RangeStats& of, const Attended& a, KeptRange& kept) {
  const int thread = ThreadNow();
  const int lane = thread % 32, group = thread / 128;
  uint4* const to = &kept.units[thread / 32 % 4 * 4 + group].channels[0][lane];
  float most[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 128; i += 2) {
    const float* at = &a.acc[i / 64][i % 64];
    most[i / 2 % 2] = fmaxf(most[i / 2 % 2], fmaxf(fabsf(at[0]), fabsf(at[1])));
  }
#pragma unroll
  for (int offset = 1; offset <= 2; offset *= 2) {
#pragma unroll
    for (float& m : most) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, offset));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // The largest becomes 2^14 at least, less than 2^15.
    const int exponent = max(static_cast<int>(__float_as_uint(most[r]) >> 23), 32) - 14;
    const float factor = __uint_as_float(static_cast<uint32_t>(254 - exponent) << 23);
#pragma unroll
    for (int four = 0; four < kUnitFours; ++four) {
      uint32_t words[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float* at = &a.acc[four / 4][16 * (four % 4) + 4 * t + 2 * r];
        const __half2 pair = __floats2half2_rn(at[0] * factor, at[1] * factor);
        words[t] = *reinterpret_cast<const uint32_t*>(&pair);
      }
      to[(2 * r * kUnitFours + four) * 32] = {words[0], words[1], words[2], words[3]};
    }
    if (lane % 4 == 0) {
      float* const stats = &kept.stats[thread / 32 % 4 * 16 + lane / 4 + 8 * r].x;
      stats[2 + group] = __uint_as_float(static_cast<uint32_t>(exponent) << 23);
      if (group == 0) {
        stats[0] = of.max[r];
        stats[1] = of.sum[r];
      }
    }
  }
}

// Finds the factors of `count` heads, those of kAtOnce passes over the threads beside each other.
// stats(range, head): a range's maximum, sum and scales of one; sinks: theirs.
template <int kAtOnce, class Stats>
__device__ inline void FindFactors(const float* sinks, int count, int ranges, const Stats& stats,
                                   HeadFactors* factors) {
  const int thread = ThreadNow();
  // Eight lanes find the factors of a head's ranges, of more ranges sixteen or a warp.
  const int lanes = ranges <= 8 ? 8 : ranges <= 16 ? 16 : 32;
  const int range = thread & (lanes - 1);
  const int heads_a_pass = kConsumerThreads / lanes;
#pragma unroll 1
  for (int first = thread / lanes; first - thread / lanes < count;
       first += kAtOnce * heads_a_pass) {
    float4 of[kAtOnce];  // max, sum, scales
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int head = first + i * heads_a_pass;
      of[i] = {-INFINITY, 0, 0, 0};
      if (head < count && range < ranges) of[i] = stats(range, head);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int head = first + i * heads_a_pass;
      const bool real = head < count && range < ranges;
      const float sink = real ? sinks[head] : 0.0f;
      float most = GroupMax(of[i].x, 8);
      if (lanes > 8) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 8));
      if (lanes > 16) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 16));
      const float weight = real ? Exp2(of[i].x - most) : 0.0f;
      float all = real ? of[i].y * weight : 0.0f;
      if (lanes > 16) all += __shfl_xor_sync(0xffffffffu, all, 16);
      if (lanes > 8) all += __shfl_xor_sync(0xffffffffu, all, 8);
#pragma unroll
      for (int offset = 4; offset > 0; offset /= 2) {
        all += __shfl_xor_sync(0xffffffffu, all, offset);
      }
      if (real) {
        const float factor = weight * InverseOfSum(most, all, sink);
        factors[head][range] = {factor * of[i].z, factor * of[i].w};
      }
    }
  }
}

// Adds up `ranges` ranges of a head's eight channels of a piece. at(i): what range i has.
template <class At>
__device__ inline uint4 AddPiece(int ranges, int piece, const float2* factors, const At& at) {
  float total[8] = {};
#pragma unroll 4
  for (int i = 0; i < ranges; ++i) {
    const float factor = piece < 32 ? factors[i].x : factors[i].y;
    const uint4 words = at(i);
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 v = __half22float2(*reinterpret_cast<const __half2*>(&pairs[k]));
      total[2 * k] = __fmaf_rn(v.x, factor, total[2 * k]);
      total[2 * k + 1] = __fmaf_rn(v.y, factor, total[2 * k + 1]);
    }
  }
  return {Bf16Word(total[0], total[1]), Bf16Word(total[2], total[3]), Bf16Word(total[4], total[5]),
          Bf16Word(total[6], total[7])};
}

// Stores a piece whose channels are in the order of ranges in memory; a quad's lanes have four
// pieces in a row.
__device__ inline void StoreKeptPiece(const AttentionParams& p, int32_t token, int head, int piece,
                                      const uint4& words) {
  uint32_t out[4] = {words.x, words.y, words.z, words.w};
  TransposeOfFour(out);
  StorePiece(p, token, head, piece, {out[0], out[1], out[2], out[3]});
}

// Adds up a unit, a thread four pairs, and stores its result. factors: of the unit's heads.
__device__ inline void AddUnit(const AttentionParams& p, int32_t token, int first_head, int unit,
                               int ranges, const KeptUnit* kept, const HeadFactors* factors) {
  static_assert(kUnitFours * 32 == kConsumerThreads);
  const int thread = ThreadNow(), four = thread / 32, lane = thread % 32;
  const int piece = unit % 2 * 32 + 4 * four + lane % 4;
  StoreKeptPiece(p, token, first_head + lane / 4, piece,
                 AddPiece(ranges, piece, factors[lane / 4],
                          [&](int i) { return kept[i].channels[four][lane]; }));
}

// Where a block adds up ranges there is room for the factors and so many units over the tiles' ring
// and the queries, once both are read.
constexpr int kFactorUnits =
    (kBlockHeads * sizeof(HeadFactors) + sizeof(KeptUnit) - 1) / sizeof(KeptUnit);
constexpr int kRoomUnits = (sizeof(TileRing) + kTileBytes) / sizeof(KeptUnit) - kFactorUnits;

// Adds up the ranges of a token, all of them this block's and in memory, unit by unit; kSlots of
// them are on their way, each thread's part by its own copies.
template <int kSlots>
__device__ inline void AddUnits(const AttentionParams& p, const BlockWork& work, const float* sinks,
                                KeptUnit* room) {
  const int ranges = work.ranges.ranges, thread = ThreadNow();
  auto* const factors = reinterpret_cast<HeadFactors*>(room);
  room += kFactorUnits;
  const KeptRange* const first = &KeptOf(p, 0);
  const auto ask = [&](int unit) {
    if (unit < kUnits) {
      const auto* from = reinterpret_cast<const std::byte*>(first->units + unit) + 16 * thread;
      uint32_t to = SharedAddress(room + unit % kSlots * ranges) + 16 * thread;
#pragma unroll 1
      for (int i = 0; i < ranges; ++i, from += sizeof(KeptRange), to += sizeof(KeptUnit)) {
        CopyAsync16(to, from);
      }
    }
    CopyAsyncCommit();
  };
#pragma unroll 1
  for (int unit = 0; unit < kSlots; ++unit) ask(unit);
  FindFactors<4>(
      sinks, kBlockHeads, ranges, [&](int range, int head) { return KeptOf(p, range).stats[head]; },
      factors);
  ConsumerBarrier();
#pragma unroll 1
  for (int unit = 0; unit < kUnits; ++unit) {
    CopyAsyncWaitFor<kSlots - 1>();
    const int head = unit / 2 * kUnitHeads;
    AddUnit(p, work.token, work.first_head + head, unit, ranges, room + unit % kSlots * ranges,
            factors + head);
    ask(unit + kSlots);
  }
}
__device__ inline void MergeKeptRanges(const AttentionParams& p, const BlockWork& work,
                                       const float* sinks, KeptUnit* room) {
  constexpr int kFew = 4, kMany = 2;
  static_assert(kMany * kMaxRanges <= kRoomUnits);
  if (kFew * work.ranges.ranges <= kRoomUnits) {
    AddUnits<kFew>(p, work, sinks, room);
  } else {
    AddUnits<kMany>(p, work, sinks, room);
  }
}

// The same as a kernel of its own, where several blocks have ranges of a token: a block adds up a
// unit.
struct MergeApartShared {
  KeptUnit kept[kMaxRanges];
  float4 stats[kMaxRanges][kUnitHeads];
  HeadFactors factors[kUnitHeads];
  float sinks[kUnitHeads];
  uint64_t ready;
};

// grid (kUnits, groups of 64 heads, tokens).
__global__ void __launch_bounds__(kConsumerThreads)
    MergeApart(const __grid_constant__ AttentionParams p) {
  auto& s = SharedOf<MergeApartShared>();
  const int32_t token = p.first_token + static_cast<int32_t>(blockIdx.z);
  const auto unit = static_cast<int>(blockIdx.x);
  const int of_group = unit / 2 * kUnitHeads;
  const int first_head = static_cast<int>(blockIdx.y) * kBlockHeads + of_group;
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    BarrierInit(&s.ready, 1);
    FenceBarrierInit();
  }
  if (thread < kUnitHeads) s.sinks[thread] = __ldg(p.sink + min(first_head + thread, p.heads - 1));
  LetNextStart();
  __syncthreads();
  WaitForPrevious();
  if (first_head >= p.heads) return;
  const auto ask = [&](int ranges) {
    if (thread >= 32) return;
    asm volatile("fence.proxy.async.global;" ::: "memory");
    if (thread == 0) {
      BarrierArriveExpecting(&s.ready,
                             ranges * static_cast<uint32_t>(sizeof(KeptUnit) + sizeof(s.stats[0])));
    }
    __syncwarp();
    if (thread >= ranges) return;
    const KeptRange& from = KeptOf(p, thread);
    CopyBulk(s.stats[thread], from.stats + of_group, sizeof(s.stats[0]), &s.ready);
    CopyBulk(s.kept + thread, &from.units[unit], sizeof(KeptUnit), &s.ready);
  };
  // Ranges of few tokens are on their way before it is known how many there are.
  if (p.eager) ask(p.max_ranges);
  Entries entries;
  const int ranges = BlockRanges(p, token, 0, &entries).ranges;
  if (!p.eager && ranges > 1) ask(ranges);
  if (p.eager || ranges > 1) BarrierWait(&s.ready, 0);
  if (ranges <= 1) return;
  FindFactors<1>(
      s.sinks, kUnitHeads, ranges, [&](int range, int head) { return s.stats[range][head]; },
      s.factors);
  __syncthreads();
  AddUnit(p, token, first_head, unit, ranges, s.kept, s.factors);
}

}  // namespace fathom::ops::cuda
