// Sampling defaults of a checkpoint: generation_config.json beside config.json.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/ids.h"
#include "core/status.h"

namespace fathom {

// What a request that leaves a field out gets. Without a generation_config.json: temperature 1 and
// top_p 1, the model card's values (model.md 12.1).
struct GenerationDefaults {
  float temperature = 1.0f;  // 0 when the file says "do_sample": false
  float top_p = 1.0f;
  int top_k = 0;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  std::vector<TokenId> eos_tokens;  // eos_token_id, one or a list; empty when absent
};

// `origin` names the text in errors. Unknown keys are ignored, wrong types and values out of range
// are refused by key.
Expected<GenerationDefaults> ParseGenerationDefaults(std::string_view json,
                                                     std::string_view origin);

// Reads DIRECTORY/generation_config.json; a missing file gives the defaults.
Expected<GenerationDefaults> LoadGenerationDefaults(const std::string& directory);

}  // namespace fathom
