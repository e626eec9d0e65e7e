// The indexer of few tokens of short contexts in one launch: a cluster of blocks per token, with
// the bits of PrepareQuery, ScanRows and SelectRows.
//
//   prepare   A warp per head, heads dealt over the cluster. What it packs goes to the shared
//             memory of all blocks, counted by their barriers.
//   score     A warpgroup takes a tile of 64 rows or two; tiles are dealt over the cluster. Scores
//             go to the first block's shared memory.
//   select    The first block finds the k-th largest key by histograms, and takes of the rows that
//             share it the lowest.
#pragma once

#include <cooperative_groups.h>

#include "ops/indexer/cuda_pages.cuh"
#include "ops/indexer/cuda_select.cuh"

namespace fathom::ops::cuda {

constexpr int kShortTokens = 8;
constexpr int kShortRows = 4096;
constexpr int kShortCluster = 8;
constexpr int kShortThreads = 512;
constexpr int kShortWarps = kShortThreads / 32;
constexpr int kShortGroups = kShortThreads / 128;
constexpr int kShortTiles = kShortRows / kScanRows / kShortCluster;  // of a block, at most
constexpr int kShortBins = 2048;

struct ShortShared {
  uint64_t query;        // the packed query is there
  uint64_t scores_here;  // of all visible rows; of the first block
  uint64_t tile[kShortTiles];
  float scores[kShortRows];
  uint32_t bins[kShortBins];
  uint32_t lowest[kShortWarps], highest[kShortWarps], sums[2][kShortWarps];
  uint32_t few[kFew];
  uint32_t bin, remaining, in_bin;
  uint32_t bar, ties;
  int32_t count;
};

template <class Keys, int kHeads>
struct ShortLayout {
  static constexpr int kTiles = (PackedLayout{kHeads, Keys::kFp4}.Bytes() + 1023) / 1024 * 1024;
  static constexpr int kShared = kTiles + kShortTiles * kTileBytes<Keys>;
  static constexpr int64_t kBytes = 1024 + kShared + int64_t{sizeof(ShortShared)};
};

// Shared memory of another block of the cluster: the address there of what lies at `address` here.
__device__ inline uint32_t RemoteAddress(uint32_t address, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// Stores there and counts the 4 bytes at `barrier` of the same block.
__device__ inline void StoreAt(uint32_t remote, uint32_t value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          remote),
      "r"(value), "r"(barrier)
      : "memory");
}

// A lane's words of a packed head, and where they lie in a packed query. A few lanes hold one more.
template <class Keys>
struct PackedWords {
  static constexpr int kWords = Keys::kFp4 ? 1 : 2;
  uint32_t word[kWords], at[kWords];
  uint32_t rest, rest_at;
  bool has_rest;
};

template <class Keys>
__device__ inline PackedWords<Keys> PackWords(const float (&v)[4], float w, int head,
                                              const PackedLayout& layout) {
  const int lane = threadIdx.x % 32;
  PackedWords<Keys> out;
  const auto pair_at = static_cast<uint32_t>(layout.Pairs() + head / 2 * 16 + head % 2 * 4);
  if constexpr (Keys::kFp4) {
    const Fp4Head made = MakeFp4Head(v, w);
    out.word[0] = made.word;
    out.at[0] = Fp4WordOffset(head, lane);
    // Lanes 0, 1, 2: the pair's two and `aligned`; lanes 3, 11, 19, 27: a block each.
    out.has_rest = lane < 3 || lane % 8 == 3;
    out.rest = __float_as_uint(lane == 0 ? made.weight : lane == 1 ? made.excess : made.block);
    out.rest_at = lane < 2 ? pair_at + 8 * lane : layout.Blocks() + head * 16 + lane / 8 * 4;
    if (lane == 2) {
      out.rest = static_cast<uint32_t>(made.aligned);
      out.rest_at = layout.Aligned() + head * 4;
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      out.word[half] = Bf16Word(v[2 * half], v[2 * half + 1]);
      out.at[half] = Bf16WordOffset(head, lane, half, layout);
    }
    out.has_rest = lane < 2;
    out.rest = lane == 0 ? __float_as_uint(w) : 0;
    out.rest_at = pair_at + 8 * lane;
  }
  return out;
}

// Exclusive sum over the block. `sums` are kShortWarps words that nobody else uses.
__device__ inline uint32_t ShortSum(uint32_t* sums, uint32_t mine) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t below = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += below;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  const uint32_t before = __reduce_add_sync(0xffffffffu, lane < warp ? sums[lane] : 0);
  return before + sum - mine;
}

