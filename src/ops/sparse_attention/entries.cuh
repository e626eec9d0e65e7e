// The entry list of a token on the device, as entries.h has it for the host, but in segments of
// kCudaSegment: the window, then compressed entries [128 (s-1), 128 s).
#pragma once

#include "ops/quantise/cuda.cuh"
#include "ops/sparse_attention/sparse_attention.h"

namespace fathom::ops::cuda {

constexpr int kCudaSegment = 128;
constexpr int kGroupHeads = 16;  // heads a block works on
constexpr int kAttendThreads = 256;
static_assert(kWindow <= kCudaSegment);

// The page of a row is floor((row + 1) * PageFactor(rows of a page) / 2^32), exact for (row + 1) *
// rows < 2^32: a division costs many times as much.
__host__ __device__ constexpr uint32_t PageFactor(int32_t rows_per_page) {
  return 0xffffffffu / static_cast<uint32_t>(rows_per_page);
}
__device__ inline int32_t PageOf(int32_t row, uint32_t factor) {
  return static_cast<int32_t>(__umulhi(static_cast<uint32_t>(row) + 1, factor));
}

struct AttentionParams {
  StepView step;
  int heads, groups;  // of kGroupHeads
  const void* q;
  void* out;
  int64_t q_stride, out_stride;
  bool q_bf16, out_bf16;
  PagedRows step_rows, ring, compressed;
  uint32_t page_factor;  // PageFactor of compressed.rows_per_page
  const int32_t* selected;
  const int32_t* counts;
  int top_k;
  const float* sink;
  bool product;
  float* partials;   // [T, groups, max_segments] of kPartialFloats
  int max_segments;  // of any token of the step
  // Of the kernel on tensor cores.
  int32_t first_token;  // of the launch
  int blocks;           // that share a token's ranges
  bool eager;           // from where as many as a token may have are fetched
  int max_ranges;       // of a token of the step
  void* kept;           // KeptRange [tokens and 64 heads of the launch, max_ranges]
};

// A segment's result: acc [16, 512], then max [16], then sum [16].
constexpr int kPartialFloats = kGroupHeads * (kHeadDim + 2);

struct Entries {
  int32_t token, sequence, slot;
  int32_t start, first;          // the sequence's first token of the step and its position
  int32_t window_begin, window;  // first position, count
  int32_t compressed;            // count

  __device__ int Segments() const { return 1 + (compressed + kCudaSegment - 1) / kCudaSegment; }
  __device__ int Count(int segment) const {
    return segment == 0 ? window : min(compressed - (segment - 1) * kCudaSegment, kCudaSegment);
  }
};

// False for tokens that only fill up a captured batch: their position is below 0.
__device__ inline bool EntriesOf(const AttentionParams& p, int32_t token, Entries* out) {
  // All reads at once; in decode a token's index is its sequence's.
  const int32_t guess = min(token, p.step.num_sequences - 1);
  const int32_t position = __ldg(p.step.position + token);
  out->token = token;
  out->sequence = __ldg(p.step.sequence + token);
  out->start = __ldg(p.step.query_start + guess);
  out->slot = __ldg(p.step.slot + guess);
  const int32_t count = p.selected != nullptr ? __ldg(p.counts + token) : (position + 1) / 128;
  if (position < 0) return false;
  if (out->sequence != guess) {
    out->start = __ldg(p.step.query_start + out->sequence);
    out->slot = __ldg(p.step.slot + out->sequence);
  }
  out->first = position - (token - out->start);
  out->window_begin = max(0, position - (kWindow - 1));
  out->window = position - out->window_begin + 1;
  out->compressed = p.compressed.base == nullptr ? 0 : count;
  return true;
}

struct RowRef {
  const std::byte* data;
  const std::byte* scale;
  RowFormat format;
};

__device__ inline RowRef RefOf(const PagedRows& rows, int32_t block, int32_t row) {
  return {RowData(rows, block, row), RowScale(rows, block, row), rows.format};
}

// Entry i of a segment.
__device__ inline RowRef EntryRow(const AttentionParams& p, const Entries& entries, int segment,
                                  int i) {
  const StepView& step = p.step;
  if (segment == 0) {
    const int32_t position = entries.window_begin + i;
    if (position >= entries.first) {
      return RefOf(p.step_rows, 0, entries.start + position - entries.first);
    }
    return RefOf(p.ring, entries.slot, position % p.ring.rows_per_page);
  }
  const int32_t entry = (segment - 1) * kCudaSegment + i;
  const int32_t row =
      p.selected == nullptr ? entry : p.selected[int64_t{entries.token} * p.top_k + entry];
  const int32_t* blocks = step.block_table + int64_t{entries.sequence} * step.max_blocks;
  return RefOf(p.compressed, blocks[row / p.compressed.rows_per_page],
               row % p.compressed.rows_per_page);
}

// A softmax so far: the largest score and the sum of exponentials.
struct Softmax {
  float max, sum;
};

// How two partial results add up: the weights of the older and of the newer one. The same
// operations wherever segments are merged.
struct MergeWeights {
  float older, newer;
};

__device__ inline MergeWeights Merge(Softmax* older, const Softmax& newer) {
  const float max = fmaxf(older->max, newer.max);
  const MergeWeights w = {expf(__fsub_rn(older->max, max)), expf(__fsub_rn(newer.max, max))};
  older->max = max;
  older->sum = __fmaf_rn(older->sum, w.older, __fmul_rn(newer.sum, w.newer));
  return w;
}

__device__ inline float MergeValue(float older, float newer, const MergeWeights& w) {
  return __fmaf_rn(older, w.older, __fmul_rn(newer, w.newer));
}

// What acc is multiplied by in the end.
__device__ inline float InverseOf(const Softmax& state, float sink) {
  return __fdiv_rn(1.0f, __fadd_rn(state.sum, expf(__fsub_rn(sink, state.max))));
}

__device__ inline void StoreOutput(const AttentionParams& p, int32_t token, int head, int channel,
                                   float a, float b) {
  const int64_t at = token * p.out_stride + head * kHeadDim + channel;
  if (p.out_bf16) {
    *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p.out) + at) = Bf16Word(a, b);
  } else {
    *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = {RoundIf(a, p.product),
                                                                   RoundIf(b, p.product)};
  }
}

constexpr float kScoreScale = 0.04419417382415922f;  // 512^-0.5

}  // namespace fathom::ops::cuda
