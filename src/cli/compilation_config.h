// --compilation-config: of vLLM's keys those that say which steps a GPU runs as captured graphs.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cache/graph_plan.h"
#include "core/status.h"

namespace fathom {

struct CompilationConfig {
  // CudaExecutorOptions::max_graph_sequences. "cudagraph_mode" NONE means 0, every other mode means
  // that decoding steps are captured whole (mixed steps run kernel by kernel);
  // "max_cudagraph_capture_size", or the largest of "cudagraph_capture_sizes", limits their size.
  int graph_sequences = kGraphSequences;
  std::vector<std::string> ignored;  // keys without effect
};

// kInvalidArgument names the key and its value.
Expected<CompilationConfig> ParseCompilationConfig(std::string_view text);

}  // namespace fathom
