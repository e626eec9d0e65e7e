// Routes that answer at once: models, health, version, load, tokenize, detokenize.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "api/explanation.h"
#include "api/http_types.h"
#include "api/served_model.h"

namespace fathom {

HttpResponse ListModels(const ServedModel& model);
HttpResponse ShowModel(const ServedModel& model, std::string_view name);

// The explanation of a request by either of its ids; 404 says how many are kept.
HttpResponse Explain(const ExplainLog& log, std::string_view id);

// 200 while requests can be served; 503 when draining, or when work exists and the engine has
// finished no step for `unhealthy_after`.
HttpResponse Health(const EngineStats& stats, bool draining,
                    std::chrono::milliseconds unhealthy_after);

// vLLM's shapes. Text pool: they tokenise.
HttpResponse TokenizeReply(std::string_view body, const ServedModel& model);
HttpResponse DetokenizeReply(std::string_view body, const ServedModel& model);

// An error with the code model_not_found for unknown models.
HttpResponse ErrorReply(const Error& error);

}  // namespace fathom
