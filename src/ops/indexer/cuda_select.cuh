// The best k of a token's scores, in ascending order of rows, by a block per token.
//
// The scan leaves the best score of every 16 rows (a group). The k-th best of the groups is a floor
// that at least k rows reach, and hardly more: only the groups that reach it are read at all.
// Their rows at or above it are the candidates, in ascending order. Histograms find the k-th best
// candidate exactly; of the candidates that share its score the lowest rows are taken. Where many
// scores tie, too many may reach the floor for the list: then the k-th best is determined bit by
// bit from all scores.
#pragma once

#include "ops/indexer/cuda_scores.cuh"

namespace fathom::ops::cuda {

constexpr int kSelectThreads = 1024;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kSelectBins = 2 * kSelectThreads;
constexpr int kMaxUnits = 16 * kSelectThreads;  // one or more groups each, side by side
constexpr int kAllRows = 8192;                  // so many are all read
constexpr int kFew = 96;                        // keys that are ranked by comparing all with all

__host__ __device__ constexpr int CandidateCapacity(int k) {
  const int wanted = kGroupRows * (k < 1024 ? k : 1024) + 2048;
  return wanted < 16 * kSelectThreads ? wanted : 16 * kSelectThreads;
}

struct SelectShared {
  uint32_t sums[2][kSelectWarps];
  uint32_t lowest[kSelectWarps], highest[kSelectWarps];
  uint32_t few[kFew];
  uint32_t bin, remaining, in_bin;
  uint32_t bar, ties;
  int32_t count;
  uint32_t bins[kSelectBins];
  uint16_t units[kMaxUnits];  // that reach the floor
};

// Behind it the candidates: keys, then rows.
constexpr int64_t SelectSharedBytes(int k) {
  return static_cast<int64_t>(sizeof(SelectShared)) + CandidateCapacity(k) * int64_t{8};
}

// Exclusive sum over the block; *total of all. `sums` are kSelectWarps words that nobody else uses
// before the next barrier but one.
__device__ inline uint32_t BlockSum(uint32_t* sums, uint32_t mine, uint32_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t below = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += below;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  const uint32_t other = sums[lane];
  *total = __reduce_add_sync(0xffffffffu, other);
  return __reduce_add_sync(0xffffffffu, lane < warp ? other : 0) + sum - mine;
}

// Where a thread's sixteen of 16,384 neighbours lie, of which a warp has `vectors` times 128: four
// each, in ascending order of warp, vector and lane. Returned: of vector 0.
__device__ inline int32_t FirstOfThread(int vectors) {
  return static_cast<int32_t>(threadIdx.x / 32) * vectors * 128 +
         static_cast<int32_t>(threadIdx.x % 32) * 4;
}

// Numbers the taken ones of a block's sixteen times 1,024 in their order: bit 4 v + i of `taken` is
// value i of vector v. write(number, v, i) for each; returns how many there are. Block.
template <class Write>
__device__ inline uint32_t NumberTaken(uint32_t* sums, uint32_t taken, Write&& write) {
  const int lane = threadIdx.x % 32;
  uint32_t counts = 0;  // a byte per vector: at most 128 of a warp
#pragma unroll
  for (int v = 0; v < 4; ++v) counts |= __popc(taken >> (4 * v) & 0xfu) << (8 * v);
  uint32_t sum = counts;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t below = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += below;
  }
  const uint32_t all = __shfl_sync(0xffffffffu, sum, 31);
  const uint32_t pairs = (all & 0xff00ffu) + (all >> 8 & 0xff00ffu);
  const uint32_t of_warp = (pairs & 0xffffu) + (pairs >> 16);
  if (lane == 31) sums[threadIdx.x / 32] = of_warp;
  __syncthreads();
  const uint32_t other = sums[lane];
  const uint32_t total = __reduce_add_sync(0xffffffffu, other);
  uint32_t at =
      __reduce_add_sync(0xffffffffu, lane < static_cast<int>(threadIdx.x / 32) ? other : 0);
  if (taken == 0) return total;
  const uint32_t before = sum - counts;
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    uint32_t number = at + (before >> (8 * v) & 0xffu);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((taken >> (4 * v + i) & 1u) != 0) write(number++, v, i);
    }
    at += all >> (8 * v) & 0xffu;
  }
  return total;
}

