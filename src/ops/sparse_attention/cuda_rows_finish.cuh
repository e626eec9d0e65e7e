// The end of a token in AttendRows (cuda_rows.cuh): sums of ranges become its result. The only
// range of a token stores it. Several that are a block each send each other shares of the heads and
// add them up in order; where blocks have several or are no cluster, ranges go to memory, where L2
// keeps them.
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
constexpr int kMaxRanges = 20, kMaxCluster = 16;
__host__ __device__ constexpr int TilesOf(int entries) {
  return (entries + kTileRows - 1) / kTileRows;
}
__host__ __device__ constexpr int AttentionRanges(int tiles, int groups) {
  if (tiles <= 3) return 1;
  const int ranges = groups > 1 && tiles > 12 ? (tiles + 2) / 3 : (tiles + 1) / 2;
  return ranges < kMaxRanges ? ranges : kMaxRanges;
}

// A range's result of a head, for another block.
struct HeadSums {
  uint4 channels[kHeadDim / 8];  // float16
  float max, sum;
  float scale[2];  // of the lower and of the upper half of the channels
};
static_assert(sizeof(HeadSums) == 2 * kHeadDim + 16);  // no bank conflicts between heads
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
  float4 stats[kBlockHeads];  // maximum, sum, scales, as of HeadSums
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
// Of the consumers of all blocks of the cluster. Publishing what was written before waits for the
// whole device's memory: relaxed where it is only to be said that reads are over, and what blocks
// send each other is counted by a barrier of its own.
__device__ inline void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ inline void ClusterArriveRelaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
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

// The ranges of a token that a block works on; none where the token is padding or has fewer ranges
// than blocks.
struct BlockRanges {
  int entries = 0, tiles = 0, ranges = 0;  // of the token
  int blocks = 0, rank = 0;                // that have ranges of it, and which of them this is
  int first = 0, last = 0;                 // ranges [first, last)

  BlockRanges() = default;
  __device__ BlockRanges(const AttentionParams& p, int32_t token, int block, Entries* of_token) {
    if (!EntriesOf(p, token, of_token)) return;
    entries = of_token->window + of_token->compressed;
    tiles = TilesOf(entries);
    ranges = AttentionRanges(tiles, p.groups);
    blocks = min(p.blocks, ranges);
    if (block >= blocks) return;
    rank = block;
    first = FirstRange(rank);
    last = FirstRange(rank + 1);
  }
  __device__ bool None() const { return first == last; }
  __device__ int FirstRange(int block) const { return QuickDivide(ranges * block, blocks); }
  // The compiler learns that all lanes agree.
  __device__ int FirstTile(int range) const {
    return __shfl_sync(0xffffffffu, QuickDivide(tiles * range, ranges), 0);
  }
  // Heads [ShareBegin(b), ShareBegin(b + 1)) are added up by block b.
  __device__ int ShareBegin(int block) const { return QuickDivide(kBlockHeads * block, blocks); }
  // The block of a range.
  __device__ int BlockOfRange(int range) const {
    return QuickDivide(blocks * (range + 1) + ranges - 1, ranges) - 1;
  }
};

// What a block works on, kept in shared memory: the consumers' registers are full of sums.
struct BlockWork {
  int32_t token;
  int first_head;
  int block;  // of the token's cluster
  BlockRanges ranges;
};
static_assert(sizeof(BlockWork) == 40);
// Read anew, whatever the compiler remembers of it.
__device__ inline BlockWork ReadWork(const BlockWork& work) {
  int words[10];
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    asm volatile("ld.shared.u32 %0, [%1];"
                 : "=r"(words[i])
                 : "r"(SharedAddress(&work) + 4 * i)
                 : "memory");
  }
  BlockWork read;
  read.token = words[0], read.first_head = words[1], read.block = words[2];
  BlockRanges& b = read.ranges;
  b.entries = words[3], b.tiles = words[4], b.ranges = words[5], b.blocks = words[6];
  b.rank = words[7], b.first = words[8], b.last = words[9];
  return read;
}
// Where a range goes when blocks have several.
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

// Stores the result of a token's only range, by way of `sums`, where channels lie in their order.
// inverse: InverseOfSum of heads g and g + 8 of the warp's 16.
__device__ inline void StoreRange(const AttentionParams& p, int32_t token, int first_head,
                                  const float (&inverse)[2], const Attended& a, HeadSums* sums) {
  const int thread = ThreadNow();
  const int lane = thread % 32, group = thread / 128;
  const int first = thread / 32 % 4 * 16;  // of the warp
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    auto* const words =
        reinterpret_cast<uint32_t*>(sums[first + lane / 4 + 8 * r].channels + 32 * group) +
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
               sums[first + i].channels[32 * group + lane]);
  }
}

