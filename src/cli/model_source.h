// MODEL and --hf-overrides of the command line, made into a configuration.
//
//   FATHOM_ASSIGN(ModelSource model, OpenModel(options.model, options.hf_overrides));
//   LoadWeights(model.directory, model.config, ...);
#pragma once

#include <string>

#include "core/status.h"
#include "model/config.h"

namespace fathom {

struct ModelSource {
  std::string name;       // as given; "demo" where nothing was
  std::string directory;  // of the weights, the tokenizer and generation_config.json
  ModelConfig config;
  std::string config_text;  // the JSON it was read from, overrides applied
};

// `model`: a directory with config.json, such a file itself (under any name), org/name in the
// Hugging Face cache; empty: the demo checkpoint. Errors name MODEL, the key of config.json, or
// --hf-overrides (config_overrides.h).
Expected<ModelSource> OpenModel(const std::string& model, const std::string& hf_overrides);

// Where the demo checkpoint lies: FATHOM_DEMO_MODEL, else models/demo in a parent folder of the
// executable, else ../share/fathom/demo beside it. The error lists the places looked at.
Expected<std::string> DemoModelDirectory();

// The tokenizer.json that --tokenizer means: a directory's, such a file itself, or org/name's;
// empty: `directory`'s.
Expected<std::string> TokenizerPath(const std::string& given, const std::string& directory);

}  // namespace fathom
