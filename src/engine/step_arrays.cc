#include "engine/step_arrays.h"

#include <algorithm>

#include "core/status.h"

namespace fathom {

StepArrays::StepArrays(ops::Backend& backend, const Limits& limits)
    : backend_(backend),
      capacity_(3 * limits.tokens + (3 + limits.blocks_per_sequence) * limits.sequences + 1 +
                limits.logit_rows),
      device_(reinterpret_cast<int32_t*>(
          backend.Allocate(capacity_ * static_cast<int64_t>(sizeof(int32_t))))) {
  staging_.reserve(static_cast<size_t>(capacity_));
}

StepArrays::Uploaded StepArrays::View(int32_t tokens, int32_t sequences, int32_t logit_rows,
                                      int32_t table_width) const {
  const int32_t* next = device_;
  const auto take = [&next](int64_t count) {
    const int32_t* at = next;
    next += count;
    return at;
  };
  Uploaded out;
  out.view.num_tokens = tokens;
  out.view.num_sequences = sequences;
  out.view.max_blocks = table_width;
  out.view.token = take(tokens);
  out.view.position = take(tokens);
  out.view.sequence = take(tokens);
  out.view.query_start = take(int64_t{sequences} + 1);
  out.view.slot = take(sequences);
  out.view.emit_from = take(sequences);
  out.logit_rows = {take(logit_rows), static_cast<size_t>(logit_rows)};
  out.view.block_table = take(int64_t{sequences} * table_width);
  FATHOM_CHECK(next - device_ <= capacity_);
  return out;
}

StepArrays::Uploaded StepArrays::Upload(const StepPlan& plan, int32_t table_width) {
  table_width = std::max(table_width, plan.max_blocks);
  staging_.clear();
  const auto place = [this](const std::vector<int32_t>& array) {
    staging_.insert(staging_.end(), array.begin(), array.end());
  };
  place(plan.token);
  place(plan.position);
  place(plan.sequence);
  place(plan.query_start);
  place(plan.slot);
  place(plan.emit_from);
  place(plan.logit_rows);
  for (int32_t s = 0; s < plan.num_sequences(); ++s) {
    const auto row = plan.block_table.begin() + int64_t{s} * plan.max_blocks;
    staging_.insert(staging_.end(), row, row + plan.max_blocks);
    staging_.resize(staging_.size() + static_cast<size_t>(table_width - plan.max_blocks));
  }
  const Uploaded out = View(plan.num_tokens(), plan.num_sequences(),
                            static_cast<int32_t>(plan.logit_rows.size()), table_width);
  backend_.FromHost(device_, staging_.data(),
                    static_cast<int64_t>(staging_.size() * sizeof(int32_t)));
  return out;
}

}  // namespace fathom
