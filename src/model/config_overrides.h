// --hf-overrides: some keys of config.json replaced before it is read, under vLLM's name for it.
//
//   OverrideConfig(text, "config.json", R"({"num_hidden_layers": 6, "n_routed_experts": 128})")
#pragma once

#include <string>
#include <string_view>

#include "core/status.h"

namespace fathom {

// config.json's text with `overrides`, a JSON object, merged into it (RFC 7386: objects key by key,
// null removes a key). Empty overrides: the text as it is. Fewer layers than before take what is
// counted by layer along, where it is not overridden too: compress_ratios keeps the first layers
// and the drafter's entries, num_hash_layers is at most the number of layers.
// kInvalidArgument with param "--hf-overrides": no JSON object, or a key that V4 has not.
Expected<std::string> OverrideConfig(std::string_view config, std::string_view origin,
                                     std::string_view overrides);

}  // namespace fathom
