// The best k of a token's scores, in ascending order of rows, by a cluster of blocks per token.
//
// An entry is a 64-bit number that orders as the contract does: the score's key above, the inverted
// row below, so the larger entry wins and equal scores go to the lower row. Entries are unique:
// what is selected depends on nothing but the scores.
//
// A sample of the scores gives a floor that somewhat more than k rows reach. All blocks of the
// cluster collect the entries above it in the first block's shared memory, which finds the exact
// k-th among them. Where many scores tie the floor may let too many in; then the first block
// determines the k-th key bit by bit from the scores themselves.
#pragma once

#include <cooperative_groups.h>

#include "ops/indexer/cuda_query.cuh"

namespace fathom::ops::cuda {

constexpr int kSelectThreads = 512;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kSample = 2048;
constexpr int kFloorBits = 20;      // of a key that the sample's floor is exact to
constexpr int kWindowWords = 4096;  // of the bit set that sorts rows: 128K rows at a time
constexpr int kFew = 96;            // entries that are ranked by comparing all with all

using Entry = unsigned long long;

// Sorts like the score, -0 as +0; NaN below every number.
__device__ inline uint32_t KeyOf(float score) {
  const uint32_t bits = __float_as_uint(score);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t key = (bits >> 31) != 0 ? 0x80000000u - magnitude : 0x80000000u + magnitude;
  return magnitude > 0x7f800000u ? 0 : key;
}
__device__ inline Entry MakeEntry(uint32_t key, int32_t row) {
  return static_cast<Entry>(key) << 32 | (0xffffffffu - static_cast<uint32_t>(row));
}
__device__ inline int32_t RowOf(Entry entry) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(entry));
}

__host__ __device__ constexpr int CandidateCapacity(int k) {
  return 4096 + 2 * k;
}

struct SelectShared {
  Entry few[kFew];
  Entry found;
  uint32_t warp_sums[kSelectWarps];
  uint32_t bit_count[32];
  uint32_t digit, remaining, in_digit;
  int32_t count;
  int32_t base;
  uint32_t window[kWindowWords];
  uint32_t before[kWindowWords];  // bits in the words before
};

constexpr int64_t SelectSharedBytes(int k) {
  return static_cast<int64_t>(sizeof(SelectShared)) +
         CandidateCapacity(k) * static_cast<int64_t>(sizeof(Entry));
}

// Exclusive sum over the block; *total of all. Begins and ends with a barrier.
__device__ inline uint32_t BlockSum(SelectShared& s, uint32_t mine, uint32_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = mine;
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t below = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += below;
  }
  __syncthreads();
  if (lane == 31) s.warp_sums[warp] = sum;
  __syncthreads();
  uint32_t before = 0, all = 0;
  for (int i = 0; i < kSelectWarps; ++i) {
    if (i == warp) before = all;
    all += s.warp_sums[i];
  }
  *total = all;
  __syncthreads();
  return before + sum - mine;
}

// A key that at least the wanted number of sampled rows reach, exact to kFloorBits.
__device__ inline uint32_t SampleFloor(SelectShared& s, const float* scores, int32_t visible,
                                       int wanted) {
  uint32_t key[kSample / kSelectThreads];
#pragma unroll
  for (int i = 0; i < kSample / kSelectThreads; ++i) {
    const int64_t at = threadIdx.x + i * kSelectThreads;
    key[i] = KeyOf(scores[at * visible / kSample]);
  }
  if (threadIdx.x < 32) s.bit_count[threadIdx.x] = 0;
  __syncthreads();
  uint32_t floor = 0;
#pragma unroll 1
  for (int bit = 31; bit > 31 - kFloorBits; --bit) {
    const uint32_t raised = floor | 1u << bit;
    uint32_t reached = 0;
#pragma unroll
    for (int i = 0; i < kSample / kSelectThreads; ++i) reached += key[i] >= raised ? 1u : 0u;
    reached = __reduce_add_sync(0xffffffffu, reached);
    if (threadIdx.x % 32 == 0) atomicAdd(&s.bit_count[bit], reached);
    __syncthreads();
    if (s.bit_count[bit] >= static_cast<uint32_t>(wanted)) floor = raised;
  }
  return floor;
}

