// Attention with up to 64 heads of a token on tensor cores: the product's kernel, for bf16 queries
// and rows of FP8 or bf16.
//
// A block of four warpgroups takes a range of the token's entries, 64 at a time. Two warpgroups
// fetch rows and expand them to bf16 in shared memory, once for all heads, as keys and as values
// alike; the other two each compute the scores and weights of half of the rows, hand them to each
// other, and add up half of the channels over all rows.
// Ranges of one token form a cluster, whose blocks add up their results from each other's shared
// memory, in order. How many ranges there are depends on the number of entries alone, so that a
// token's result has the same bits in every step.
#pragma once

#include <cooperative_groups.h>

#include "ops/cuda/hopper.cuh"
#include "ops/sparse_attention/entries.cuh"

namespace fathom::ops::cuda {

constexpr int kTileRows = 64;
constexpr int kBlockHeads = 64;
constexpr int kPanels = kHeadDim / 64;
constexpr int kPanelBytes = 64 * 128;
constexpr int kTileBytes = kPanels * kPanelBytes;
constexpr int kStages = 2;
constexpr int kAttendRowsThreads = 512;
constexpr int kMaxRanges = 8;  // blocks of a portable cluster
// Registers: 256 consumers and 256 producers share 64K.
constexpr int kConsumerRegisters = 192, kProducerRegisters = 64;
constexpr int kSumPitch = kHeadDim + 8;  // floats

__host__ __device__ constexpr int TilesOf(int entries) {
  return (entries + kTileRows - 1) / kTileRows;
}
// A range costs a block as much time as four tiles, whatever it holds: fewer would waste a large
// batch's, more a single token's.
__host__ __device__ constexpr int AttentionRanges(int tiles) {
  if (tiles <= 12) return (tiles + 3) / 4;
  const int ranges = (tiles + 4) / 5;
  return ranges < 3 ? 3 : ranges < kMaxRanges ? ranges : kMaxRanges;
}

// At the beginning of dynamic shared memory, 1,024-byte aligned.
struct AttendRowsShared {
  union {
    struct {
      char keys[kStages][kTileBytes];
      char q[kTileBytes];
    };
    float sums[kBlockHeads * kSumPitch];  // of a range, once its tiles are done
  };
  char weights[kPanelBytes];  // of the tile at hand [heads][rows], bf16, swizzled
  uint4 codes[6][256];  // of FP8 rows on their way: pieces of 16 bytes of the producers' threads
  float max[kBlockHeads], sum[kBlockHeads];
  float half_max[2][kBlockHeads], half_sum[2][kBlockHeads];  // of a consumer's rows
  uint64_t full[kStages], empty[kStages];
};
constexpr int kAttendRowsBytes = static_cast<int>(sizeof(AttendRowsShared)) + 1024;

// A barrier of the two consuming warpgroups.
__device__ inline void ConsumerBarrier() {
  asm volatile("bar.sync 1, 256;" ::: "memory");
}

__device__ inline float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Sixteen e4m3 codes times a power of two, as bf16: exact. NaN codes stay NaN.
__device__ inline void ExpandCodes(const uint4& codes, uint32_t ue8m0, uint4 (&out)[2]) {
  // A code's exponent field in bf16's place is too small by 2^120; bf16 ends at 2^127, so a large
  // scale takes two factors.
  const uint32_t field = ue8m0 + 120;
  const uint32_t factor = (min(field, 254u) << 7) * 0x00010001u;
  const auto multiply = [](uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
  };
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  uint32_t expanded[8];
  uint32_t nan = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = words[i / 2];
    const uint32_t p = __byte_perm(word, 0, i % 2 == 0 ? 0x1100 : 0x3322);
    expanded[i] = multiply((p & 0x80008000u) | ((p >> 4) & 0x07f007f0u), factor);
    if (i % 2 == 0) nan |= (word & 0x7f7f7f7fu) + 0x01010101u;
  }
  if (field > 254) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      expanded[i] = multiply(expanded[i], ((field - 127) << 7) * 0x00010001u);
    }
  }
  if ((nan & 0x80808080u) != 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t two = words[i / 2] >> (16 * (i % 2));
      if ((two & 0x7fu) == 0x7fu) expanded[i] = (expanded[i] & 0xffff0000u) | 0x7fffu;
      if ((two & 0x7f00u) == 0x7f00u) expanded[i] = (expanded[i] & 0xffffu) | 0x7fff0000u;
    }
  }
  out[0] = {expanded[0], expanded[1], expanded[2], expanded[3]};
  out[1] = {expanded[4], expanded[5], expanded[6], expanded[7]};
}

