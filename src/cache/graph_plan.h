// Which decoding steps a GPU runs as captured graphs, and what these take of its memory: one rule
// for the executor that captures them and the plan that counts them.
//
// A graph is captured for every number of sequences up to a limit and for every width of the block
// table of GraphTableWidths: launches are shaped by the longest context that fits the table.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace fathom {

// Beyond it a step gains less than 2 % (docs/performance.md).
inline constexpr int kGraphSequences = 8;
// Device memory of a graph, for each layer: measured 440 KiB, with three streams.
inline constexpr int64_t kGraphLayerBytes = 512 << 10;

// Ascending, in blocks; the last one is `most`.
inline std::vector<int32_t> GraphTableWidths(int64_t most) {
  std::vector<int32_t> widths;
  for (int64_t width = 8; width < most; width *= 8) widths.push_back(static_cast<int32_t>(width));
  widths.push_back(static_cast<int32_t>(most));
  return widths;
}

// At most, for tables of up to `most` blocks.
inline int64_t GraphBytes(int layers, int sequences, int64_t most) {
  return kGraphLayerBytes * layers * std::max(sequences, 0) * std::ssize(GraphTableWidths(most));
}

}  // namespace fathom