// A number that exactly k of the n >= k entries are not below. Block.
__device__ inline Entry KthLargest(SelectShared& s, const Entry* entries, int n, int k) {
  Entry low = ~Entry{0}, high = 0;  // of the entries still in question
  for (int i = threadIdx.x; i < n; i += kSelectThreads) {
    low = min(low, entries[i]);
    high = max(high, entries[i]);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    low = min(low, __shfl_xor_sync(0xffffffffu, low, offset));
    high = max(high, __shfl_xor_sync(0xffffffffu, high, offset));
  }
  if (threadIdx.x % 32 == 0) {
    s.few[threadIdx.x / 32] = low;
    s.few[kSelectWarps + threadIdx.x / 32] = high;
  }
  __syncthreads();
  for (int i = 0; i < kSelectWarps; ++i) {
    low = min(low, s.few[i]);
    high = max(high, s.few[kSelectWarps + i]);
  }
  constexpr int kBins = 4 * kSelectThreads;
  auto remaining = static_cast<uint32_t>(k);  // wanted of those in question
  while (true) {
    // Bins of equal width, the largest entries in the first one.
    const int shift = max(0, 64 - 11 - __clzll(static_cast<long long>(high - low)));
    for (int i = 0; i < 4; ++i) s.window[threadIdx.x + i * kSelectThreads] = 0;
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kSelectThreads) {
      const Entry entry = entries[i];
      if (entry >= low && entry <= high) {
        atomicAdd(&s.window[kBins - 1 - static_cast<int>((entry - low) >> shift)], 1u);
      }
    }
    __syncthreads();
    uint32_t bin[4], mine = 0, total = 0;
    for (int i = 0; i < 4; ++i) {
      bin[i] = s.window[4 * threadIdx.x + i];
      mine += bin[i];
    }
    uint32_t before = BlockSum(s, mine, &total);
    for (int i = 0; i < 4; ++i) {
      if (before < remaining && before + bin[i] >= remaining) {
        s.digit = kBins - 1 - (4 * threadIdx.x + i);
        s.remaining = remaining - before;
        s.in_digit = bin[i];
      }
      before += bin[i];
    }
    __syncthreads();
    low += static_cast<Entry>(s.digit) << shift;
    high = min(high, low + ((Entry{1} << shift) - 1));
    remaining = s.remaining;
    const uint32_t count = s.in_digit;
    if (count == remaining || shift == 0) return low;
    if (count > kFew) continue;
    // Few enough that each finds its own place.
    for (int i = threadIdx.x; i < n; i += kSelectThreads) {
      if (entries[i] >= low && entries[i] <= high) s.few[atomicAdd(&s.count, 1)] = entries[i];
    }
    __syncthreads();
    if (threadIdx.x < count) {
      const Entry own = s.few[threadIdx.x];
      uint32_t larger = 0;
      for (uint32_t i = 0; i < count; ++i) larger += s.few[i] > own ? 1u : 0u;
      if (larger + 1 == remaining) s.found = own;
    }
    __syncthreads();
    return s.found;
  }
}

// Writes the rows of the entries that reach `least`, ascending. Block.
__device__ inline void WriteSorted(SelectShared& s, const Entry* entries, int n, Entry least,
                                   int32_t visible, int32_t* out) {
  constexpr int kWords = kWindowWords / kSelectThreads;
  uint32_t written = 0;
  for (int32_t first = 0; first < visible; first += kWindowWords * 32) {
    for (int i = 0; i < kWords; ++i) s.window[threadIdx.x + i * kSelectThreads] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kSelectThreads) {
      const int32_t at = RowOf(entries[i]) - first;
      if (entries[i] >= least && at >= 0 && at < kWindowWords * 32) {
        atomicOr(&s.window[at / 32], 1u << (at % 32));
      }
    }
    __syncthreads();
    uint32_t bits[kWords], mine = 0, total = 0;
    for (int i = 0; i < kWords; ++i) {
      bits[i] = __popc(s.window[threadIdx.x * kWords + i]);
      mine += bits[i];
    }
    uint32_t at = written + BlockSum(s, mine, &total);
    for (int i = 0; i < kWords; ++i) {
      s.before[threadIdx.x * kWords + i] = at;
      at += bits[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kSelectThreads) {
      const int32_t row = RowOf(entries[i]), bit = row - first;
      if (entries[i] >= least && bit >= 0 && bit < kWindowWords * 32) {
        out[s.before[bit / 32] + __popc(s.window[bit / 32] & ((1u << (bit % 32)) - 1))] = row;
      }
    }
    written += total;
    __syncthreads();
  }
}