// The keys' bounds over the block, of each thread's own. A barrier between two calls.
__device__ inline void BlockRange(SelectShared& s, uint32_t* low, uint32_t* high) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t lowest = __reduce_min_sync(0xffffffffu, *low);
  const uint32_t highest = __reduce_max_sync(0xffffffffu, *high);
  if (lane == 0) {
    s.lowest[warp] = lowest;
    s.highest[warp] = highest;
  }
  __syncthreads();
  *low = __reduce_min_sync(0xffffffffu, s.lowest[lane]);
  *high = __reduce_max_sync(0xffffffffu, s.highest[lane]);
}

// Narrows [*low, *high], which at least *wanted of the keys reach, to the bin of equal width in
// which the *wanted-th largest lies; *wanted becomes its place there. each(fn) calls fn with every
// key of the thread. Bins are zero before and after; returns the keys in the bin. Block.
template <class Each>
__device__ inline uint32_t Narrow(SelectShared& s, uint32_t* low, uint32_t* high, uint32_t* wanted,
                                  Each&& each) {
  const uint32_t from = *low, to = *high;
  const int shift = max(0, 21 - __clz(static_cast<int>(to - from)));
  each([&](uint32_t key) {
    if (key >= from && key <= to) atomicAdd(&s.bins[(to - key) >> shift], 1u);
  });
  __syncthreads();
  auto& two = reinterpret_cast<uint2*>(s.bins)[threadIdx.x];
  const uint2 bin = two;
  two = {0, 0};
  uint32_t total;
  const uint32_t before = BlockSum(s.sums[0], bin.x + bin.y, &total);
  const uint32_t place = *wanted;
  if (before < place && before + bin.x + bin.y >= place) {
    const bool second = before + bin.x < place;
    s.bin = 2 * threadIdx.x + (second ? 1 : 0);
    s.remaining = place - before - (second ? bin.x : 0);
    s.in_bin = second ? bin.y : bin.x;
  }
  __syncthreads();
  *high = to - (s.bin << shift);
  *low = *high - min(*high - from, (1u << shift) - 1);
  *wanted = s.remaining;
  return s.in_bin;
}

// The k-th largest of the n keys, which lie from low to high, and how many of those equal to it
// belong to the largest k. Block; bins are zero.
__device__ inline uint32_t FindBar(SelectShared& s, const uint32_t* keys, int32_t n, int k,
                                   uint32_t low, uint32_t high, uint32_t* ties) {
  const auto each = [&](auto&& fn) {
    for (int32_t i = threadIdx.x; i < n; i += kSelectThreads) fn(keys[i]);
  };
  auto wanted = static_cast<uint32_t>(k);
  if (threadIdx.x == 0) s.count = 0;
  while (true) {
    const uint32_t count = Narrow(s, &low, &high, &wanted, each);
    if (count == wanted || low == high) {
      *ties = wanted;
      return low;
    }
    if (count <= kFew) break;
  }
  // Few enough that each finds its own place.
  each([&](uint32_t key) {
    if (key >= low && key <= high) s.few[atomicAdd(&s.count, 1)] = key;
  });
  __syncthreads();
  const int32_t count = s.count;
  if (static_cast<int32_t>(threadIdx.x) < count) {
    const uint32_t own = s.few[threadIdx.x];
    uint32_t larger = 0, equal = 0;
    for (int32_t i = 0; i < count; ++i) {
      larger += s.few[i] > own ? 1u : 0u;
      equal += s.few[i] == own ? 1u : 0u;
    }
    if (larger < wanted && larger + equal >= wanted) {
      s.bar = own;
      s.ties = wanted - larger;
    }
  }
  __syncthreads();
  *ties = s.ties;
  return s.bar;
}

// The rows of the keys above `bar`, and of the first `ties` of those equal to it. Block.
template <class Row>
__device__ inline void WriteBest(SelectShared& s, const uint32_t* keys, int32_t n, uint32_t bar,
                                 uint32_t ties, Row&& row, int32_t* out) {
  uint32_t above = 0, at = 0;  // of the keys before
  for (int32_t first = 0; first < n; first += kSelectThreads) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    const uint32_t key = i < n ? keys[i] : 0;
    const bool larger = i < n && key > bar, tied = i < n && key == bar;
    uint32_t total;
    // Two barriers apart: sums alternate.
    const uint32_t sum = BlockSum(s.sums[first / kSelectThreads % 2],
                                  larger ? 1u
                                  : tied ? 1u << 16
                                         : 0u,
                                  &total);
    const uint32_t mine_above = above + (sum & 0xffffu), mine_at = at + (sum >> 16);
    if (larger || (tied && mine_at < ties)) out[mine_above + min(mine_at, ties)] = row(i);
    above += total & 0xffffu;
    at += total >> 16;
  }
}

