// The end of a token in AttendRows (cuda_rows.cuh): sums of ranges become its result. The only
// range of a token stores it. Several that are a block each send each other shares of the heads and
// add them up in order; where blocks have several, ranges go to memory, where L2 keeps them.
#pragma once

#include <cuda_fp16.h>

#include "ops/cuda/hopper.cuh"
#include "ops/sparse_attention/cuda_rows_produce.cuh"

namespace fathom::ops::cuda {

constexpr int kBlockHeads = 64;
// A token of up to three tiles of 64 entries is one range, others have ranges of two tiles, longer
// ones where that would be more than 16: the factors of a head are found by as many lanes.
constexpr int kMaxRanges = 16;
__host__ __device__ constexpr int TilesOf(int entries) {
  return (entries + kTileRows - 1) / kTileRows;
}
__host__ __device__ constexpr int AttentionRanges(int tiles) {
  return tiles <= 3 ? 1 : tiles < 2 * kMaxRanges ? (tiles + 1) / 2 : kMaxRanges;
}

// A range's result of a head, for another block.
struct HeadSums {
  uint4 channels[kHeadDim / 8];  // float16
  float max, sum;
  float scale[2];  // of the lower and of the upper half of the channels
};
static_assert(sizeof(HeadSums) == 2 * kHeadDim + 16);  // no bank conflicts between heads
// A range's result in memory. Piece 32 g + 8 i + 4 m + q of a head holds the four pairs of channels
// 256 g + 64 i + 32 m + 8 t + 2 q and the next, t = 0 .. 3, what a thread of the products has: a
// quad writes two whole sectors.
struct alignas(128) KeptRange {
  uint4 channels[kBlockHeads][kHeadDim / 8];  // float16
  float4 stats[kBlockHeads];                  // maximum, sum, scales, as of HeadSums
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
struct MergePlan {
  float2 factors[kBlockHeads][kMaxRanges];
};

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
    ranges = AttentionRanges(tiles);
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
// what is lost is an eighth of what rounding the result to bf16 loses. channels(head, piece,
// words): takes the pairs of pieces `piece` .. piece + 3 that the thread has; stats(head, i,
// value): the head's maximum, sum and scales.
template <class Channels, class Stats>
__device__ inline void PackRange(const RangeStats& of, const Attended& a, const Channels& channels,
                                 const Stats& stats) {
  const int thread = ThreadNow();
  const int lane = thread % 32, group = thread / 128;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = thread / 32 % 4 * 16 + lane / 4 + 8 * r;
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
    for (int four = 0; four < 8; ++four) {
      uint32_t words[4];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const float* at = &a.acc[four / 4][16 * (four % 4) + 4 * t + 2 * r];
        const __half2 pair = __floats2half2_rn(at[0] * factor, at[1] * factor);
        words[t] = *reinterpret_cast<const uint32_t*>(&pair);
      }
      channels(head, 32 * group + 4 * four, words);
    }
    if (lane % 4 == 0) {
      stats(head, 2 + group, __uint_as_float(static_cast<uint32_t>(exponent) << 23));
      if (group == 0) {
        stats(head, 0, of.max[r]);
        stats(head, 1, of.sum[r]);
      }
    }
  }
}
__device__ inline void PackRange(const RangeStats& of, const Attended& a, HeadSums* sums) {
  const int quad = ThreadNow() % 4;
  PackRange(
      of, a,
      [&](int head, int piece, const uint32_t(&words)[4]) {
        auto* const to = reinterpret_cast<uint32_t*>(sums[head].channels + piece) + quad;
#pragma unroll
        for (int t = 0; t < 4; ++t) to[4 * t] = words[t];
      },
      [&](int head, int i, float value) { (&sums[head].max)[i] = value; });
}
__device__ inline void PackRange(const RangeStats& of, const Attended& a, KeptRange& kept) {
  const int quad = ThreadNow() % 4;
  PackRange(
      of, a,
      [&](int head, int piece, const uint32_t(&words)[4]) {
        kept.channels[head][piece + quad] = {words[0], words[1], words[2], words[3]};
      },
      [&](int head, int i, float value) { (&kept.stats[head].x)[i] = value; });
}

