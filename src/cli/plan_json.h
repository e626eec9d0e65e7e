// A memory plan for machines: the keys of docs/plan.md.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "cache/plan_advice.h"
#include "cache/plan_compare.h"
#include "cache/planner.h"
#include "cache/what_if.h"

namespace fathom {

nlohmann::ordered_json PlanJson(const std::string& name, const ModelConfig& config,
                                const MemoryPlan& plan, std::span<const Comparison> comparisons);

nlohmann::ordered_json WhatIfJson(const WhatIf& what_if);

}  // namespace fathom