// The same from all scores, without candidates. Block.
__device__ inline void SelectFromAll(SelectShared& s, const float* scores, int32_t visible, int k,
                                     int32_t* out) {
  int turn = 0;
  const auto count = [&](uint32_t least) {
    uint32_t reached = 0, total = 0;
#pragma unroll 4
    for (int32_t row = threadIdx.x; row < visible; row += kSelectThreads) {
      reached += KeyOf(scores[row]) >= least ? 1u : 0u;
    }
    BlockSum(s.sums[turn ^= 1], reached, &total);
    return total;
  };
  uint32_t bar = 0;  // the k-th largest key
  for (int bit = 31; bit >= 0; --bit) {
    if (count(bar | 1u << bit) >= static_cast<uint32_t>(k)) bar |= 1u << bit;
  }
  const uint32_t ties = k - (bar == 0xffffffffu ? 0 : count(bar + 1));
  uint32_t above = 0, at = 0;
  for (int32_t first = 0; first < visible; first += kSelectThreads) {
    const int32_t row = first + static_cast<int32_t>(threadIdx.x);
    const uint32_t key = row < visible ? KeyOf(scores[row]) : 0;
    const bool larger = row < visible && key > bar, tied = row < visible && key == bar;
    uint32_t total;
    const uint32_t sum = BlockSum(s.sums[turn ^= 1], larger ? 1u : tied ? 1u << 16 : 0u, &total);
    const uint32_t mine_above = above + (sum & 0xffffu), mine_at = at + (sum >> 16);
    if (larger || (tied && mine_at < ties)) out[mine_above + min(mine_at, ties)] = row;
    above += total & 0xffffu;
    at += total >> 16;
  }
}

// A key that at least k of `units` units reach and little more, units being `span` groups each;
// lists these units in s.units, ascending, and returns their number. Block.
__device__ inline int32_t FindUnits(SelectShared& s, const uint32_t* groups, int32_t group_count,
                                    int32_t units, int32_t span, int k, uint32_t* floor) {
  const int vectors = (units + 4 * kSelectThreads - 1) / (4 * kSelectThreads);
  const int32_t mine = FirstOfThread(vectors);
  uint32_t key[16];
  if (span == 1) {
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      uint4 four = {};
      // The array ends at a multiple of four; what lies behind the last group is any.
      if (v < vectors && mine + 128 * v < units) {
        four = *reinterpret_cast<const uint4*>(groups + mine + 128 * v);
      }
      key[4 * v] = four.x, key[4 * v + 1] = four.y;
      key[4 * v + 2] = four.z, key[4 * v + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      key[i] = 0;
      const int32_t first = (mine + 128 * (i / 4) + i % 4) * span;
      for (int32_t j = first; i / 4 < vectors && j < min(first + span, group_count); ++j) {
        key[i] = max(key[i], groups[j]);
      }
    }
  }
  uint32_t valid = 0;
  uint32_t least = 0xffffffffu, most = 0;  // of the thread
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (i / 4 < vectors && mine + 128 * (i / 4) + i % 4 < units) {
      valid |= 1u << i;
      least = min(least, key[i]);
      most = max(most, key[i]);
    }
  }
  // Threads' best suffice as a lower bound where there are k of them.
  const int32_t threads = min(kSelectThreads, (units / 128 / vectors) * 32);  // that have units
  if (threads >= k && valid != 0) least = most;
  BlockRange(s, &least, &most);
  // The floor may let in a few more than it has to.
  auto wanted = static_cast<uint32_t>(k);
  uint32_t low = least, high = most;
  while (true) {
    const uint32_t in_bin = Narrow(s, &low, &high, &wanted, [&](auto&& fn) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if ((valid >> i & 1u) != 0) fn(key[i]);
      }
    });
    if (low == high || in_bin - wanted <= static_cast<uint32_t>(k) / 8) break;
  }
  *floor = low;
  uint32_t taken = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if ((valid >> i & 1u) != 0 && key[i] >= low) taken |= 1u << i;
  }
  const uint32_t total = NumberTaken(s.sums[1], taken, [&](uint32_t number, int v, int i) {
    s.units[number] = static_cast<uint16_t>(mine + 128 * v + i);
  });
  __syncthreads();
  return static_cast<int32_t>(total);
}

