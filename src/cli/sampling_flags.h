// The flags that choose how chat and complete sample.
#pragma once

#include <cstdint>

#include "cli/command.h"
#include "cli/generate.h"
#include "cli/model_flags.h"

namespace fathom {

struct SamplingFlags {
  double temperature = 1;
  double top_p = 1;
  int64_t max_tokens = 0;
  bool thinking = false;
};

void AddSamplingFlags(Command& command, SamplingFlags& flags);

// Flags that were given, over the checkpoint's generation_config.json. Without --seed every run
// draws anew.
GenerateOptions MakeGenerateOptions(const Command& command, const SamplingFlags& flags,
                                    const ModelFlags& model, const GenerationDefaults& defaults);

}  // namespace fathom
