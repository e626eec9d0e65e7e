// The entry list of sparse_attention, as both the reference and the backends walk it: segment 0 is
// the window, segment s >= 1 holds compressed entries [512 (s-1), 512 s).
#pragma once

#include <algorithm>

#include "core/status.h"
#include "ops/sparse_attention/sparse_attention.h"

namespace fathom::ops {

struct AttentionKernels;

// SparseAttentionCpu with a given set of kernels.
void SparseAttentionWith(const SparseAttentionArgs& args, const AttentionKernels& kernels,
                         ThreadPool& pool);

// Where one stored row lies.
struct RowAddress {
  const std::byte* data = nullptr;
  const std::byte* scale = nullptr;
};

// The entries one token attends to.
struct TokenEntries {
  int32_t position = 0;
  int32_t sequence = 0;
  int32_t window_begin = 0;  // first position of the window
  int32_t compressed = 0;    // number of compressed entries

  int32_t window() const { return position - window_begin + 1; }
  int32_t segments() const { return 1 + (compressed + kAttentionSegment - 1) / kAttentionSegment; }
};

inline TokenEntries EntriesOf(const SparseAttentionArgs& args, int32_t token) {
  TokenEntries entries;
  entries.position = args.step->position[token];
  entries.sequence = args.step->sequence[token];
  entries.window_begin = std::max(0, entries.position - (kWindow - 1));
  if (args.compressed.base == nullptr) {
    entries.compressed = 0;
  } else if (args.selected != nullptr) {
    entries.compressed = args.counts[token];
    FATHOM_CHECK(entries.compressed >= 0 && entries.compressed <= args.top_k);
  } else {
    entries.compressed = (entries.position + 1) / 128;
  }
  return entries;
}

// The window row of an absolute position: the step's own rows where it has them, else the ring.
inline RowAddress WindowRow(const SparseAttentionArgs& args, int32_t sequence, int32_t position) {
  const StepView& step = *args.step;
  const int32_t first = step.first_position(sequence);
  if (position >= first) {
    const int32_t row = step.query_start[sequence] + position - first;
    return {args.step_rows.data(0, row), args.step_rows.scale(0, row)};
  }
  const int32_t slot = step.slot[sequence];
  const int32_t row = position % args.ring.rows_per_page;
  return {args.ring.data(slot, row), args.ring.scale(slot, row)};
}

// The cache row a compressed entry of a token refers to.
inline int32_t CompressedRowIndex(const SparseAttentionArgs& args, int32_t token, int32_t entry) {
  return args.selected == nullptr ? entry : args.selected[int64_t{token} * args.top_k + entry];
}

inline RowAddress CompressedRow(const SparseAttentionArgs& args, int32_t sequence, int32_t row) {
  const int32_t block = args.step->blocks_of(sequence)[row / args.compressed.rows_per_page];
  const int32_t in_page = row % args.compressed.rows_per_page;
  return {args.compressed.data(block, in_page), args.compressed.scale(block, in_page)};
}

}  // namespace fathom::ops
