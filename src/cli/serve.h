// `fathom serve`: loads a model, listens, serves until SIGTERM or SIGINT.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/runtime.h"
#include "core/status.h"

namespace fathom {

struct ServeOptions {
  RuntimeOptions runtime;
  std::string host = "0.0.0.0";
  int port = 8000;                              // 0: any free one, printed in the ready line
  int http_threads = 1;                         // io threads
  std::vector<std::string> served_model_names;  // empty: MODEL as given, "demo" without one
  std::vector<std::string> api_keys;            // empty: no key needed
  std::vector<std::string> allowed_origins;     // CORS; "*" allows every origin; empty: off
  std::string metrics_prefix = "vllm:";
  // JSON object of defaults for the chat encoding: {"thinking": true} or enable_thinking. Without
  // it conversations do not think unless the request says so.
  std::string default_chat_template_kwargs;
  // apply | ignore: whether temperature, top_p and the presence and frequency penalties of a
  // request count while thinking; the hosted DeepSeek API ignores them.
  std::string thinking_sampling = "apply";
  int64_t max_body_bytes = int64_t{64} << 20;  // of a request: 413 beyond it
  double heartbeat_seconds = 5;                // comments into a silent stream
  double unhealthy_seconds = 60;     // work exists, no step ends for so long: /health answers 503
  double stall_seconds = 300;        // ... the requests in progress fail
  std::string kv_events_config;      // vLLM's JSON (dist/kv_events_config.h); empty: no events
  std::vector<std::string> notices;  // lines to print at start (flags without effect)
};

// Prints the start-up table and a ready line with the URL on standard error, then serves. The first
// SIGTERM or SIGINT refuses new requests and returns when the running ones have finished; a second
// one ends the process at once with status 128 + signal. Errors name the flag.
Status RunServe(const ServeOptions& options);

}  // namespace fathom
