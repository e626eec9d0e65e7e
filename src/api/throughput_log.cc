#include "api/throughput_log.h"

#include <fmt/format.h>

#include <utility>

namespace fathom {

std::optional<std::string> ThroughputLog::Line(const EngineStats& stats, double seconds) {
  const uint64_t computed =
      stats.prompt_computed - std::exchange(prompt_computed_, stats.prompt_computed);
  const uint64_t prompt = stats.prompt_tokens - std::exchange(prompt_tokens_, stats.prompt_tokens);
  const uint64_t generated =
      stats.generation_tokens - std::exchange(generation_tokens_, stats.generation_tokens);
  if (stats.running + stats.waiting == 0 && prompt + generated == 0) return std::nullopt;
  const double used = stats.blocks_total > 0 ? 100.0 * stats.blocks_used / stats.blocks_total : 0;
  return fmt::format(
      "prompt {:.1f} tokens/s and {:.1f} cached, generation {:.1f} tokens/s, "
      "running {}, waiting {}, blocks {} of {} ({:.1f} %)",
      static_cast<double>(computed) / seconds, static_cast<double>(prompt - computed) / seconds,
      static_cast<double>(generated) / seconds, stats.running, stats.waiting, stats.blocks_used,
      stats.blocks_total, used);
}

}  // namespace fathom
