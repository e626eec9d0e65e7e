// The flags of every command that runs a model (serve, chat, complete), in vLLM's spelling.
#pragma once

#include <string>

#include "cli/command.h"
#include "cli/runtime.h"

namespace fathom {

// Choices arrive as text; Finish turns them into RuntimeOptions.
struct ModelFlags {
  RuntimeOptions options;
  std::string load_format = "auto";
  std::string numerics = "product";
  std::string device = "auto";
  std::string log_level = "warning";
  bool fp4_indexer_cache = false;
  int64_t seed = 0;
};

// MODEL as an argument of its own, or as --model where the argument is something else.
enum class ModelArgument { kPositional, kFlag };

// max_num_seqs of `flags.options` is the default to show: commands with one user want 1.
void AddModelFlags(Command& command, ModelFlags& flags, ModelArgument argument);

// --hf-overrides (model/config_overrides.h).
void AddHfOverridesFlag(Command& command, std::string& overrides);

// Refuses a MODEL that is given and empty: a script's unset variable, not the demo model.
Status CheckModelGiven(const Command& command, const std::string& model);

// Sets up logging and returns the options; refuses combinations that contradict each other.
Expected<RuntimeOptions> FinishModelFlags(const Command& command, const ModelFlags& flags);

}  // namespace fathom
