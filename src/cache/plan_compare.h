// What the same context would take with the attention of other models (model.md 11.1), in bf16.
#pragma once

#include <cstdint>
#include <string>

#include "cache/planner.h"
#include "core/status.h"
#include "model/config.h"

namespace fathom {

struct Comparison {
  std::string name;  // as given: "v3.2", "mha"
  std::string what;  // in words
  int layers = 0;
  int64_t bytes_per_token = 0;
  int64_t bytes = 0;      // of one sequence of the context
  double ratio = 0;       // to this model's rows and windows (SequenceBytes::total)
  double ratio_rows = 0;  // to its rows alone
};

// v3.2: DeepSeek-V3.2's 61 layers, one row of 576 latent and 128 index channels a token each:
//   85,888 bytes a token.
// mha: plain multi-head attention with this model's layers, heads and head_dim, keys and values.
// kInvalidArgument, param --compare, for another name.
Expected<Comparison> Compare(const std::string& name, const ModelConfig& config,
                             const SequenceBytes& sequence, int64_t tokens);

}  // namespace fathom