// The best k of `visible` > k scores in s.scores, ascending rows to `out`. Block. Bins are zero.
__device__ inline void SelectShort(ShortShared& s, int32_t visible, int k, int32_t* out) {
  static_assert(kShortBins == 4 * kShortThreads && kShortRows <= 8 * kShortThreads);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // A thread has neighbouring rows. Those beyond the last are in no range of keys.
  const int32_t each = (visible + kShortThreads - 1) / kShortThreads;
  const int32_t first = static_cast<int32_t>(threadIdx.x) * each;
  const int32_t mine = min(each, visible - first);
  uint32_t key[8];
  uint32_t low = 0xffffffffu, high = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    key[i] = 0;
    if (i < mine) {
      key[i] = KeyOf(s.scores[first + i]);
      low = min(low, key[i]);
      high = max(high, key[i]);
    }
  }
  low = __reduce_min_sync(0xffffffffu, low);
  high = __reduce_max_sync(0xffffffffu, high);
  if (lane == 0) {
    s.lowest[warp] = low;
    s.highest[warp] = high;
  }
  __syncthreads();
  low = __reduce_min_sync(0xffffffffu, s.lowest[lane % kShortWarps]);
  high = __reduce_max_sync(0xffffffffu, s.highest[lane % kShortWarps]);

  // Rows of keys above `bar` are taken, and the lowest `ties` of those at it.
  uint32_t bar, ties;
  auto remaining = static_cast<uint32_t>(k);  // wanted of the keys from low to high
  while (true) {
    // Bins of equal width, the largest keys in the first one.
    const int shift = max(0, 21 - __clz(static_cast<int>(high - low)));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < mine && key[i] >= low && key[i] <= high) {
        atomicAdd(&s.bins[(high - key[i]) >> shift], 1u);
      }
    }
    __syncthreads();
    auto& four = reinterpret_cast<uint4*>(s.bins)[threadIdx.x];
    const uint32_t bin[4] = {four.x, four.y, four.z, four.w};
    four = {0, 0, 0, 0};
    uint32_t before = ShortSum(s.sums[0], bin[0] + bin[1] + bin[2] + bin[3]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (before < remaining && before + bin[i] >= remaining) {
        s.bin = 4 * threadIdx.x + i;
        s.remaining = remaining - before;
        s.in_bin = bin[i];
      }
      before += bin[i];
    }
    __syncthreads();
    high -= s.bin << shift;
    low = high - min(high - low, (1u << shift) - 1);
    remaining = s.remaining;
    const uint32_t count = s.in_bin;
    if (count == remaining || shift == 0) {
      bar = low;
      ties = remaining;
      break;
    }
    if (count > kFew) continue;
      // Few enough that each finds its own place.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < mine && key[i] >= low && key[i] <= high) s.few[atomicAdd(&s.count, 1)] = key[i];
    }
    __syncthreads();
    if (threadIdx.x < count) {
      const uint32_t own = s.few[threadIdx.x];
      uint32_t larger = 0, equal = 0;
      for (uint32_t i = 0; i < count; ++i) {
        larger += s.few[i] > own ? 1u : 0u;
        equal += s.few[i] == own ? 1u : 0u;
      }
      if (larger < remaining && larger + equal >= remaining) {
        s.bar = own;
        s.ties = remaining - larger;
      }
    }
    __syncthreads();
    bar = s.bar;
    ties = s.ties;
    break;
  }

  uint32_t counts = 0;  // above the bar, and at it in the upper half
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < mine) counts += key[i] > bar ? 1u : key[i] == bar ? 1u << 16 : 0u;
  }
  const uint32_t sum = ShortSum(s.sums[1], counts);
  uint32_t above = sum & 0xffffu, at = sum >> 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i >= mine) continue;
    const bool tied = key[i] == bar;
    if (key[i] > bar || (tied && at < ties)) out[above + min(at, ties)] = first + i;
    above += key[i] > bar ? 1u : 0u;
    at += tied ? 1u : 0u;
  }
}

