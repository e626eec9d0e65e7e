// ScanRows where every sequence has one token: blocks stay and share all tiles of all tokens
// evenly, whatever the lengths of their contexts.
//
// Warpgroups of a block take tiles in turn. Each has a ring of stages of its own, which one of its
// threads fills by bulk copies: it waits for every phase of its stages and for nobody else's.
//
// A tile of FP4 keys of 64 heads takes a warp some 270 instructions, of which 130 go to the integer
// pipe at two cycles each; memory at 4.30 TB/s brings one every 250 cycles. So six warps a
// scheduler have to cover each other's waits.
#pragma once

#include <cstddef>

#include "ops/indexer/cuda_pages.cuh"

namespace fathom::ops::cuda {

constexpr int kRingTokens = 256;  // of a launch, at most

// What the sum over heads of FP4 keys reads, in the order of its lanes. Integer products start at
// the bits of 2^23 less their excess (cuda_query.cuh) and so end as the float 2^23 + dot. Times
// 2^-23, less 1 and saturated that is relu(dot) 2^-23, exactly, for weights times 2^23.
template <int kHeads>
struct Fp4Sums {
  int4 start[kHeads / 8][4];                // of accumulators of heads 8 j + 2 q, + 1, of two rows
  float4 weights[(kHeads / 8 + 1) / 2][4];  // of those heads, two j each
};
// A finite weight beyond it would not bear the factor: Slow serves such queries.
constexpr float kLargestWeight = 0x1p100f;

// Block; a barrier before and after.
template <int kHeads>
__device__ inline void MakeSums(const ScanQuery& query, Fp4Sums<kHeads>* sums) {
  const int i = threadIdx.x, j = i / 4, quad = i % 4;
  if (i >= kHeads / 2) return;
  const float4 pair = query.pairs[i];
  const int low = __float_as_int(pair.z), high = __float_as_int(pair.w);
  sums->start[j][quad] = {low, high, low, high};
  reinterpret_cast<float2*>(&sums->weights[j / 2][quad])[j % 2] = {pair.x * 0x1p23f,
                                                                   pair.y * 0x1p23f};
}

template <int kHeads>
__device__ inline bool HasLargeWeights(const ScanQuery& query) {
  bool large = false;
  for (int head = threadIdx.x % 32; head < kHeads; head += 32) {
    const float w = fabsf(reinterpret_cast<const float*>(query.pairs + head / 2)[head % 2]);
    large = large || (w >= kLargestWeight && w < INFINITY);
  }
  return __any_sync(0xffffffffu, large);
}

// ScoreOwnRow for FP4 keys. sums: from the lane's first one on.
template <int kHeads>
__device__ inline float ScoreOwnFp4Row(const PageTile<Fp4Keys>& tile, uint64_t image,
                                       const char* sums, bool odd) {
  const auto* const start = reinterpret_cast<const int4*>(sums);
  const auto* const weights = reinterpret_cast<const float4*>(sums + kHeads / 8 * 64);
  constexpr int kN = kHeads >= 64 ? 64 : 8;
  float a = 0, b = 0;
#pragma unroll
  for (int first = 0; first < kHeads; first += kN) {
    int32_t sum[kN / 2];
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const int4 four = start[(first / 8 + j) * 4];
      sum[4 * j] = four.x, sum[4 * j + 1] = four.y;
      sum[4 * j + 2] = four.z, sum[4 * j + 3] = four.w;
    }
    WgmmaFence();
#pragma unroll
    for (int s = 0; s < Fp4Keys::kSteps; ++s) {
      WgmmaU8S8<true>(sum, tile.a[s], image + first * 8 + s * 2);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    const auto add = [](float& to, float weight, int32_t bits) {
      const float relu = __saturatef(__fmaf_rn(__int_as_float(bits), 0x1p-23f, -1.0f));
      to = __fmaf_rn(weight, relu, to);
    };
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const int at = first / 8 + j;
      const float4 two = weights[at / 2 * 4];
      const float low = at % 2 == 0 ? two.x : two.z, high = at % 2 == 0 ? two.y : two.w;
      add(a, low, sum[4 * j]);
      add(a, high, sum[4 * j + 1]);
      add(b, low, sum[4 * j + 2]);
      add(b, high, sum[4 * j + 3]);
    }
  }
  return __fmul_rn(SumPair(a, b, odd), tile.scale);
}

template <class Keys, int kHeads>
struct RingShape {
  static constexpr int kGroups = Keys::kFp4 && kHeads <= 64 ? 3 : 2;
  static constexpr int kThreads = 128 * kGroups;
  static constexpr int kStages = Keys::kDataBytes > 128 ? 2 : 4;
  static constexpr int kSums = (PackedLayout{kHeads, Keys::kFp4}.Bytes() + 15) / 16 * 16;
  static constexpr int kTiles =
      (kSums + (Keys::kFp4 ? int{sizeof(Fp4Sums<kHeads>)} : 0) + 127) / 128 * 128;
  static constexpr int kShared = kTiles + kGroups * kStages * kTileBytes<Keys>;
  static_assert(kThreads >= kRingTokens);
};

