// StepArrays: a StepPlan's arrays where a backend computes. One buffer, allocated once; a step is
// one copy.
//
//   StepArrays arrays(backend, limits);
//   const StepArrays::Uploaded step = arrays.Upload(plan);   // valid until the next Upload
//   forward.Run(step.view, kv, step.logit_rows, logits);
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/step_plan.h"
#include "ops/backend.h"

namespace fathom {

class StepArrays {
 public:
  struct Limits {
    int64_t tokens = 0;  // of a step
    int64_t sequences = 0;
    int64_t blocks_per_sequence = 0;
    int64_t logit_rows = 0;
  };
  struct Uploaded {
    ops::StepView view;
    std::span<const int32_t> logit_rows;
  };

  StepArrays(ops::Backend& backend, const Limits& limits);

  // The plan keeps within the limits. The block table is `table_width` blocks wide where the plan's
  // is narrower. Addresses follow from the numbers of tokens, sequences and logit rows and from the
  // width alone: View says them without a copy.
  Uploaded Upload(const StepPlan& plan, int32_t table_width = 0);
  Uploaded View(int32_t tokens, int32_t sequences, int32_t logit_rows, int32_t table_width) const;

 private:
  ops::Backend& backend_;
  int64_t capacity_;
  int32_t* device_;
  std::vector<int32_t> staging_;
};

}  // namespace fathom