// Finds the factors of `count` heads. stats(range, head): a range's maximum, sum and scales of one;
// sinks: theirs.
template <class Stats>
__device__ inline void FindFactors(const float* sinks, int count, int ranges, const Stats& stats,
                                   MergePlan& plan) {
  const int thread = ThreadNow();
  // Eight lanes find the factors of a head's ranges, of more ranges sixteen.
  const bool many = ranges > 8;
  const int lanes = many ? 16 : 8;
  const int range = thread & (lanes - 1);
  const int heads_at_once = kConsumerThreads / lanes;
#pragma unroll 1
  for (int first = 0; first < count; first += heads_at_once) {
    const int head = first + thread / lanes;
    const bool real = head < count && range < ranges;
    float4 of = {-INFINITY, 0, 0, 0};  // max, sum, scale
    if (real) of = stats(range, head);
    const float sink = real ? sinks[head] : 0.0f;
    float most = GroupMax(of.x, 8);
    if (many) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 8));
    const float weight = real ? Exp2(of.x - most) : 0.0f;
    float all = real ? of.y * weight : 0.0f;
    if (many) all += __shfl_xor_sync(0xffffffffu, all, 8);
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) {
      all += __shfl_xor_sync(0xffffffffu, all, offset);
    }
    if (real) {
      const float factor = weight * InverseOfSum(most, all, sink);
      plan.factors[head][range] = {factor * of.z, factor * of.w};
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
                                   MergePlan& plan, uint64_t* arrived) {
  const BlockRanges& b = work.ranges;
  const Share share(b);
  FenceForWgmma();
  ConsumerBarrier();
  ExchangeRanges(b, sums, received, arrived);
  const auto sums_of = [&](int range, int head) -> const HeadSums& {
    return range == b.rank ? sums[share.begin + head] : received[range * share.count + head];
  };
  FindFactors(
      sinks + share.begin, share.count, b.ranges,
      [&](int range, int head) {
        return *reinterpret_cast<const float4*>(&sums_of(range, head).max);
      },
      plan);
  ConsumerBarrier();
  ClusterArriveRelaxed();  // what others sent has left them
  const int thread = ThreadNow(), piece = thread % 64;
#pragma unroll 1
  for (int head = thread / 64; head < share.count; head += 4) {
    StorePiece(p, work.token, work.first_head + share.begin + head, piece,
               AddPiece(b.ranges, piece, plan.factors[head],
                        [&](int i) { return sums_of(i, head).channels[piece]; }));
  }
  ClusterWait();
}

// A few heads of all ranges on their way from memory, twice.
constexpr int kChunkHeads = 4;
struct KeptChunks {
  uint4 channels[2][kMaxRanges][kChunkHeads][kHeadDim / 8];
};

// The same where blocks have several ranges, which all are in memory. A block's share is brought to
// shared memory a few heads at a time, two such chunks on their way.
__device__ inline void MergeKeptRanges(const AttentionParams& p, const BlockWork& work,
                                       const float* sinks, KeptChunks& chunks, MergePlan& plan,
                                       uint64_t* ready) {
  const BlockRanges& b = work.ranges;
  const Share share(b);
  if (b.blocks > 1) {
    ClusterWait();  // all ranges are in memory
  } else {
    ConsumerBarrier();
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");
  const int thread = ThreadNow(), piece = thread % 64;
  const int count = (share.count + kChunkHeads - 1) / kChunkHeads;
  // Warps share the copies.
  const auto ask = [&](int chunk) {
    if (thread % 32 != 0 || chunk >= count) return;
    const int first = chunk * kChunkHeads, heads = min(share.count - first, kChunkHeads);
    const auto bytes = static_cast<uint32_t>(heads * 2 * kHeadDim);
    uint64_t* const barrier = &ready[chunk % 2];
    if (thread == 0) BarrierArriveExpecting(barrier, b.ranges * bytes);
#pragma unroll 1
    for (int i = thread / 32; i < b.ranges; i += kConsumerThreads / 32) {
      CopyBulk(chunks.channels[chunk % 2][i], KeptOf(p, i).channels[share.begin + first], bytes,
               barrier);
    }
  };
  ask(0);
  ask(1);
  FindFactors(
      sinks + share.begin, share.count, b.ranges,
      [&](int range, int head) { return KeptOf(p, range).stats[share.begin + head]; }, plan);
  ConsumerBarrier();
#pragma unroll 1
  for (int chunk = 0; chunk < count; ++chunk) {
    BarrierWait(&ready[chunk % 2], chunk / 2 & 1);
    const int head = chunk * kChunkHeads + thread / 64;
    const auto& ranges = chunks.channels[chunk % 2];
    if (head < share.count) {
      StoreKeptPiece(p, work.token, work.first_head + share.begin + head, piece,
                     AddPiece(b.ranges, piece, plan.factors[head],
                              [&](int i) { return ranges[i][thread / 64][piece]; }));
    }
    ConsumerBarrier();
    ask(chunk + 2);
  }
}

}  // namespace fathom::ops::cuda