// grid (kShortCluster blocks for each token of the step). q and w in bf16.
template <class Keys, int kHeads>
__global__ void __launch_bounds__(kShortThreads)
    IndexShort(const __grid_constant__ IndexerParams p) {
  namespace cg = cooperative_groups;
  extern __shared__ char memory[];
  using Layout = ShortLayout<Keys, kHeads>;
  constexpr PackedLayout kPacked{kHeads, Keys::kFp4};
  char* const query = memory + (1024 - (SharedAddress(memory) & 1023u)) % 1024;
  char* const tiles = query + Layout::kTiles;
  auto& s = *reinterpret_cast<ShortShared*>(query + Layout::kShared);
  const cg::cluster_group cluster = cg::this_cluster();
  const auto rank = static_cast<int32_t>(cluster.block_rank());
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = threadIdx.x / 128;
  const int64_t token = blockIdx.x / kShortCluster;
  if (threadIdx.x == 0) {
    BarrierInit(&s.query, 1);
    BarrierInit(&s.scores_here, 1);
    for (auto& barrier : s.tile) BarrierInit(&barrier, 1);
    FenceBarrierInit();
    BarrierArriveExpecting(&s.query, kPacked.Bytes());
    s.count = 0;
  }
  reinterpret_cast<uint4*>(s.bins)[threadIdx.x] = {0, 0, 0, 0};
  __syncthreads();
  auto arrived = cluster.barrier_arrive();
  LetNextStart();
  WaitForPrevious();

  // Loads whose addresses are known; what lies beyond the tables' ends is not asked for.
  const int head = warp * kShortCluster + rank;  // at most one a warp
  const bool real = head < p.heads;
  auto* const q = static_cast<__nv_bfloat16*>(p.q) + token * p.q_stride + int64_t{head} * kIndexDim;
  float v[4] = {};
  float w = 0;
  float4 table = {};  // cos, sin twice
  const int32_t visible = VisibleRows(p, token);
  const int32_t sequence = p.step.sequence[token];
  if (real) {
    LoadWarpRow(q, v, lane);
    if (lane >= 16) table = reinterpret_cast<const float4*>(p.rope + token * kRopeDim)[lane - 16];
    w = LoadFloat(p.w, true, token * p.w_stride + head);
  }
  int32_t* const out = p.selected + token * p.top_k;
  if (!IsScored(p, visible)) {
    cluster.barrier_wait(std::move(arrived));
    if (rank != 0) return;
    for (int i = threadIdx.x; i < p.top_k; i += kShortThreads) out[i] = i < visible ? i : -1;
    if (threadIdx.x == 0) p.counts[token] = visible;
    return;
  }

  KeyRows keys;
  keys.pages = p.keys;
  keys.page_shift = p.page_shift;
  keys.blocks = p.step.block_table + int64_t{sequence} * p.step.max_blocks;
  const int32_t tile_count = (visible + kScanRows - 1) / kScanRows;
  const auto tile_of = [&](int slot) { return slot * kShortCluster + rank; };
  if (warp == kShortWarps - 1 && lane < kShortTiles && tile_of(lane) < tile_count) {
    const int32_t tile = tile_of(lane);
    BarrierArriveExpecting(&s.tile[lane], kTileBytes<Keys>);
    CopyTile<Keys>(p, __ldg(keys.blocks + PageOfTile(p, tile)), tile,
                   tiles + lane * kTileBytes<Keys>, &s.tile[lane]);
  }
  __syncwarp();
  PackedWords<Keys> packed;
  if (head < kHeads) {
    if (real) PrepareHead(p, table, q, token * p.w_stride + head, v, &w);
    packed = PackWords<Keys>(v, w, head, kPacked);
  }
  cluster.barrier_wait(std::move(arrived));  // the others' barriers are set
  if (head < kHeads) {
#pragma unroll
    for (int r = 0; r < kShortCluster; ++r) {
      const uint32_t to = RemoteAddress(SharedAddress(query), r);
      const uint32_t barrier = RemoteAddress(SharedAddress(&s.query), r);
#pragma unroll
      for (int i = 0; i < PackedWords<Keys>::kWords; ++i) {
        StoreAt(to + packed.at[i], packed.word[i], barrier);
      }
      if (packed.has_rest) StoreAt(to + packed.rest_at, packed.rest, barrier);
    }
  }

  const uint32_t scores_to = RemoteAddress(SharedAddress(s.scores), 0);
  const uint32_t scores_here = RemoteAddress(SharedAddress(&s.scores_here), 0);
  const LanePart<Keys> part = PartOfLane<Keys>(threadIdx.x);
  const ScanQuery packed_query = QueryAt<Keys, kHeads>(query);
  const bool odd = lane % 2 != 0;
#pragma unroll 1
  for (int slot = group; tile_of(slot) < tile_count; slot += kShortGroups) {
    PageTile<Keys> tile;
    BarrierWait(&s.tile[slot], 0);
    const char* const from = tiles + slot * kTileBytes<Keys>;
    DecodePage(from + part.codes, from + part.scales, odd, &tile);
    BarrierWaitCluster(&s.query, 0);
    FenceForWgmma();
    float score =
        ScoreOwnRow<Keys, kHeads>(tile, PanelDescriptor(SharedAddress(packed_query.image)),
                                  packed_query.pairs + lane % 4, odd);
    const int32_t first_row = tile_of(slot) * kScanRows;
    if constexpr (Keys::kFp4) {
      if (!tile.exact || Unaligned<Keys, kHeads>(query)) {
        score =
            SlowOwnRow<kHeads>(keys, first_row + warp % 4 * 16 + lane / 4, visible, packed_query);
      }
    }
    const int32_t row = first_row + part.row;
    if (lane % 4 < 2 && row < visible) {
      StoreAt(scores_to + 4 * static_cast<uint32_t>(row), __float_as_uint(score), scores_here);
    }
  }
  // Nobody leaves before everything that comes to it is there.
  BarrierWaitCluster(&s.query, 0);
  if (rank != 0) return;
  if (threadIdx.x == 0) {
    p.counts[token] = p.top_k;
    BarrierArriveExpecting(&s.scores_here, 4 * static_cast<uint32_t>(visible));
  }
  BarrierWaitCluster(&s.scores_here, 0);
  SelectShort(s, visible, p.top_k, out);
}

}  // namespace fathom::ops::cuda
