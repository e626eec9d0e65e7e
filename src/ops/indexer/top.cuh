// The best k of any number of scored rows, kept by one block in shared memory.
//
// An entry is a 64-bit number that orders as the contract does: the score's key above, the inverted
// row below, so the larger entry wins and equal scores go to the lower row. Entries are unique, so
// the set kept depends on nothing but the rows offered: not on their order, nor on how they are cut
// into ranges. Candidates collect in a buffer; when it may overflow, a radix select leaves the best
// k and raises the floor below which nothing can enter.
#pragma once

#include <cstdint>

#include "ops/cuda/common.cuh"

namespace fathom::ops::cuda {

constexpr int kTopThreads = 256;
constexpr int kTopTile = 256;  // most entries offered between two calls of Flush

using Entry = unsigned long long;

// Sorts like the score, -0 as +0; NaN below every number.
__device__ inline Entry MakeEntry(float score, int32_t row) {
  const unsigned bits = __float_as_uint(score);
  const unsigned magnitude = bits & 0x7fffffffu;
  unsigned key = (bits >> 31) != 0 ? 0x80000000u - magnitude : 0x80000000u + magnitude;
  if (magnitude > 0x7f800000u) key = 0;
  return static_cast<Entry>(key) << 32 | (0xffffffffu - static_cast<unsigned>(row));
}

__device__ inline int32_t RowOf(Entry entry) {
  return static_cast<int32_t>(0xffffffffu - static_cast<unsigned>(entry));
}

__host__ __device__ constexpr int TopCapacity(int k) {
  return 2 * k + 4 * kTopTile;
}

class Top {
 public:
  struct Shared {
    unsigned histogram[256];
    unsigned warp_sums[kTopThreads / 32];
    Entry reduce[kTopThreads / 32];
    int count;
    unsigned digit, remaining;
    int exact;
  };

  // buffer: TopCapacity(k) entries of shared memory. All threads; ends with a barrier.
  __device__ Top(Shared* shared, Entry* buffer, int k)
      : shared_(*shared), buffer_(buffer), k_(k), capacity_(TopCapacity(k)) {
    if (threadIdx.x == 0) shared_.count = 0;
    __syncthreads();
  }

  // Whole warps; lanes with `valid` offer an entry.
  __device__ void Offer(bool valid, Entry entry) {
    valid = valid && entry >= floor_;
    const unsigned votes = __ballot_sync(0xffffffffu, valid);
    if (votes == 0) return;
    const int lane = threadIdx.x % 32;
    int base = 0;
    if (lane == 0) base = atomicAdd(&shared_.count, __popc(votes));
    base = __shfl_sync(0xffffffffu, base, 0);
    if (valid) buffer_[base + __popc(votes & ((1u << lane) - 1))] = entry;
  }

  // All threads, after every kTopTile offers: makes room for as many more.
  __device__ void Flush() {
    __syncthreads();
    if (shared_.count + kTopTile > capacity_) Keep();
    __syncthreads();
  }

  // All threads: leaves the best k, or fewer when fewer were offered. Returns how many.
  __device__ int Keep() {
    __syncthreads();
    const int n = shared_.count;
    if (n <= k_) return n;
    floor_ = KthLargest(n);
    __syncthreads();
    if (threadIdx.x == 0) shared_.count = 0;
    // A chunk is read by all before any of it is written, and what is kept never lies beyond it.
    for (int base = 0; base < n; base += kTopThreads) {
      const int i = base + threadIdx.x;
      const Entry entry = i < n ? buffer_[i] : 0;
      __syncthreads();
      if (i < n && entry >= floor_) buffer_[atomicAdd(&shared_.count, 1)] = entry;
    }
    __syncthreads();
    return shared_.count;
  }

  __device__ const Entry* entries() const { return buffer_; }

  // All threads, after Keep: the rows of the n entries kept in ascending order. They lie behind the
  // entries.
  __device__ const int32_t* SortedRows(int n) {
    auto* rows = reinterpret_cast<int32_t*>(buffer_ + k_);
    int size = 1;
    while (size < n) size *= 2;
    for (int i = threadIdx.x; i < size; i += kTopThreads) {
      rows[i] = i < n ? RowOf(buffer_[i]) : INT32_MAX;
    }
    __syncthreads();
    for (int width = 2; width <= size; width *= 2) {
      for (int stride = width / 2; stride > 0; stride /= 2) {
        for (int pair = threadIdx.x; pair < size / 2; pair += kTopThreads) {
          const int i = 2 * pair - (pair & (stride - 1));
          const int32_t a = rows[i], b = rows[i + stride];
          if ((a > b) == ((i & width) == 0)) {
            rows[i] = b;
            rows[i + stride] = a;
          }
        }
        __syncthreads();
      }
    }
    return rows;
  }

 private:
  // A number that exactly k of the n entries are not below.
  __device__ Entry KthLargest(int n) {
    // The digits start below the bits that all entries share.
    const Entry first = buffer_[0];
    Entry differs = 0;
    for (int i = threadIdx.x; i < n; i += kTopThreads) differs |= buffer_[i] ^ first;
    for (int offset = 16; offset > 0; offset /= 2) {
      differs |= __shfl_xor_sync(0xffffffffu, differs, offset);
    }
    if (threadIdx.x % 32 == 0) shared_.reduce[threadIdx.x / 32] = differs;
    __syncthreads();
    differs = 0;
    for (int i = 0; i < kTopThreads / 32; ++i) differs |= shared_.reduce[i];
    int shift = max(0, 56 - __clzll(static_cast<long long>(differs)));
    Entry mask = shift >= 56 ? 0 : ~Entry{0} << (shift + 8);
    Entry prefix = first & mask;
    unsigned remaining = k_;
    while (true) {
      shared_.histogram[threadIdx.x] = 0;
      __syncthreads();
      for (int i = threadIdx.x; i < n; i += kTopThreads) {
        const Entry entry = buffer_[i];
        if ((entry & mask) == prefix) {
          atomicAdd(&shared_.histogram[static_cast<unsigned>(entry >> shift) & 255u], 1u);
        }
      }
      __syncthreads();
      FindDigit(remaining);
      prefix |= static_cast<Entry>(shared_.digit) << shift;
      mask |= Entry{255} << shift;
      remaining = shared_.remaining;
      if (shared_.exact != 0 || shift == 0) return prefix;
      shift = max(0, shift - 8);
      __syncthreads();
    }
  }

  // The digit that holds the remaining-th largest entry; `exact` when all with it are wanted.
  __device__ void FindDigit(unsigned remaining) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned bin = 255 - threadIdx.x;
    const unsigned mine = shared_.histogram[bin];
    unsigned sum = mine;  // of this bin and all above it
    for (int offset = 1; offset < 32; offset *= 2) {
      const unsigned below = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += below;
    }
    if (lane == 31) shared_.warp_sums[warp] = sum;
    __syncthreads();
    for (int i = 0; i < warp; ++i) sum += shared_.warp_sums[i];
    if (sum >= remaining && sum - mine < remaining) {
      shared_.digit = bin;
      shared_.remaining = remaining - (sum - mine);
      shared_.exact = sum == remaining ? 1 : 0;
    }
    __syncthreads();
  }

  Shared& shared_;
  Entry* buffer_;
  int k_;
  int capacity_;
  Entry floor_ = 0;
};

}  // namespace fathom::ops::cuda