// A range's sums of a head's half of the channels, as float16 under a power of two of their own:
// what is lost is an eighth of what rounding the result to bf16 loses. channels(r, four, words):
// takes pairs 4 four .. 4 four + 3 that the thread has of its head r of two; stats(head, i, value):
// the head's maximum, sum and scales.
template <class Channels, class Stats>
__device__ inline void PackRange(const RangeStats& of, const Attended& a, const Channels& channels,
                                 const Stats& stats) {
  const int thread = ThreadNow();
  const int lane = thread % 32, group = thread / 128;
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
      channels(r, four, words);
    }
    if (lane % 4 == 0) {
      const int head = thread / 32 % 4 * 16 + lane / 4 + 8 * r;
      stats(head, 2 + group, __uint_as_float(static_cast<uint32_t>(exponent) << 23));
      if (group == 0) {
        stats(head, 0, of.max[r]);
        stats(head, 1, of.sum[r]);
      }
    }
  }
}
__device__ inline void PackRange(const RangeStats& of, const Attended& a, HeadSums* sums) {
  const int thread = ThreadNow(), lane = thread % 32;
  // Of the thread's first head and pair.
  auto* const to = reinterpret_cast<uint32_t*>(sums[thread / 32 % 4 * 16 + lane / 4].channels +
                                               32 * (thread / 128)) +
                   lane % 4;
  PackRange(
      of, a,
      [&](int r, int four, const uint32_t(&words)[4]) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          to[8 * r * int{sizeof(HeadSums) / 4} + 16 * four + 4 * t] = words[t];
        }
      },
      [&](int head, int i, float value) { (&sums[head].max)[i] = value; });
}
__device__ inline void PackRange(const RangeStats& of, const Attended& a, KeptRange& kept) {
  const int thread = ThreadNow();
  uint4* const to = &kept.units[thread / 32 % 4 * 4 + thread / 128].channels[0][thread % 32];
  PackRange(
      of, a,
      [&](int r, int four, const uint32_t(&words)[4]) {
        to[(2 * r * kUnitFours + four) * 32] = {words[0], words[1], words[2], words[3]};
      },
      [&](int head, int i, float value) { (&kept.stats[head].x)[i] = value; });
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

// What the blocks of a token share its heads by: heads [begin, begin + count) are this one's.
struct Share {
  int begin, count;

  __device__ explicit Share(const BlockRanges& b)
      : begin(b.ShareBegin(b.rank)), count(b.ShareBegin(b.rank + 1) - begin) {}
};

// Sends the other blocks of the token their shares of the block's last range, and waits for theirs.
// It has arrived at the cluster's barrier after it read its tiles.
__device__ inline void ExchangeRanges(const BlockRanges& b, const HeadSums* sums,
                                      HeadSums* received, uint64_t* arrived) {
  const int thread = ThreadNow();
  ClusterWait();  // nobody reads tiles any more
  // Warps share the copies; one sends a copy after the other.
  const int to = thread / 32 + kConsumerThreads / 32 * (thread % 32);
  if (to < b.blocks && to != b.rank) {
    const int first = b.ShareBegin(to), heads = b.ShareBegin(to + 1) - first;
    CopyRemote(received + b.rank * heads, sums + first,
               static_cast<uint32_t>(heads * sizeof(HeadSums)), arrived, static_cast<uint32_t>(to));
  }
  BarrierWaitCluster(arrived, 0);
}

// Adds up the ranges of a token, each of them a block's, block by block a share of the heads. sums:
// of this block's range; received: room for the others'; sinks: of all heads; arrived: expects as
// many bytes as they send.
__device__ inline void MergeRanges(const AttentionParams& p, const BlockWork& work,
                                   const HeadSums* sums, HeadSums* received, const float* sinks,
                                   HeadFactors* factors, uint64_t* arrived) {
  const BlockRanges& b = work.ranges;
  const Share share(b);
  FenceForWgmma();
  ConsumerBarrier();
  ExchangeRanges(b, sums, received, arrived);
  const auto sums_of = [&](int range, int head) -> const HeadSums& {
    return range == b.rank ? sums[share.begin + head] : received[range * share.count + head];
  };
  FindFactors<1>(
      sinks + share.begin, share.count, b.ranges,
      [&](int range, int head) {
        return *reinterpret_cast<const float4*>(&sums_of(range, head).max);
      },
      factors);
  ConsumerBarrier();
  ClusterArriveRelaxed();  // what others sent has left them
  const int thread = ThreadNow(), piece = thread % 64;
#pragma unroll 1
  for (int head = thread / 64; head < share.count; head += 4) {
    StorePiece(p, work.token, work.first_head + share.begin + head, piece,
               AddPiece(b.ranges, piece, factors[head],
                        [&](int i) { return sums_of(i, head).channels[piece]; }));
  }
  ClusterWait();
}

// A unit of all ranges on its way from memory; as many of them as there is room for.
constexpr int kMostOnTheirWay = 8;

// Asks for a unit of all ranges, one after the other. Warps share the copies.
__device__ inline void AskForUnit(const AttentionParams& p, int ranges, int unit, KeptUnit* to,
                                  uint64_t* ready) {
  const int thread = ThreadNow();
  if (thread % 32 != 0) return;
  if (thread == 0) BarrierArriveExpecting(ready, ranges * uint32_t{sizeof(KeptUnit)});
#pragma unroll 1
  for (int i = thread / 32; i < ranges; i += kConsumerThreads / 32) {
    CopyBulk(to + i, &KeptOf(p, i).units[unit], sizeof(KeptUnit), ready);
  }
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

// The same where blocks have several ranges, which all are in memory: block by block a share of the
// units. room: for `room_units` of them, less what factors take.
__device__ inline void MergeKeptRanges(const AttentionParams& p, const BlockWork& work,
                                       const float* sinks, KeptUnit* room, int room_units,
                                       uint64_t* ready) {
  const BlockRanges& b = work.ranges;
  const int begin = QuickDivide(kUnits * b.rank, b.blocks);
  const int end = QuickDivide(kUnits * (b.rank + 1), b.blocks);
  if (b.blocks > 1) {
    ClusterWait();  // all ranges are in memory
  } else {
    ConsumerBarrier();
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");
  constexpr int kFactorUnits =
      (kBlockHeads * sizeof(HeadFactors) + sizeof(KeptUnit) - 1) / sizeof(KeptUnit);
  auto* const factors = reinterpret_cast<HeadFactors*>(room);
  room += kFactorUnits;
  const int slots = min(kMostOnTheirWay, QuickDivide(room_units - kFactorUnits, b.ranges));
  const auto ask = [&](int unit, int slot) {
    if (unit < end) AskForUnit(p, b.ranges, unit, room + slot * b.ranges, &ready[slot]);
  };
#pragma unroll 1
  for (int slot = 0; slot < slots; ++slot) ask(begin + slot, slot);
  const int first_head = begin / 2 * kUnitHeads;
  FindFactors<4>(
      sinks + first_head, (end + 1) / 2 * kUnitHeads - first_head, b.ranges,
      [&](int range, int head) { return KeptOf(p, range).stats[first_head + head]; }, factors);
  ConsumerBarrier();
  int slot = 0;
  uint32_t phase = 0;
#pragma unroll 1
  for (int unit = begin; unit < end; ++unit) {
    BarrierWait(&ready[slot], phase);
    const int head = unit / 2 * kUnitHeads;
    AddUnit(p, work.token, work.first_head + head, unit, b.ranges, room + slot * b.ranges,
            factors + head - first_head);
    if (unit + slots < end) {
      ConsumerBarrier();
      ask(unit + slots, slot);
    }
    if (++slot == slots) slot = 0, phase ^= 1;
  }
}

// The same as a kernel of its own, where a token's blocks are no cluster and leave all ranges in
// memory: a block adds up a unit.
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
  Entries entries;
  const int ranges = BlockRanges(p, token, 0, &entries).ranges;
  if (ranges <= 1 || first_head >= p.heads) return;
  if (thread < 32) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
    if (thread == 0) {
      BarrierArriveExpecting(&s.ready,
                             ranges * static_cast<uint32_t>(sizeof(KeptUnit) + sizeof(s.stats[0])));
    }
    __syncwarp();
    if (thread < ranges) {
      const KeptRange& from = KeptOf(p, thread);
      CopyBulk(s.stats[thread], from.stats + of_group, sizeof(s.stats[0]), &s.ready);
      CopyBulk(s.kept + thread, &from.units[unit], sizeof(KeptUnit), &s.ready);
    }
  }
  BarrierWait(&s.ready, 0);
  FindFactors<1>(
      s.sinks, kUnitHeads, ranges, [&](int range, int head) { return s.stats[range][head]; },
      s.factors);
  __syncthreads();
  AddUnit(p, token, first_head, unit, ranges, s.kept, s.factors);
}

}  // namespace fathom::ops::cuda
