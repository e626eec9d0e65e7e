// What Engine::Start and Engine::Submit refuse before anything runs.
#pragma once

#include <cstdint>

#include "cache/geometry.h"
#include "core/status.h"
#include "engine/engine.h"
#include "engine/request.h"

namespace fathom {

// Replaces the zeros that stand for a default and refuses impossible numbers by name.
Expected<EngineOptions> CompleteOptions(EngineOptions options, const Geometry& geometry);

// Returns the most tokens, prompt and generated together, the request may reach; or what is wrong
// with it (the list is at Engine::Submit). `options` are complete.
Expected<int64_t> CheckRequest(const Request& request, const EngineOptions& options,
                               const Geometry& geometry, int64_t vocab_size);

}  // namespace fathom