// Where the lane's row lies; data == nullptr beyond the last entry.
struct LaneRow {
  const std::byte* data;
  uint2 scales;
};

// The cache row that compressed entry `entry` of the token is, or -1 for an entry of the window.
__device__ inline int32_t CompressedRow(const AttentionParams& p, const Entries& entries,
                                        int entry) {
  const int compressed = entry - entries.window;
  if (compressed < 0 || compressed >= entries.compressed) return -1;
  return p.selected == nullptr ? compressed
                               : __ldg(p.selected + int64_t{entries.token} * p.top_k + compressed);
}

// `row` as CompressedRow gave it.
template <bool kFp8>
__device__ LaneRow FindRow(const AttentionParams& p, const Entries& entries, int entry,
                           int32_t row) {
  constexpr int kDataBytes = kFp8 ? 576 : 1024;
  const auto at = [](const PagedRows& rows, int32_t block, int32_t in_page) {
    const std::byte* page = rows.base + block * rows.block_stride;
    LaneRow found{page + in_page * kDataBytes, {0, 0}};
    if constexpr (kFp8) {
      found.scales = __ldg(
          reinterpret_cast<const uint2*>(page + rows.rows_per_page * kDataBytes + in_page * 8));
    }
    return found;
  };
  if (row >= 0) {
    const int32_t page = p.page_shift >= 0 ? row >> p.page_shift : row / p.compressed.rows_per_page;
    const int32_t block =
        __ldg(p.step.block_table + int64_t{entries.sequence} * p.step.max_blocks + page);
    return at(p.compressed, block, row - page * p.compressed.rows_per_page);
  }
  if (entry >= entries.window) return {nullptr, {0, 0}};
  const int32_t position = entries.window_begin + entry;
  if (position >= entries.first) {
    return at(p.step_rows, 0, entries.start + position - entries.first);
  }
  return at(p.ring, entries.slot, position % p.ring.rows_per_page);
}

// The producers: 8 warps, each 8 rows of every tile, four lanes a row. Where a row lies is found a
// tile ahead, which row it is two tiles ahead.
struct Producer {
  int row, part;  // of the tile, of the row
  int entry;      // of the row in the tile at hand
  LaneRow now;
  int32_t row_after;  // the cache row of the tile after

  __device__ Producer(const AttentionParams& p, const Entries& entries, int first_tile)
      : row(threadIdx.x / 4 - 64), part(threadIdx.x % 4), entry(first_tile * kTileRows + row) {
    row_after = CompressedRow(p, entries, entry);
  }
  // Turns to the next tile's row.
  template <bool kFp8>
  __device__ void Find(const AttentionParams& p, const Entries& entries, int next_entry) {
    now = FindRow<kFp8>(p, entries, next_entry, row_after);
    row_after = CompressedRow(p, entries, next_entry + kTileRows);
  }
  __device__ uint4 Load(int byte) const {
    return now.data == nullptr ? uint4{0, 0, 0, 0}
                               : __ldg(reinterpret_cast<const uint4*>(now.data + byte));
  }
  __device__ void Store(char* panel, int half, const uint4& value) const {
    *reinterpret_cast<uint4*>(panel + SwizzledOffset(row, 32 * part + 16 * half)) = value;
  }
};