// The scores of visible rows for the caller. grid (blocks, tokens of the pass).
static __global__ void __launch_bounds__(256) CopyScores(const __grid_constant__ IndexerParams p) {
  LetNextStart();
  WaitForPrevious();
  const int64_t local = blockIdx.y, token = p.first_token + local;
  const int32_t visible = VisibleRows(p, token);
  if (!IsScored(p, visible)) return;
  for (auto row = static_cast<int32_t>(blockIdx.x * 256 + threadIdx.x); row < visible;
       row += static_cast<int32_t>(gridDim.x) * 256) {
    p.wanted_scores[token * p.wanted_stride + row] = p.scores[local * p.scores_stride + row];
  }
}

// grid (tokens of the pass).
static __global__ void __launch_bounds__(kSelectThreads)
    SelectRows(const __grid_constant__ IndexerParams p) {
  extern __shared__ __align__(16) char memory[];
  auto& s = *reinterpret_cast<SelectShared*>(memory);
  const int capacity = CandidateCapacity(p.top_k);
  auto* const keys = reinterpret_cast<uint32_t*>(memory + sizeof(SelectShared));
  auto* const rows = reinterpret_cast<int32_t*>(keys + capacity);
  const int64_t local = blockIdx.x, token = p.first_token + local;
  const int k = p.top_k;
  reinterpret_cast<uint2*>(s.bins)[threadIdx.x] = {0, 0};
  LetNextStart();
  const int32_t visible = VisibleRows(p, token);
  int32_t* const out = p.selected + token * k;
  WaitForPrevious();
  if (threadIdx.x == 0) p.counts[token] = min(visible, k);
  if (visible <= k) {
    for (int i = threadIdx.x; i < k; i += kSelectThreads) out[i] = i < visible ? i : -1;
    return;
  }
  if (k == 0) return;
  const float* const scores = p.scores + local * p.scores_stride;
  const int32_t group_count = (visible + kGroupRows - 1) / kGroupRows;
  const int32_t span = (group_count + kMaxUnits - 1) / kMaxUnits;
  const int32_t units = (group_count + span - 1) / span;
  uint32_t floor = 0;
  int32_t pieces = (visible + 3) / 4;  // of four rows, to look at
  const int32_t unit_pieces = span * kGroupRows / 4;
  const bool all = visible <= kAllRows || units <= k;
  if (!all) {
    pieces = unit_pieces * FindUnits(s, p.groups + local * p.scores_stride / kGroupRows,
                                     group_count, units, span, k, &floor);
  }

  // Candidates in ascending order of rows.
  uint32_t n = 0, low = 0xffffffffu, high = 0;
  const int vectors = min(4, (pieces + kSelectThreads - 1) / kSelectThreads);
  int turn = 0;
#pragma unroll 1
  for (int32_t first = 0; first < pieces; first += vectors * kSelectThreads) {
    const int32_t mine = first + FirstOfThread(vectors) / 4;
    // A vector of FirstOfThread is 32 pieces here, of four rows each.
    int32_t row[4];
    float4 four[4];
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int32_t piece = mine + 32 * v;
      row[v] = visible;
      if (v < vectors && piece < pieces) {
        row[v] = all ? 4 * piece
                     : static_cast<int32_t>(s.units[piece / unit_pieces]) * (4 * unit_pieces) +
                           piece % unit_pieces * 4;
      }
      four[v] = {};
      if (row[v] < visible) four[v] = *reinterpret_cast<const float4*>(scores + row[v]);
    }
    uint32_t key[16];
    uint32_t taken = 0;
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const float values[4] = {four[v].x, four[v].y, four[v].z, four[v].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        key[4 * v + i] = KeyOf(values[i]);
        if (row[v] + i < visible && key[4 * v + i] >= floor) {
          taken |= 1u << (4 * v + i);
          low = min(low, key[4 * v + i]);
          high = max(high, key[4 * v + i]);
        }
      }
    }
    n += NumberTaken(s.sums[turn ^= 1], taken, [&](uint32_t number, int v, int i) {
      if (n + number < static_cast<uint32_t>(capacity)) {
        keys[n + number] = key[4 * v + i];
        rows[n + number] = row[v] + i;
      }
    });
  }
  if (n < static_cast<uint32_t>(k) || n > static_cast<uint32_t>(capacity)) {
    __syncthreads();
    SelectFromAll(s, scores, visible, k, out);
    return;
  }
  BlockRange(s, &low, &high);
  uint32_t ties = 0;
  const auto count = static_cast<int32_t>(n);
  const uint32_t bar = FindBar(s, keys, count, k, low, high, &ties);
  WriteBest(
      s, keys, count, bar, ties, [&](int32_t i) { return rows[i]; }, out);
}

}  // namespace fathom::ops::cuda
