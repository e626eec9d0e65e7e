// The best k of a token's scores, in ascending order of rows, by a block per token.
//
// The scan leaves the best score of every 16 rows (a group). The k-th best of the groups is a floor
// that at least k rows reach, and hardly more: only the groups that reach it are read at all.
// Their rows at or above it are the candidates, in ascending order. Histograms find the k-th best
// candidate exactly; of the candidates that share its score the lowest rows are taken. Where many
// scores tie, too many may reach the floor for the list: then the k-th best is determined bit by
// bit from all scores.
//
// A block runs all of this once, so that fetching the code takes as long as running it. What
// threads hold several of lies in shared memory, not in registers, and loops stay loops. Half of a
// multiprocessor's registers suffice: a block can be there before the scan has ended.
#pragma once

#include "ops/indexer/cuda_scores.cuh"

namespace fathom::ops::cuda {

constexpr int kSelectThreads = 1024;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kSelectBins = 2 * kSelectThreads;
constexpr int kMaxUnits = 16 * kSelectThreads;  // one or more groups each, side by side
constexpr int kStagedVectors = 3;               // of four scores that a thread fetches at once
constexpr int kFew = 96;                        // keys that are ranked by comparing all with all

// Candidates, and units that reach the floor, of which each has a candidate. All rows of the units
// fit that the floor lets in where they do not tie.
__host__ __device__ constexpr int CandidateCapacity(int k) {
  const int wanted = kGroupRows * (k < 1024 ? k + k / 8 : 1024);
  return wanted < 8192 ? 8192 : wanted < kMaxUnits ? wanted : kMaxUnits;
}

struct SelectShared {
  uint64_t groups_here;
  uint32_t sums[2][kSelectWarps];
  uint32_t lowest[kSelectWarps], highest[kSelectWarps];
  uint32_t few[kFew];
  uint32_t bin, remaining, in_bin;
  uint32_t bar, ties;
  int32_t count;
  alignas(16) uint32_t bins[kSelectBins];
  alignas(16) float staged[kStagedVectors][kSelectThreads][4];
};

// Behind it the candidates: keys, then rows. The best of the units lie there before them, and the
// units that reach the floor behind them.
__host__ __device__ constexpr int64_t CandidateBytes(int k) {
  return CandidateCapacity(k) * int64_t{8} > kMaxUnits * int64_t{4}
             ? CandidateCapacity(k) * int64_t{8}
             : kMaxUnits * int64_t{4};
}
constexpr int64_t SelectSharedBytes(int k) {
  return static_cast<int64_t>(sizeof(SelectShared)) + CandidateBytes(k) +
         CandidateCapacity(k) * int64_t{2};
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
  const uint32_t at =
      __reduce_add_sync(0xffffffffu, lane < static_cast<int>(threadIdx.x / 32) ? other : 0);
  const uint32_t before = sum - counts;
#pragma unroll 1
  for (uint32_t rest = taken; rest != 0; rest &= rest - 1) {
    const int bit = __ffs(static_cast<int>(rest)) - 1, v = bit / 4;
    // Of the warp's vectors before this one, of the lanes before, of the lane itself.
    const uint32_t earlier = all & ((1u << (8 * v)) - 1);
    const uint32_t two = (earlier & 0xff00ffu) + (earlier >> 8 & 0xff00ffu);
    write(at + (two & 0xffffu) + (two >> 16) + (before >> (8 * v) & 0xffu) +
              __popc(taken >> (4 * v) & ((1u << bit % 4) - 1)),
          v, bit % 4);
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
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < n; i += kSelectThreads) fn(keys[i]);
  };
  auto wanted = static_cast<uint32_t>(k);
  if (threadIdx.x == 0) s.count = 0;
#pragma unroll 1
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
#pragma unroll 1
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
#pragma unroll 1
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

// A key that at least k of the units reach and little more; lists the units that reach it,
// ascending, unless there are more than `capacity`, and returns their number. keys: the units' best
// in shared memory, multiples of four with zeros at the end; `most` becomes the largest. Block.
__device__ inline uint32_t FindUnits(SelectShared& s, const uint32_t* keys, int32_t units, int k,
                                     uint16_t* list, uint32_t capacity, uint32_t* floor,
                                     uint32_t* most) {
  const int vectors = (units + 4 * kSelectThreads - 1) / (4 * kSelectThreads);
  const int32_t mine = FirstOfThread(vectors);
  const auto each = [&](auto&& fn) {
#pragma unroll 1
    for (int v = 0; v < vectors; ++v) {
      if (mine + 128 * v < units) fn(v, *reinterpret_cast<const uint4*>(keys + mine + 128 * v));
    }
  };
  // Bounds of the thread's keys. Zeros become the largest number.
  uint32_t low = 0xffffffffu, high = 0;
  each([&](int, const uint4& four) {
    high = max(high, max(max(four.x, four.y), max(four.z, four.w)));
    low = min(low, min(min(four.x - 1, four.y - 1), min(four.z - 1, four.w - 1)));
  });
  // Threads' best suffice as a lower bound where there are k of them.
  const int32_t threads = min(kSelectThreads, (units / 128 / vectors) * 32);  // that have units
  if (threads >= k && high != 0) low = high;
  BlockRange(s, &low, &high);
  *most = high;
  // The floor may let in a few more than it has to.
  auto wanted = static_cast<uint32_t>(k);
#pragma unroll 1
  while (true) {
    const uint32_t in_bin = Narrow(s, &low, &high, &wanted, [&](auto&& fn) {
      each([&](int, const uint4& four) { fn(four.x), fn(four.y), fn(four.z), fn(four.w); });
    });
    if (low == high || in_bin - wanted <= static_cast<uint32_t>(k) / 8) break;
  }
  *floor = low;
  uint32_t taken = 0;
  each([&](int v, const uint4& four) {
    taken |= (four.x >= low ? 1u : 0u) << (4 * v) | (four.y >= low ? 2u : 0u) << (4 * v) |
             (four.z >= low ? 4u : 0u) << (4 * v) | (four.w >= low ? 8u : 0u) << (4 * v);
  });
  const uint32_t total = NumberTaken(s.sums[1], taken, [&](uint32_t number, int v, int i) {
    if (number < capacity) list[number] = static_cast<uint16_t>(mine + 128 * v + i);
  });
  __syncthreads();
  return total;
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

// grid (tokens of the pass, and behind them, where clusters of ScanRing have prepared queries,
// blocks that do it in place: a warp per padded head).
static __global__ void __launch_bounds__(kSelectThreads, 2)
    SelectRows(const __grid_constant__ IndexerParams p) {
  extern __shared__ __align__(128) char memory[];
  auto& s = *reinterpret_cast<SelectShared*>(memory);
  const int k = p.top_k;
  const auto capacity = static_cast<uint32_t>(CandidateCapacity(k));
  auto* const keys = reinterpret_cast<uint32_t*>(memory + sizeof(SelectShared));
  auto* const rows = reinterpret_cast<int32_t*>(keys + capacity);
  auto* const list = reinterpret_cast<uint16_t*>(memory + sizeof(SelectShared) + CandidateBytes(k));
  reinterpret_cast<uint2*>(s.bins)[threadIdx.x] = {0, 0};
  if (threadIdx.x == 0) {
    BarrierInit(&s.groups_here, 1);
    FenceBarrierInit();
  }
  LetNextStart();
  if (p.shared_query && blockIdx.x >= p.num_tokens) {
    WaitForPrevious();
    PrepareInPlace<__nv_bfloat16>(
        p, (int64_t{blockIdx.x} - p.num_tokens) * kSelectWarps + threadIdx.x / 32);
    return;
  }
  const int32_t visible = VisibleRows(p, p.first_token + blockIdx.x);
  int32_t* const out = p.selected + (p.first_token + int64_t{blockIdx.x}) * k;
  __syncthreads();
  WaitForPrevious();
  if (threadIdx.x == 0) p.counts[p.first_token + blockIdx.x] = min(visible, k);
  if (visible <= k) {
#pragma unroll 1
    for (int i = threadIdx.x; i < k; i += kSelectThreads) out[i] = i < visible ? i : -1;
    return;
  }
  if (k == 0) return;
  const float* const scores = p.scores + blockIdx.x * p.scores_stride;
  const int32_t group_count = (visible + kGroupRows - 1) / kGroupRows;
  const int span_log = max(0, 32 - __clz((group_count - 1) / kMaxUnits));  // a power of two
  const int32_t units = ((group_count - 1) >> span_log) + 1;
  const bool all = units <= k;
  uint32_t floor = 0, most = 0;
  auto pieces = static_cast<uint32_t>((visible + 3) / 4);  // of four rows, to look at
  if (!all) {
    const uint32_t* const groups = p.groups + blockIdx.x * p.scores_stride / kGroupRows;
    if (span_log == 0) {
      // The groups of the last 64 rows are all there.
      const auto bytes = static_cast<uint32_t>((units + 3) / 4 * 16);
      if (threadIdx.x == 0) {
        BarrierArriveExpecting(&s.groups_here, bytes);
        CopyBulk(keys, groups, bytes, &s.groups_here);
      }
      BarrierWait(&s.groups_here, 0);
    } else {
#pragma unroll 1
      for (int32_t unit = threadIdx.x; unit < (units + 3) / 4 * 4; unit += kSelectThreads) {
        uint32_t best = 0;
#pragma unroll 4
        for (int32_t i = 0; i < 1 << span_log; ++i) {
          const int32_t group = (unit << span_log) + i;
          if (group < group_count) best = max(best, groups[group]);
        }
        keys[unit] = best;
      }
      __syncthreads();
    }
    const uint32_t reach = FindUnits(s, keys, units, k, list, capacity, &floor, &most);
    // More than the list holds have more candidates, too.
    pieces = reach > capacity ? 0 : reach << (2 + span_log);
  }

  // Candidates in ascending order of rows.
  const auto row_of = [&](uint32_t piece) {
    if (piece >= pieces) return visible;
    if (all) return static_cast<int32_t>(4 * piece);
    const uint32_t unit = list[piece >> (2 + span_log)];
    return static_cast<int32_t>((unit << (4 + span_log)) + (piece & ((4u << span_log) - 1)) * 4);
  };
  uint32_t n = 0, low = 0xffffffffu, high = 0;
  const auto vectors = static_cast<int>(
      min(uint32_t{kStagedVectors}, (pieces + kSelectThreads - 1) / kSelectThreads));
  int turn = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < pieces; first += vectors * kSelectThreads) {
    // A vector of FirstOfThread is 32 pieces here, of four rows each.
    const uint32_t mine = first + static_cast<uint32_t>(FirstOfThread(vectors)) / 4;
#pragma unroll 1
    for (int v = 0; v < vectors; ++v) {
      const int32_t row = row_of(mine + 32 * v);
      if (row < visible) CopyAsync16(SharedAddress(s.staged[v][threadIdx.x]), scores + row);
    }
    CopyAsyncCommit();
    CopyAsyncWaitFor<0>();
    uint32_t taken = 0;
#pragma unroll 1
    for (int v = 0; v < vectors; ++v) {
      const int32_t end = visible - row_of(mine + 32 * v);  // of the rows from this one on
      const float4 four = *reinterpret_cast<const float4*>(s.staged[v][threadIdx.x]);
      const float values[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t key = KeyOf(values[i]);
        if (i < end && key >= floor) {
          taken |= 1u << (4 * v + i);
          low = min(low, key);
          high = max(high, key);
        }
      }
    }
    n += NumberTaken(s.sums[turn ^= 1], taken, [&](uint32_t number, int v, int i) {
      if (n + number < capacity) {
        keys[n + number] = KeyOf(s.staged[v][threadIdx.x][i]);
        rows[n + number] = row_of(mine + 32 * v) + i;
      }
    });
  }
  if (n < static_cast<uint32_t>(k) || n > capacity) {
    __syncthreads();
    SelectFromAll(s, scores, visible, k, out);
    return;
  }
  if (all) {
    BlockRange(s, &low, &high);
  } else {
    low = floor;
    high = most;
    __syncthreads();
  }
  uint32_t ties = 0;
  const auto count = static_cast<int32_t>(n);
  const uint32_t bar = FindBar(s, keys, count, k, low, high, &ties);
  WriteBest(
      s, keys, count, bar, ties, [&](int32_t i) { return rows[i]; }, out);
}

}  // namespace fathom::ops::cuda
