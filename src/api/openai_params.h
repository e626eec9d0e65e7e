// Reading the fields that chat and plain completions share.
#pragma once

#include "api/field_reader.h"
#include "api/openai_request.h"

namespace fathom {

// All of GenerationParams but max_tokens and logprobs, whose form depends on the route. Starts from
// the model's defaults. Fields that are understood and not offered are refused with
// kUnimplemented.
void ReadGenerationParams(FieldReader& fields, const ServedModel& model, GenerationParams* params);

// min_tokens against max_tokens, once both are read; `key` is the field max_tokens came from.
void CheckTokenLimits(FieldReader& fields, const char* key, GenerationParams* params);

}  // namespace fathom
