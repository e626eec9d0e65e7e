// Rows of one sequence made readable by the kernels: in place where the cache already holds them in
// the kernels' type, otherwise expanded into a worker's scratch, each once for a tile of tokens.
#pragma once

#include <cstdint>

#include "ops/sparse_attention/entries.h"
#include "ops/sparse_attention/kernels.h"

namespace fathom::ops {

// Window rows of the largest tile: the first token's 127 older ones and one per token.
inline constexpr int kAttentionTile = 32;
inline constexpr int kWindowRows = kWindow - 1 + kAttentionTile;
// Selected rows stay expanded while a tile is worked on; 2^10 rows of bf16 fill about half of L2.
inline constexpr int kCachedRows = 1024;

class RowStore {
 public:
  // bf16_rows: the kernels read bf16 (else float32). scratch: ScratchBytes(bf16_rows) bytes.
  RowStore(const SparseAttentionArgs& args, const AttentionKernels& kernels, bool bf16_rows,
           std::byte* scratch);

  static size_t ScratchBytes(bool bf16_rows);

  // Forgets everything and turns to a sequence.
  void Reset(int32_t sequence);

  // Pointers to the window rows of positions first .. last, at most kWindowRows. They stay valid
  // until the next call of Window; the two below share theirs with each other.
  const void* const* Window(int32_t first, int32_t last);

  // Pointers to compressed rows first .. first + count - 1, at most kAttentionSegment.
  const void* const* Consecutive(int32_t first, int32_t count);

  // Pointers to `count` distinct compressed rows by index, at most kAttentionSegment.
  const void* const* Selected(const int32_t* rows, int32_t count);

 private:
  const void* Materialise(const RowAddress& row, RowFormat format, std::byte* space) const;

  const SparseAttentionArgs& args_;
  const AttentionKernels& kernels_;
  const bool bf16_rows_;
  const int64_t row_bytes_;
  int32_t sequence_ = 0;
  int32_t use_ = 0;               // counts calls of Selected since Reset
  const void** window_pointers_;  // [kWindowRows + 3]
  const void** pointers_;         // [kAttentionSegment + 3]
  int32_t* cached_row_;           // [kCachedRows] row held, or -1
  int32_t* cached_use_;           // [kCachedRows] last use_ that asked for it
  const void** cached_pointer_;   // [kCachedRows]
  std::byte* window_space_;       // kWindowRows rows
  std::byte* spill_space_;        // kAttentionSegment rows
  std::byte* cached_space_;       // kCachedRows rows
};

}  // namespace fathom::ops
