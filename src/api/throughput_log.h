// ThroughputLog: what the engine did since the last look, as one line for the log.
#pragma once

#include <optional>
#include <string>

#include "engine/engine.h"

namespace fathom {

class ThroughputLog {
 public:
  // The line for the `seconds` since the last call, or nothing when nothing ran in them: prompt
  // tokens computed and found in a cache, tokens generated, per second; requests running and
  // waiting, blocks in use.
  std::optional<std::string> Line(const EngineStats& stats, double seconds);

 private:
  uint64_t prompt_tokens_ = 0, prompt_computed_ = 0, generation_tokens_ = 0;
};

}  // namespace fathom
