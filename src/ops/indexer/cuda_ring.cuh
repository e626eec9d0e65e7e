// ScanRows where every sequence has one token: blocks stay and share all tiles of all tokens
// evenly, whatever the lengths of their contexts.
//
// Warpgroups of a block take tiles in turn. Each has a ring of stages of its own, which one of its
// threads fills by bulk copies: it waits for every phase of its stages and for nobody else's.
//
// A tile of FP4 keys of 64 heads takes a warp some 260 instructions, of which 140 go to the integer
// pipe at two cycles each; memory at 4.30 TB/s brings one every 250 cycles. So six warps a
// scheduler have to cover each other's waits, loads from shared memory are few, and a stage is
// refilled while products run.
#pragma once

#include <cstddef>

#include "ops/indexer/cuda_pages.cuh"

namespace fathom::ops::cuda {

constexpr int kRingTokens = 256;  // of a launch, at most
// The step's tokens, and so its new rows, end at the last of a token's tiles and begin here at the
// earliest. What a step reads of older rows, its positions and its block table are as they are
// since before its first kernel.
constexpr int kNewTiles = 1 + kRingTokens / 4 / kScanRows;

// What the sum over heads of FP4 keys reads, in the order of its lanes. Keys are signed bytes here,
// so products end as the integer dot, whose bits are those of the float32 dot 2^-149 where it is
// not negative, and else of a NaN. Times 2^126 and saturated, which makes 0 of a NaN, that is
// relu(dot) 2^-23, exactly, for weights times 2^23.
template <int kHeads>
struct Fp4Sums {
  float4 weights[(kHeads / 8 + 1) / 2][4];  // of heads 8 j + 2 q, + 1, two j each
};
// A finite weight beyond it would not bear the factor: Slow serves such queries.
constexpr float kLargestWeight = 0x1p100f;

// Block; a barrier before and after.
template <int kHeads>
__device__ inline void MakeSums(const ScanQuery& query, Fp4Sums<kHeads>* sums) {
  const int i = threadIdx.x, j = i / 4, quad = i % 4;
  if (i >= kHeads / 2) return;
  const float4 pair = query.pairs[i];
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

// WgmmaU8S8 of signed A.
template <bool kAdd>
__device__ inline void WgmmaS8S8(int32_t (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
      "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, %37;"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]),
        "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]),
        "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]),
        "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]),
        "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}
template <bool kAdd>
__device__ inline void WgmmaS8S8(int32_t (&d)[4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, %9;"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdd ? 1 : 0));
}

// ScoreOwnRow for FP4 keys in signed bytes. sums: from the lane's first one on. meanwhile() runs
// once, while products do.
template <int kHeads, class Meanwhile>
__device__ inline float ScoreOwnFp4Row(const PageTile<Fp4Keys>& tile, uint64_t image,
                                       const char* sums, bool odd, Meanwhile&& meanwhile) {
  const auto* const weights = reinterpret_cast<const float4*>(sums);
  constexpr int kN = kHeads >= 64 ? 64 : 8;
  float a = 0, b = 0;
#pragma unroll
  for (int first = 0; first < kHeads; first += kN) {
    int32_t sum[kN / 2];
    WgmmaFence();
    WgmmaS8S8<false>(sum, tile.a[0], image + first * 8);
#pragma unroll
    for (int s = 1; s < Fp4Keys::kSteps; ++s) {
      WgmmaS8S8<true>(sum, tile.a[s], image + first * 8 + s * 2);
    }
    WgmmaCommit();
    if (first == 0) meanwhile();
    WgmmaWait<0>();
    const auto add = [](float& to, float weight, int32_t bits) {
      const float relu = __saturatef(__fmul_rn(__int_as_float(bits), 0x1p126f));
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
  // A shuffled index stays in a register; the plain one would be read again in every turn.
  const uint32_t thread = __shfl_sync(0xffffffffu, threadIdx.x, threadIdx.x % 32);
  const auto lane = static_cast<int>(thread % 32), warp = static_cast<int>(thread / 32 % 4),
             group = static_cast<int>(thread / 128);
  const auto query_at = static_cast<int32_t>((1024 - (SharedAddress(memory) & 1023u)) % 1024);
  const int32_t ring_at = query_at + Shape::kTiles + group * kStages * kTileBytes<Keys>;
  char* const query = memory + query_at;
  auto& s = *reinterpret_cast<RingShared*>(query + Shape::kShared);
  // What a lane needs for every tile: bytes from `memory`.
  const LanePart<Keys> part = PartOfLane<Keys>(thread);
  const int32_t codes_at = ring_at + part.codes, scales_at = ring_at + part.scales;
  const int32_t sums_at = query_at + (Keys::kFp4 ? Shape::kSums : kPacked.Pairs()) + lane % 4 * 16;
  const int32_t full_at = query_at + Shape::kShared +
                          static_cast<int32_t>(offsetof(RingShared, full)) +
                          group * static_cast<int32_t>(sizeof(RingShared::full[0]));
  const bool odd = lane % 2 != 0;
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
    // The first stages are asked for before the kernel in front has ended, but for the last rows.
    const uint32_t first_fill = turn + (warp - turn) % kStages;
    const bool is_old =
        origin + static_cast<int32_t>(first_fill) * kGroups < rows / kScanRows - kNewTiles;
#pragma unroll 1
    for (int late = 0; late < 2; ++late) {
      if (warp < kStages && is_old == (late == 0)) fill(first_fill, true);
      WaitForPrevious();
    }

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
      DecodePage</*kSigned=*/true>(memory + codes_at + in_stage, memory + scales_at + in_stage, odd,
                                   &tile);
      const auto refill = [&] {
        SyncNamed(1 + group, 128);  // the group has read the stage
        if (stage == static_cast<uint32_t>(warp)) fill(turn + kStages, false);
      };
      float score;
      if constexpr (Keys::kFp4) {
        score = ScoreOwnFp4Row<kHeads>(tile, image, memory + sums_at, odd, refill);
      } else {
        refill();
        score = ScoreOwnRow<Keys, kHeads>(tile, image,
                                          reinterpret_cast<const float4*>(memory + sums_at), odd);
      }
      const bool mine = to < to_end;
      if (mine) p.scores[to] = score;
      StoreGroup(p, to, score, mine, lane);
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
        const int32_t own_row = row + (odd ? 8 : 0);
        const bool mine = lane % 4 < 2 && own_row < rows;
        const uint32_t own_at = token_at + static_cast<uint32_t>(own_row);
        if (mine) p.scores[own_at] = score;
        StoreGroup(p, own_at, score, mine, lane);
      }
    }
  }
  WaitForPrevious();
}

}  // namespace fathom::ops::cuda
