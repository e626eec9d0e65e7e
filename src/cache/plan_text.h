// A memory plan as a person reads it: at most 100 columns, bytes and GiB (or MiB, KiB) beside each
// other.
#pragma once

#include <span>
#include <string>

#include "cache/plan_advice.h"
#include "cache/plan_compare.h"
#include "cache/planner.h"

namespace fathom {

// Everything `fathom plan` prints without --what-if. `name` is the model as given.
std::string PlanText(const std::string& name, const ModelConfig& config, const MemoryPlan& plan,
                     std::span<const Comparison> comparisons);

// The tables of it alone, as a server prints them at start.
std::string PlanTables(const MemoryPlan& plan);
// The parts. Each ends in a line break.
std::string WeightTable(const MemoryPlan& plan);
std::string CacheTable(const Geometry& geometry);
std::string SequenceTable(const MemoryPlan& plan);
std::string WorkspaceTable(const Workspaces& workspaces);
std::string PoolTable(const MemoryPlan& plan);
std::string ConcurrencyTable(const MemoryPlan& plan);

// "fits: ...", or "does not fit: ... more are needed" and, each on a line, what of it is weights
// and what would fit. No line break at the end.
std::string Verdict(const MemoryPlan& plan, const PlanRemedies& remedies);

std::string_view RowFormatName(ops::RowFormat format);  // "bf16", "fp8 + bf16 rope", ...

}  // namespace fathom
