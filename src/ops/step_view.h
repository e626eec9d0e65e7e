// The flat description of one step that every sequence-aware op reads: T tokens of S sequences.
// All arrays live where the backend computes (host for CPU, device for CUDA) and are built by
// engine/StepPlan. Ops know no sequence object, only these numbers.
#pragma once

#include <cstdint>

namespace fathom::ops {

struct StepView {
  int32_t num_tokens = 0;             // T
  int32_t num_sequences = 0;          // S
  const int32_t* token = nullptr;     // [T] vocabulary ids
  const int32_t* position = nullptr;  // [T] absolute positions; consecutive within a sequence
  const int32_t* sequence = nullptr;  // [T] index into the arrays of length S
  const int32_t* query_start =
      nullptr;                    // [S+1] sequence s owns tokens [query_start[s], query_start[s+1])
  const int32_t* slot = nullptr;  // [S] SlotPool unit of the sequence
  const int32_t* block_table = nullptr;  // [S, max_blocks] BlockPool unit of each 256-token block
  int32_t max_blocks = 0;
  // [S] or null. Compressed rows whose group ends before this position are in the cache already and
  // are not written: the sequence runs these tokens only to rebuild its windows.
  const int32_t* emit_from = nullptr;

  // Whether row j of ratio m of sequence s is to be written.
  bool emits(int32_t s, int64_t j, int m) const {
    return emit_from == nullptr || (j + 1) * m > emit_from[s];
  }
  int32_t first_position(int32_t s) const { return position[query_start[s]]; }
  int32_t tokens_of(int32_t s) const { return query_start[s + 1] - query_start[s]; }
  const int32_t* blocks_of(int32_t s) const { return block_table + int64_t{s} * max_blocks; }
};

}  // namespace fathom::ops