struct RingShared {
  uint64_t query;
  uint64_t full[3][4];        // of a group's stages
  int32_t rows[kRingTokens];  // scored of each token
  int32_t sequence[kRingTokens];
  int32_t tiles_before[kRingTokens];  // of the tokens before
  int32_t warp_tiles[12];
  int32_t first_token;
};

template <class Keys, int kHeads>
constexpr int64_t RingSharedBytes() {
  return 1024 + RingShape<Keys, kHeads>::kShared + int64_t{sizeof(RingShared)};
}

// Tiles of the pass before each of its tokens; returns those of all. Block.
template <int kThreads>
__device__ inline int32_t CountTiles(const IndexerParams& p, RingShared& s) {
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t lane = thread % 32, warp = thread / 32;
  int32_t rows = 0;
  if (thread < p.num_tokens) {
    s.sequence[thread] = p.step.sequence[p.first_token + thread];
    rows = VisibleRows(p, p.first_token + thread);
    if (!IsScored(p, rows)) rows = 0;
  }
  const int32_t mine = (rows + kScanRows - 1) / kScanRows;
  int32_t sum = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int32_t below = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += below;
  }
  if (lane == 31) s.warp_tiles[warp] = sum;
  __syncthreads();
  const int32_t other = lane < kThreads / 32 ? s.warp_tiles[lane] : 0;
  const int32_t all = __reduce_add_sync(0xffffffffu, other);
  const int32_t before = sum - mine + __reduce_add_sync(0xffffffffu, lane < warp ? other : 0);
  if (thread < kRingTokens) {
    s.rows[thread] = rows;
    s.tiles_before[thread] = before;
  }
  const auto begin = static_cast<int32_t>(int64_t{all} * blockIdx.x / gridDim.x);
  if (before <= begin && begin < before + mine) s.first_token = thread;
  __syncthreads();
  return all;
}

// Whether Slow is not needed for FP4 rows `row` and `row` + 8 among `rows`, of no lane. Warp.
__device__ inline bool AreExact(const KeyRows& keys, int32_t row, int32_t rows) {
  bool exact = true;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::byte *data, *scale;
    keys.Find(min(row + 8 * i, rows - 1), Fp4Keys::kDataBytes, Fp4Keys::kScaleBytes, &data, &scale);
    const uint32_t scales = *reinterpret_cast<const uint32_t*>(scale);
    uint32_t least = 255, most = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      least = min(least, scales >> (8 * b) & 0xffu);
      most = max(most, scales >> (8 * b) & 0xffu);
    }
    exact = exact && most - least <= 3;
  }
  return __all_sync(0xffffffffu, exact);
}