__device__ inline void ProduceFp8(const AttentionParams& p, const Entries& entries, int first_tile,
                                  int last_tile, AttendRowsShared& s) {
  Producer producer(p, entries, first_tile);
  const int thread = static_cast<int>(threadIdx.x) - 256;
  uint4 rope[2], last;  // the last piece of codes
  const auto ask = [&] {
    const auto* data = producer.now.data;
#pragma unroll
    for (int i = 0; i < 6; ++i) {
      CopyAsync16(SharedAddress(&s.codes[i][thread]),
                  data == nullptr ? p.step_rows.base : data + 64 * i + 16 * producer.part,
                  data != nullptr);
    }
    CopyAsyncCommit();
    last = producer.Load(64 * 6 + 16 * producer.part);
    rope[0] = producer.Load(kNopeDim + 32 * producer.part);
    rope[1] = producer.Load(kNopeDim + 32 * producer.part + 16);
  };
  producer.Find<true>(p, entries, producer.entry);
  ask();
#pragma unroll 1
  for (int tile = first_tile; tile < last_tile; ++tile) {
    const int stage = (tile - first_tile) % kStages, round = (tile - first_tile) / kStages;
    char* const keys = s.keys[stage];
    const uint2 scales = producer.now.scales;
    producer.Find<true>(p, entries, (tile + 1) * kTileRows + producer.row);
    if (round > 0) BarrierWait(&s.empty[stage], (round - 1) & 1);
    producer.Store(keys + 7 * kPanelBytes, 0, rope[0]);
    producer.Store(keys + 7 * kPanelBytes, 1, rope[1]);
    CopyAsyncWaitFor<0>();
    uint4 codes[7];
#pragma unroll
    for (int i = 0; i < 6; ++i) codes[i] = s.codes[i][thread];
    codes[6] = last;
    if (tile + 1 < last_tile) ask();
#pragma unroll
    for (int i = 0; i < 7; ++i) {
      const uint32_t scale =
          __byte_perm(scales.x, scales.y, static_cast<uint32_t>(i) | 0x8880u) & 0xffu;
      uint4 out[2];
      ExpandCodes(codes[i], scale, out);
      producer.Store(keys + i * kPanelBytes, 0, out[0]);
      producer.Store(keys + i * kPanelBytes, 1, out[1]);
    }
    FenceForWgmma();
    BarrierArrive(&s.full[stage]);
  }
}

__device__ inline void ProduceBf16(const AttentionParams& p, const Entries& entries, int first_tile,
                                   int last_tile, AttendRowsShared& s) {
  Producer producer(p, entries, first_tile);
  producer.Find<false>(p, entries, producer.entry);
#pragma unroll 1
  for (int tile = first_tile; tile < last_tile; ++tile) {
    const int stage = (tile - first_tile) % kStages, round = (tile - first_tile) / kStages;
    char* const keys = s.keys[stage];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 words[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        words[i] = producer.Load((4 * half + i / 2) * 128 + 32 * producer.part + i % 2 * 16);
      }
      if (half == 0 && round > 0) BarrierWait(&s.empty[stage], (round - 1) & 1);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        producer.Store(keys + (4 * half + i / 2) * kPanelBytes, i % 2, words[i]);
      }
    }
    producer.Find<false>(p, entries, (tile + 1) * kTileRows + producer.row);
    FenceForWgmma();
    BarrierArrive(&s.full[stage]);
  }
}

// One warpgroup's state: heads g and g + 8 of its warp's 16, channels of four panels.
struct Attended {
  float acc[2][64];  // of panel i, columns 8j + 2 quad and the next: at 32 i + 4 j, of head g + 8
                     // two on
  float max[2];      // of scores, times log2(e)
  float sum[2];      // of all rows
};

