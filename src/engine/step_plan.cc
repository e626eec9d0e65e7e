#include "engine/step_plan.h"

#include <algorithm>
#include <limits>

#include "core/status.h"

namespace fathom {

void StepPlan::Clear() {
  token.clear();
  position.clear();
  sequence.clear();
  query_start.assign(1, 0);
  slot.clear();
  block_table.clear();
  max_blocks = 0;
  logit_rows.clear();
  emit_from.clear();
  requests.clear();
  tables_.clear();
  table_ends_.clear();
}

void StepPlan::AddSequence(RequestId request, SlotId slot_id, const std::vector<BlockId>& blocks,
                           int64_t emits_from) {
  if (query_start.empty()) query_start.push_back(0);
  query_start.push_back(num_tokens());
  slot.push_back(slot_id.value);
  emit_from.push_back(static_cast<int32_t>(emits_from));
  requests.push_back(request);
  tables_.insert(tables_.end(), blocks.begin(), blocks.end());
  table_ends_.push_back(tables_.size());
}

void StepPlan::AddToken(TokenId id, int64_t at, bool wants_logits) {
  FATHOM_CHECK(!slot.empty());
  FATHOM_CHECK(at >= 0 && at <= std::numeric_limits<int32_t>::max());
  if (wants_logits) logit_rows.push_back(num_tokens());
  token.push_back(id);
  position.push_back(static_cast<int32_t>(at));
  sequence.push_back(num_sequences() - 1);
  query_start.back() = num_tokens();
}

void StepPlan::Finish() {
  size_t widest = 0, begin = 0;
  for (const size_t end : table_ends_) {
    widest = std::max(widest, end - begin);
    begin = end;
  }
  max_blocks = static_cast<int32_t>(widest);
  block_table.assign(widest * slot.size(), 0);
  begin = 0;
  for (size_t s = 0; s < slot.size(); ++s) {
    for (size_t i = begin; i < table_ends_[s]; ++i) {
      block_table[s * widest + (i - begin)] = tables_[i].value;
    }
    begin = table_ends_[s];
  }
}

}  // namespace fathom