// grid (blocks that share the tiles), at most kRingTokens tokens.
template <class Keys, int kHeads>
__global__ void __launch_bounds__(RingShape<Keys, kHeads>::kThreads, 2)
    ScanRing(const __grid_constant__ IndexerParams p) {
  using Shape = RingShape<Keys, kHeads>;
  constexpr PackedLayout kPacked{kHeads, Keys::kFp4};
  constexpr int kGroups = Shape::kGroups, kStages = Shape::kStages;
  extern __shared__ char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = threadIdx.x / 128;
  const auto query_at = static_cast<int32_t>((1024 - (SharedAddress(memory) & 1023u)) % 1024);
  const int32_t ring_at = query_at + Shape::kTiles + group * kStages * kTileBytes<Keys>;
  char* const query = memory + query_at;
  auto& s = *reinterpret_cast<RingShared*>(query + Shape::kShared);
  // What a lane needs for every tile: bytes from `memory`.
  const LanePart<Keys> part = PartOfLane<Keys>();
  int32_t codes_at = ring_at + part.codes, scales_at = ring_at + part.scales;
  int32_t sums_at = query_at + (Keys::kFp4 ? Shape::kSums : kPacked.Pairs()) + lane % 4 * 16;
  int32_t full_at = query_at + Shape::kShared + static_cast<int32_t>(offsetof(RingShared, full)) +
                    group * static_cast<int32_t>(sizeof(RingShared::full[0]));
  int32_t odd = lane % 2;
  asm volatile("" : "+r"(codes_at), "+r"(scales_at), "+r"(sums_at), "+r"(full_at), "+r"(odd));
  const auto full = [&](uint32_t stage) {
    return reinterpret_cast<uint64_t*>(memory + full_at) + stage;
  };
  if (threadIdx.x == 0) {
    BarrierInit(&s.query, 1);
    for (int g = 0; g < kGroups; ++g) {
      for (int i = 0; i < kStages; ++i) BarrierInit(&s.full[g][i], 1);
    }
    FenceBarrierInit();
  }
  LetNextStart();
  WaitForPrevious();
  const int32_t all = CountTiles<Shape::kThreads>(p, s);
  auto at = static_cast<int32_t>(int64_t{all} * blockIdx.x / gridDim.x);
  const auto end = static_cast<int32_t>(int64_t{all} * (blockIdx.x + 1) / gridDim.x);
  const uint64_t image = PanelDescriptor(SharedAddress(query));

  uint32_t turn = 0;  // rounds of the group since the block began
  uint32_t query_phase = 0;
#pragma unroll 1
  for (int local = s.first_token; at < end; ++local) {
    const int32_t rows = s.rows[local];
    if (rows == 0) continue;
    const int32_t before = s.tiles_before[local];
    const int32_t first = at - before + group;
    const int32_t last = min(end - before, (rows + kScanRows - 1) / kScanRows);
    at = before + last;
    // Turn t of this token is tile origin + t * kGroups, in stage t % kStages.
    const int32_t origin = first - static_cast<int32_t>(turn) * kGroups;
    const uint32_t turns_end =
        turn + static_cast<uint32_t>(max(0, last - first + kGroups - 1) / kGroups);
    KeyRows keys;
    keys.pages = p.keys;
    keys.page_shift = p.page_shift;
    keys.blocks = p.step.block_table + int64_t{s.sequence[local]} * p.step.max_blocks;

    // Warp w fills stage w. Its lanes know the pages of 32 of its turns.
    int32_t pages = 0;
    const auto fill = [&](uint32_t of, bool first_time) {
      if (of >= turns_end) return;
      const uint32_t nth = of / kStages;
      if (first_time || nth % 32 == 0) {
        const uint32_t theirs = (nth / 32 * 32 + lane) * kStages + warp;
        if (theirs >= of && theirs < turns_end) {
          pages =
              __ldg(keys.blocks + PageOfTile(p, origin + static_cast<int32_t>(theirs) * kGroups));
        }
      }
      const int32_t page = __shfl_sync(0xffffffffu, pages, nth % 32);
      if (lane == 0) {
        BarrierArriveExpecting(full(warp), kTileBytes<Keys>);
        CopyTile<Keys>(p, page, origin + static_cast<int32_t>(of) * kGroups,
                       memory + ring_at + warp * kTileBytes<Keys>, full(warp));
      }
      __syncwarp();
    };
    if (warp < kStages) fill(turn + (warp - turn) % kStages, true);

    __syncthreads();  // nobody reads the query of the token before
    if (threadIdx.x == 0) {
      BarrierArriveExpecting(&s.query, kPacked.Bytes());
      CopyBulk(query, p.packed + local * p.packed_stride, kPacked.Bytes(), &s.query);
    }
    BarrierWait(&s.query, query_phase);
    query_phase ^= 1;
    bool all_slow = false;
    if constexpr (Keys::kFp4) {
      all_slow =
          Unaligned<Keys, kHeads>(query) || HasLargeWeights<kHeads>(QueryAt<Keys, kHeads>(query));
      MakeSums<kHeads>(QueryAt<Keys, kHeads>(query),
                       reinterpret_cast<Fp4Sums<kHeads>*>(query + Shape::kSums));
      __syncthreads();
    }

    // Lanes of the same row agree; two of a quad store, each a row.
    const auto token_at = static_cast<uint32_t>(local * p.scores_stride);
    uint32_t to = token_at + static_cast<uint32_t>(first * kScanRows + part.row);
    const uint32_t to_end = lane % 4 < 2 ? token_at + static_cast<uint32_t>(rows) : 0;
    uint32_t slow_from = all_slow ? turn : turns_end;  // the first turn that may need Slow
#pragma unroll 1
    for (; turn < turns_end; ++turn) {
      const uint32_t stage = turn % kStages;
      const auto in_stage = static_cast<int32_t>(stage) * kTileBytes<Keys>;
      PageTile<Keys> tile;
      BarrierWait(full(stage), turn / kStages & 1);
      DecodePage(memory + codes_at + in_stage, memory + scales_at + in_stage, odd != 0, &tile);
      SyncNamed(1 + group, 128);  // the group has read the stage
      if (stage == static_cast<uint32_t>(warp)) fill(turn + kStages, false);
      float score;
      if constexpr (Keys::kFp4) {
        score = ScoreOwnFp4Row<kHeads>(tile, image, memory + sums_at, odd != 0);
      } else {
        score = ScoreOwnRow<Keys, kHeads>(
            tile, image, reinterpret_cast<const float4*>(memory + sums_at), odd != 0);
      }
      if (to < to_end) p.scores[to] = score;
      to += kGroups * kScanRows;
      if constexpr (Keys::kFp4) {
        if (!tile.exact) slow_from = min(slow_from, turn);
      }
    }
    if constexpr (Keys::kFp4) {
#pragma unroll 1
      for (; slow_from < turns_end; ++slow_from) {
        const int32_t tile = origin + static_cast<int32_t>(slow_from) * kGroups;
        const int32_t row = tile * kScanRows + warp * 16 + lane / 4;
        if (!all_slow && AreExact(keys, row, rows)) continue;
        const float score = SlowOwnRow<kHeads>(keys, row, rows, QueryAt<Keys, kHeads>(query));
        const int32_t mine = row + odd * 8;
        if (lane % 4 < 2 && mine < rows) p.scores[token_at + static_cast<uint32_t>(mine)] = score;
      }
    }
  }
}

}  // namespace fathom::ops::cuda