// The consumers: scores, softmax and their panels' sum over tiles [first_tile, last_tile).
__device__ inline void Consume(const Entries& entries, int first_tile, int last_tile,
                               AttendRowsShared& s, Attended& a) {
  constexpr float kLog2e = 1.4426950408889634f;
  constexpr float kScale = kScoreScale * kLog2e;
  const int lane = threadIdx.x % 32, quad = lane % 4;
  // The compiler learns that all lanes agree: descriptors stay in uniform registers.
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  const int head = threadIdx.x / 32 % 4 * 16 + lane / 4;  // and head + 8
  const uint32_t q = SharedAddress(s.q), weights_at = SharedAddress(s.weights);
  const int total = entries.window + entries.compressed;
#pragma unroll
  for (int i = 0; i < 128; ++i) a.acc[i / 64][i % 64] = 0;
  a.max[0] = a.max[1] = -INFINITY;
  float sum[2] = {0, 0};  // of this warpgroup's rows
#pragma unroll 1
  for (int tile = first_tile; tile < last_tile; ++tile) {
    const int stage = (tile - first_tile) % kStages, round = (tile - first_tile) / kStages;
    const uint32_t keys = SharedAddress(s.keys[stage]);
    BarrierWait(&s.full[stage], round & 1);
    float score[16];  // rows 32 group + 8j + 2 quad and the next: at 4j, of head + 8 two on
    const uint32_t mine = keys + group * 32 * 128;
    WgmmaFence();
    WgmmaBf16<false>(score, PanelDescriptor(q), PanelDescriptor(mine));
#pragma unroll
    for (int k = 1; k < kHeadDim / 16; ++k) {
      const uint32_t at = k / 4 * kPanelBytes + k % 4 * 32;
      WgmmaBf16<true>(score, PanelDescriptor(q + at), PanelDescriptor(mine + at));
    }
    WgmmaCommit();
    WgmmaWait<0>();

    const int count = total - tile * kTileRows - group * 32;
    if (count < 32) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (i / 4 * 8 + 2 * quad + i % 2 >= count) score[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = fmaxf(score[2 * r], score[2 * r + 1]);
#pragma unroll
      for (int j = 1; j < 4; ++j) {
        most = fmaxf(most, fmaxf(score[4 * j + 2 * r], score[4 * j + 2 * r + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      if (quad == 0) s.half_max[group][head + 8 * r] = most;
    }
    ConsumerBarrier();
    float keep[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float both = fmaxf(s.half_max[0][head + 8 * r], s.half_max[1][head + 8 * r]);
      const float most = fmaxf(a.max[r], both * kScale);
      keep[r] = Exp2(a.max[r] - most);
      a.max[r] = most;
      float part = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& x = score[4 * j + 2 * r + c];
          x = Exp2(__fmaf_rn(x, kScale, -most));
          part += x;
        }
      }
      sum[r] = __fmaf_rn(sum[r], keep[r], part);
    }
    uint32_t weights[2][4];  // of the warpgroup's rows, as an operand
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[k][i] = Bf16Word(score[8 * k + 2 * i], score[8 * k + 2 * i + 1]);
        // Word i is of head + 8 (i % 2) and of rows 16k + 8 (i / 2) + 2 quad and the next.
        const uint32_t byte = 2 * (32 * group + 16 * k + 8 * (i / 2) + 2 * quad);
        *reinterpret_cast<uint32_t*>(s.weights + SwizzledOffset(head + 8 * (i % 2), byte)) =
            weights[k][i];
      }
    }
    FenceForWgmma();
    ConsumerBarrier();
    if (__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 128; ++i) a.acc[i / 64][i % 64] *= keep[i / 2 % 2];
    }
    const uint32_t values = keys + 4 * group * kPanelBytes;
    WgmmaFence();
    // Rows in ascending order in both warpgroups; operand k of the other one's lies in memory.
    const auto add = [&](int k, const auto& operand) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        WgmmaBf16Panels(a.acc[i], operand,
                        PanelsDescriptor(values + 2 * i * kPanelBytes + k * 16 * 128));
      }
    };
    const auto stored = [&](int k) { return PanelDescriptor(weights_at + 32 * k); };
    if (group == 0) {
      add(0, weights[0]);
      add(1, weights[1]);
      add(2, stored(2));
      add(3, stored(3));
    } else {
      add(0, stored(0));
      add(1, stored(1));
      add(2, weights[0]);
      add(3, weights[1]);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    BarrierArrive(&s.empty[stage]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 1);
    sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], 2);
    if (quad == 0) s.half_sum[group][head + 8 * r] = sum[r];
  }
  ConsumerBarrier();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    a.sum[r] = s.half_sum[0][head + 8 * r] + s.half_sum[1][head + 8 * r];
  }
}

