#include "engine/step_arrays.h"

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

StepArrays::Uploaded StepArrays::Upload(const StepPlan& plan) {
  staging_.clear();
  const auto place = [this](const std::vector<int32_t>& array) {
    const int32_t* at = device_ + staging_.size();
    staging_.insert(staging_.end(), array.begin(), array.end());
    return at;
  };
  Uploaded out;
  out.view = plan.view();
  out.view.token = place(plan.token);
  out.view.position = place(plan.position);
  out.view.sequence = place(plan.sequence);
  out.view.query_start = place(plan.query_start);
  out.view.slot = place(plan.slot);
  out.view.block_table = place(plan.block_table);
  out.view.emit_from = place(plan.emit_from);
  out.logit_rows = {place(plan.logit_rows), plan.logit_rows.size()};
  FATHOM_CHECK(static_cast<int64_t>(staging_.size()) <= capacity_);
  backend_.FromHost(device_, staging_.data(),
                    static_cast<int64_t>(staging_.size() * sizeof(int32_t)));
  return out;
}

}  // namespace fathom