// The same from all scores, without candidates. Block.
__device__ inline void SelectFromAll(SelectShared& s, const float* scores, int32_t visible, int k,
                                     int32_t* out) {
  const auto count = [&](uint32_t least) {
    uint32_t reached = 0, total = 0;
#pragma unroll 4
    for (int32_t row = threadIdx.x; row < visible; row += kSelectThreads) {
      reached += KeyOf(scores[row]) >= least ? 1u : 0u;
    }
    BlockSum(s, reached, &total);
    return total;
  };
  uint32_t bar = 0;  // the k-th largest key
  for (int bit = 31; bit >= 0; --bit) {
    if (count(bar | 1u << bit) >= static_cast<uint32_t>(k)) bar |= 1u << bit;
  }
  uint32_t ties = k - (bar == 0xffffffffu ? 0 : count(bar + 1));  // rows at the bar that are taken
  uint32_t written = 0, seen = 0;
  for (int32_t first = 0; first < visible; first += kSelectThreads) {
    const int32_t row = first + threadIdx.x;
    const uint32_t key = row < visible ? KeyOf(scores[row]) : 0;
    const bool tied = row < visible && key == bar;
    uint32_t all_tied = 0, all_taken = 0;
    const uint32_t rank = seen + BlockSum(s, tied ? 1 : 0, &all_tied);
    const bool taken = row < visible && (key > bar || (tied && rank < ties));
    const uint32_t at = written + BlockSum(s, taken ? 1 : 0, &all_taken);
    if (taken) out[at] = row;
    seen += all_tied;
    written += all_taken;
  }
}

// grid (clusters of blocks, one per token of the pass).
static __global__ void __launch_bounds__(kSelectThreads)
    SelectRows(const __grid_constant__ IndexerParams p) {
  namespace cg = cooperative_groups;
  extern __shared__ __align__(16) char memory[];
  auto& s = *reinterpret_cast<SelectShared*>(memory);
  auto* const candidates = reinterpret_cast<Entry*>(memory + sizeof(SelectShared));
  const cg::cluster_group cluster = cg::this_cluster();
  const auto blocks = static_cast<int32_t>(cluster.num_blocks());
  const auto rank = static_cast<int32_t>(cluster.block_rank());
  LetNextStart();
  WaitForPrevious();
  const int64_t local = blockIdx.x / blocks, token = p.first_token + local;
  const int32_t visible = VisibleRows(p, token);
  const int k = p.top_k;
  int32_t* const out = p.selected + token * k;
  if (visible <= k) {
    if (rank != 0) return;
    for (int i = threadIdx.x; i < k; i += kSelectThreads) out[i] = i < visible ? i : -1;
    if (threadIdx.x == 0) p.counts[token] = visible;
    return;
  }
  if (rank == 0 && threadIdx.x == 0) p.counts[token] = k;
  const float* const scores = p.scores + local * p.scores_stride;
  const int capacity = CandidateCapacity(k);
  if (threadIdx.x == 0) s.count = 0;
  uint32_t floor = 0;
  if (visible > capacity) {
    const float mean = static_cast<float>(k) * kSample / static_cast<float>(visible);
    floor = SampleFloor(s, scores, visible, static_cast<int>(mean + 3.5f * sqrtf(mean) + 4));
  }
  if (blocks > 1) {
    cluster.sync();  // the first block's counter is set
  } else {
    __syncthreads();
  }

  // Warps append what they find to a list of the block; the first block's list is the candidates'.
  const int32_t per_block = (visible + blocks - 1) / blocks;
  const int32_t begin = rank * per_block, end = min(begin + per_block, visible);
  const int lane = threadIdx.x % 32;
  constexpr int kBatch = 8;
  for (int32_t base = begin; base < end; base += kSelectThreads * kBatch) {
    uint32_t key[kBatch];
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t row = base + i * kSelectThreads + threadIdx.x;
      key[i] = row < end ? KeyOf(scores[row]) : 0;
      found |= (row < end && key[i] >= floor) ? 1u << i : 0u;
    }
    if (__any_sync(0xffffffffu, found != 0)) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool mine = (found >> i & 1u) != 0;
        const uint32_t votes = __ballot_sync(0xffffffffu, mine);
        if (votes == 0) continue;
        int at = 0;
        if (lane == 0) at = atomicAdd(&s.count, __popc(votes));
        at = __shfl_sync(0xffffffffu, at, 0) + __popc(votes & ((1u << lane) - 1));
        if (mine && at < capacity) {
          candidates[at] = MakeEntry(key[i], base + i * kSelectThreads + threadIdx.x);
        }
      }
    }
  }
  __syncthreads();
  if (blocks > 1) {
    if (rank != 0) {
      const int mine = s.count;
      if (threadIdx.x == 0) s.base = atomicAdd(cluster.map_shared_rank(&s.count, 0), mine);
      __syncthreads();
      Entry* const to = cluster.map_shared_rank(candidates, 0);
      for (int i = threadIdx.x; i < mine; i += kSelectThreads) {
        if (i < capacity && s.base + i < capacity) to[s.base + i] = candidates[i];
      }
    }
    cluster.sync();
    if (rank != 0) return;
  }
  const int n = s.count;
  if (n >= k && n <= capacity) {
    const Entry least = KthLargest(s, candidates, n, k);
    WriteSorted(s, candidates, n, least, visible, out);
  } else {
    SelectFromAll(s, scores, visible, k, out);
  }
}

}  // namespace fathom::ops::cuda