// 1 / (sum + e^sink) under the maximum `max` (times log2(e)).
__device__ inline float InverseOfSum(float max, float sum, float sink) {
  return __fdiv_rn(1.0f, sum + Exp2(__fmaf_rn(sink, 1.4426950408889634f, -max)));
}

// The only range of a token: its sums are the result.
__device__ inline void StoreAttended(const AttentionParams& p, int32_t token, int first_head,
                                     const Attended& a) {
  const int lane = threadIdx.x % 32, group = threadIdx.x / 128;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = first_head + threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * r;
    if (head >= p.heads) continue;
    const float inverse = InverseOfSum(a.max[r], a.sum[r], p.sink[head]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        StoreOutput(p, token, head, (4 * group + i) * 64 + 8 * j + lane % 4 * 2,
                    a.acc[i / 2][32 * (i % 2) + 4 * j + 2 * r] * inverse,
                    a.acc[i / 2][32 * (i % 2) + 4 * j + 2 * r + 1] * inverse);
      }
    }
  }
}

// Adds up the ranges of a token; every block of the cluster that has one does a share of the heads.
__device__ inline void MergeRanges(const AttentionParams& p, int32_t token, int first_head,
                                   int ranges, int rank, const Attended& a, AttendRowsShared& s) {
  namespace cg = cooperative_groups;
  const cg::cluster_group cluster = cg::this_cluster();
  const int lane = threadIdx.x % 32, group = threadIdx.x / 128;
  ConsumerBarrier();  // nobody reads tiles or queries any more
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * r;
    if (group == 0 && lane % 4 == 0) {
      s.max[head] = a.max[r];
      s.sum[head] = a.sum[r];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        *reinterpret_cast<float2*>(
            &s.sums[head * kSumPitch + (4 * group + i) * 64 + 8 * j + lane % 4 * 2]) = {
            a.acc[i / 2][32 * (i % 2) + 4 * j + 2 * r],
            a.acc[i / 2][32 * (i % 2) + 4 * j + 2 * r + 1]};
      }
    }
  }
  cluster.sync();
  const int begin = kBlockHeads * rank / ranges, end = kBlockHeads * (rank + 1) / ranges;
  const int channel = threadIdx.x % 128 * 4;
  for (int head = begin + threadIdx.x / 128; head < end && first_head + head < p.heads; head += 2) {
    float4 value[kMaxRanges];
    float max[kMaxRanges], sum[kMaxRanges];
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kMaxRanges; ++i) {
      if (i >= ranges) continue;
      const AttendRowsShared* other = cluster.map_shared_rank(&s, i);
      value[i] = *reinterpret_cast<const float4*>(&other->sums[head * kSumPitch + channel]);
      max[i] = other->max[head];
      sum[i] = other->sum[head];
      most = fmaxf(most, max[i]);
    }
    float4 total = {0, 0, 0, 0};
    float all = 0;
