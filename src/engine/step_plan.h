// StepPlan: which tokens of which sequences run in the next step, as the flat arrays any executor
// can run. Building one touches no device. Decoding sequences come first, then prefill chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/ids.h"
#include "ops/step_view.h"

namespace fathom {

struct StepPlan {
  std::vector<int32_t> token;        // [T]
  std::vector<int32_t> position;     // [T]
  std::vector<int32_t> sequence;     // [T]
  std::vector<int32_t> query_start;  // [S+1]
  std::vector<int32_t> slot;         // [S]
  std::vector<int32_t> block_table;  // [S, max_blocks], unused entries 0
  int32_t max_blocks = 0;
  std::vector<int32_t> logit_rows;  // token indices whose logits are wanted, ascending
  std::vector<int32_t> emit_from;   // [S] ops::StepView::emit_from
  std::vector<RequestId> requests;  // [S] for scripted executors, logs and traces

  int32_t num_tokens() const { return static_cast<int32_t>(token.size()); }
  int32_t num_sequences() const { return static_cast<int32_t>(slot.size()); }

  ops::StepView view() const {
    return {num_tokens(),    num_sequences(),    token.data(), position.data(),
            sequence.data(), query_start.data(), slot.data(),  block_table.data(),
            max_blocks,      emit_from.data()};
  }
  void Clear();  // keeps the memory: a warm plan allocates nothing
  // Starts a sequence; its tokens follow through AddToken. Rows below `emits_from` are there.
  void AddSequence(RequestId request, SlotId slot, const std::vector<BlockId>& blocks,
                   int64_t emits_from = 0);
  void AddToken(TokenId token, int64_t position, bool wants_logits);
  // Lays the block tables out to one width; call once when all sequences are in. view() is valid
  // from here on.
  void Finish();

 private:
  std::vector<BlockId> tables_;     // the sequences' tables, one after another
  std::vector<size_t> table_ends_;  // [S]
};

}  // namespace fathom
