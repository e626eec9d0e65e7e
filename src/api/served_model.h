// What the HTTP layer serves: borrowed parts of a loaded model and the defaults of its requests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "api/engine_metrics.h"
#include "api/generation_config.h"
#include "engine/engine.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace fathom {

// Whether temperature, top_p and the presence and frequency penalties count while thinking. The
// hosted DeepSeek API accepts and ignores them there; other engines apply them.
enum class ThinkingSampling { kApply, kIgnore };

struct ServedModel {
  Engine* engine = nullptr;
  const Tokenizer* tokenizer = nullptr;
  const ChatEncoder* encoder = nullptr;
  std::vector<std::string> names;  // the first one is reported; requests may use any
  std::string root;                // directory, shown by /v1/models
  int64_t max_model_len = 0;
  bool add_bos = false;  // tokenizer_config.json add_bos_token: plain prompts begin with BOS
  GenerationDefaults defaults;
  bool default_thinking = false;  // --default-chat-template-kwargs '{"thinking": true}'
  ThinkingSampling thinking_sampling = ThinkingSampling::kApply;
  std::vector<ExtraCounter> counters;  // further counters of /metrics
};

}  // namespace fathom