#pragma unroll
    for (int i = 0; i < kMaxRanges; ++i) {
      if (i >= ranges) continue;
      const float weight = Exp2(max[i] - most);
      all = __fmaf_rn(sum[i], weight, all);
      total.x = __fmaf_rn(value[i].x, weight, total.x);
      total.y = __fmaf_rn(value[i].y, weight, total.y);
      total.z = __fmaf_rn(value[i].z, weight, total.z);
      total.w = __fmaf_rn(value[i].w, weight, total.w);
    }
    const float inverse = InverseOfSum(most, all, p.sink[first_head + head]);
    StoreOutput(p, token, first_head + head, channel, total.x * inverse, total.y * inverse);
    StoreOutput(p, token, first_head + head, channel + 2, total.z * inverse, total.w * inverse);
  }
  cluster.sync();  // others may still read this block's sums
}

// The consumers' queries, on their way to shared memory; zeros beyond the last head.
__device__ inline void LoadQueries(const AttentionParams& p, int32_t token, int first_head,
                                   AttendRowsShared& s) {
  const auto* q =
      static_cast<const __nv_bfloat16*>(p.q) + token * p.q_stride + int64_t{first_head} * kHeadDim;
  for (int i = threadIdx.x; i < kBlockHeads * kHeadDim / 8; i += 256) {
    const int head = i / (kHeadDim / 8), piece = i % (kHeadDim / 8);
    const bool real = first_head + head < p.heads;
    CopyAsync16(SharedAddress(s.q) + piece / 8 * kPanelBytes + SwizzledOffset(head, piece % 8 * 16),
                q + (real ? int64_t{i} * 8 : 0), real);
  }
  CopyAsyncCommit();
}

// What the walk to the rows reads one after the other comes into L2 at once; in decode a token's
// index is its sequence's.
__device__ inline void PrefetchStep(const AttentionParams& p, int32_t token) {
  const auto prefetch = [](const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); };
  const int i = static_cast<int>(threadIdx.x) - 256;
  const int sequence = min(token, p.step.num_sequences - 1);
  if (i == 0) prefetch(p.step.query_start + sequence);
  if (i == 1) prefetch(p.step.slot + sequence);
  if (i == 2 && p.counts != nullptr) prefetch(p.counts + token);
  if (p.selected != nullptr && i >= 32 && 32 * (i - 32) < p.top_k) {
    prefetch(p.selected + int64_t{token} * p.top_k + 32 * (i - 32));
  }
  if (p.compressed.base != nullptr && i >= 128 && 32 * (i - 128) < p.step.max_blocks) {
    prefetch(p.step.block_table + int64_t{sequence} * p.step.max_blocks + 32 * (i - 128));
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
  const auto rank = static_cast<int>(cg::this_cluster().block_rank());
  const int unit = static_cast<int>(blockIdx.x) / blocks;
  const auto token = static_cast<int32_t>(unit / p.groups);
  const int first_head = unit % p.groups * kBlockHeads;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(&s.full[i], 256);
      BarrierInit(&s.empty[i], 256);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  LetNextStart();
  WaitForPrevious();
  const bool consumer = threadIdx.x < 256;
  if (consumer) {
    LoadQueries(p, token, first_head, s);
  } else {
    PrefetchStep(p, token);
  }
  Entries entries;
  if (!EntriesOf(p, token, &entries)) return;
  const int tiles = TilesOf(entries.window + entries.compressed);
  const int ranges = AttentionRanges(tiles);
  if (rank >= ranges) return;
  const int first_tile = tiles * rank / ranges, last_tile = tiles * (rank + 1) / ranges;
  __syncthreads();

  if (!consumer) {
    FewerRegisters<kProducerRegisters>();
    if constexpr (kFp8) {
      ProduceFp8(p, entries, first_tile, last_tile, s);
    } else {
      ProduceBf16(p, entries, first_tile, last_tile, s);
    }
  } else {
    MoreRegisters<kConsumerRegisters>();
    CopyAsyncWaitFor<0>();
    FenceForWgmma();
    ConsumerBarrier();
    Attended a;
    Consume(entries, first_tile, last_tile, s, a);
    if (ranges == 1) {
      StoreAttended(p, token, first_head, a);
    } else {
      MergeRanges(p, token, first_head, ranges, rank, a, s);
    }
  }
}

}  // namespace fathom::ops::cuda
