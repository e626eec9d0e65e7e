// One thread's pass over a range of a sequence's rows for a group of its tokens: the part of the
// CPU indexer where all the time goes.
//
// A batch of 64 rows is expanded into tiles once and scored for every token of the group; a token's
// scores live in a 64-entry buffer until they are offered to its TopRows. Rows are visited in
// ascending order and a score depends on its row and token alone, so any cut into groups and
// ranges gives the same result.
//
// Holds no memory of its own: every call works in scratch_bytes() of the caller's scratch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/indexer/indexer.h"
#include "ops/indexer/kernels.h"
#include "ops/indexer/top_rows.h"

namespace fathom::ops {

class IndexerScan {
 public:
  // At most `max_tokens` tokens per group. The arguments outlive the scan.
  IndexerScan(const IndexerArgs& args, const IndexerKernels& kernels, int max_tokens);

  int64_t scratch_bytes() const { return total_bytes_; }

  // Scans rows [first, last) for tokens [begin, end) of one sequence, whose q and w are prepared.
  // tops[i] holds the best rows of token begin + i; it points into `scratch` (64-byte aligned).
  void Run(int64_t begin, int64_t end, int32_t first, int32_t last, std::byte* scratch,
           TopRows* tops) const;

 private:
  void PackQuery(int64_t token, std::byte* out) const;
  // Rows [row, row + 16) as one tile; rows at and beyond `last` may hold anything.
  void Expand(const int32_t* blocks, int32_t row, int32_t last, std::byte* stage,
              std::byte* tile) const;
  void Score(const std::byte* tiles, int count, const std::byte* query, float* scores) const;
  void Prefetch(const int32_t* blocks, int32_t row, int32_t last) const;

  const IndexerArgs& args_;
  const IndexerKernels& kernels_;
  bool fp4_;
  int head_groups_;
  int64_t capacity_;     // of a token's TopRows
  int64_t data_bytes_;   // of a row
  int64_t scale_bytes_;  // of a row
  int64_t query_bytes_;  // of a token's packed query
  int64_t tile_bytes_;
  // Offsets in the scratch: tiles, then packed queries, then 16 rows copied together where a tile
  // crosses pages, then the buffers of the TopRows.
  int64_t queries_at_;
  int64_t stage_at_;
  int64_t buffers_at_;
  int64_t total_bytes_;
};

}  // namespace fathom::ops
