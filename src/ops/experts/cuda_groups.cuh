// Which pairs each expert works on: a sort of token-slot pairs by expert, cut into tiles.
#pragma once

#include "ops/cuda/hopper.cuh"

namespace fathom::ops::cuda {

// Up to `rows` consecutive entries of the sorted list, all of one expert.
struct GroupTile {
  int32_t expert;
  int32_t first;
  int32_t rows;
};

// The sorted list in device memory. A pair is token * slots + slot; slots = top_k + 1, the last one
// the shared expert's, whose id is num_experts.
struct Groups {
  int32_t* num_tiles;  // one value
  GroupTile* tiles;    // [MaxTiles]
  int32_t* pairs;      // [tokens * slots]
};

// Tiles in the worst case: every expert chosen by some token may leave one tile partly filled.
inline int64_t MaxTiles(int64_t tokens, int top_k, int num_experts, int tile_rows) {
  const int64_t routed = tokens * top_k;
  return routed / tile_rows + (routed < num_experts ? routed : num_experts) +
         (tokens + tile_rows - 1) / tile_rows;
}

inline constexpr int kGroupThreads = 1024;

// By one block of kGroupThreads. Shared memory: 2 * (num_experts + 1) ints. The order of pairs
// within an expert is not fixed, and no result depends on it.
__device__ inline void MakeGroups(const int32_t* chosen, int tokens, int top_k, int num_experts,
                                  int tile_rows, const Groups& groups) {
  extern __shared__ int32_t shared_counts[];
  int32_t* const count = shared_counts;                   // pairs of an expert
  int32_t* const next = shared_counts + num_experts + 1;  // where its next pair goes
  const int routed = tokens * top_k;
  const int slots = top_k + 1;
  const int thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e <= num_experts; e += kGroupThreads) {
    count[e] = e == num_experts ? tokens : 0;
  }
  __syncthreads();
  for (int i = thread; i < routed; i += kGroupThreads) atomicAdd(&count[chosen[i]], 1);
  __syncthreads();
  if (thread < 32) {  // exclusive sums of pairs and tiles, 32 experts at a time
    int pairs_before = 0;
    int tiles_before = 0;
    for (int base = 0; base <= num_experts; base += 32) {
      const int e = base + thread;
      const int pairs = e <= num_experts ? count[e] : 0;
      const int tiles = (pairs + tile_rows - 1) / tile_rows;
      int pair_sum = pairs;
      int tile_sum = tiles;
      for (int offset = 1; offset < 32; offset *= 2) {
        const int p = __shfl_up_sync(0xffffffffu, pair_sum, offset);
        const int t = __shfl_up_sync(0xffffffffu, tile_sum, offset);
        if (thread >= offset) pair_sum += p, tile_sum += t;
      }
      const int first = pairs_before + pair_sum - pairs;
      int tile = tiles_before + tile_sum - tiles;
      if (e <= num_experts) next[e] = first;
      for (int done = 0; done < pairs; done += tile_rows) {
        groups.tiles[tile++] = {e, first + done, min(tile_rows, pairs - done)};
      }
      pairs_before += __shfl_sync(0xffffffffu, pair_sum, 31);
      tiles_before += __shfl_sync(0xffffffffu, tile_sum, 31);
    }
    if (thread == 0) *groups.num_tiles = tiles_before;
  }
  __syncthreads();
  for (int i = thread; i < routed; i += kGroupThreads) {
    groups.pairs[atomicAdd(&next[chosen[i]], 1)] = i / top_k * slots + i % top_k;
  }
  // The shared expert's pairs are the last ones, in the order of tokens.
  for (int t = thread; t < tokens; t += kGroupThreads) {
    groups.pairs[routed + t] = t * slots + top_k;
  }
}

}  // namespace fathom::ops::cuda
