// Turns MODEL of the command line into a directory: an existing directory as it is; "org/name"
// through the Hugging Face cache (HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub):
// models--org--name/refs/main names the snapshot. Nothing is downloaded.
#pragma once

#include <string>

#include "core/status.h"

namespace fathom {

// The error lists every place that was looked at.
Expected<std::string> ResolveModel(const std::string& model);

}  // namespace fathom
