#include "cli/sampling_flags.h"

#include <random>

namespace fathom {

void AddSamplingFlags(Command& command, SamplingFlags& flags) {
  command.Real("--temperature", flags.temperature, 0, 100,
               "0 takes the most likely token; left out: the model's own");
  command.Real("--top-p", flags.top_p, 0, 1, "left out: the model's own");
  command.Count("--max-tokens", flags.max_tokens, 0, int64_t{1} << 32,
                "length of the answer; left out: up to the context limit");
  command.Switch("--thinking", flags.thinking, "let the model reason first");
}

GenerateOptions MakeGenerateOptions(const Command& command, const SamplingFlags& flags,
                                    const ModelFlags& model, const GenerationDefaults& defaults) {
  GenerateOptions options;
  options.sampling = DefaultSampling(defaults);
  if (command.origin("--temperature") != Origin::kDefault) {
    options.sampling.temperature = static_cast<float>(flags.temperature);
  }
  if (command.origin("--top-p") != Origin::kDefault) {
    options.sampling.top_p = static_cast<float>(flags.top_p);
  }
  options.sampling.seed = command.origin("--seed") != Origin::kDefault
                              ? static_cast<uint64_t>(model.seed)
                              : (uint64_t{std::random_device()()} << 32) | std::random_device()();
  options.max_tokens = flags.max_tokens;
  options.thinking = flags.thinking;
  return options;
}

}  // namespace fathom
