// Flags of prefix reuse and of its tiers, and what they mean for an engine.
#pragma once

#include "cli/command.h"
#include "cli/runtime.h"
#include "core/status.h"
#include "engine/engine.h"

namespace fathom {

void AddCacheFlags(Command& command, CacheReuseOptions& options);

// Settings that contradict each other, or that others leave without effect. Errors name the flag.
Status CheckReuse(const CacheReuseOptions& options);

// Fills in the engine's options, pools of device memory being planned already, and opens the disk
// tier. Errors name the flag.
Status SetUpReuse(const Runtime& runtime, EngineOptions* engine);

// Lines for the start-up table; empty without prefix caching.
std::string DescribeReuse(const EngineOptions& engine, const Geometry& geometry);

}  // namespace fathom
