// What to change when a plan does not fit: each proposal is a plan of its own that does.
#pragma once

#include <string>
#include <vector>

#include "cache/planner.h"

namespace fathom {

struct PlanAdvice {
  std::string flag;   // "--max-num-seqs"
  std::string value;  // "16"
};

// Single changes that each make `plan` fit, the mildest first; the last resort is several at once
// (then they are meant together, `together` is set). Empty when weights and workspaces alone are
// too large for the memory, on any number of GPUs that divides the experts.
struct PlanRemedies {
  std::vector<PlanAdvice> changes;
  bool together = false;
};
PlanRemedies Remedies(const ModelConfig& config, const MemoryPlan& plan);

// "--max-num-seqs 16, --max-model-len 524288 or --gpus 4"; joined by "and" when together.
std::string RemedyText(const PlanRemedies& remedies);

}  // namespace fathom
