// Which weights a directory holds, without reading all of them: for files that outlive a process.
#pragma once

#include <string>

#include "core/status.h"

namespace fathom {

// A text that differs between checkpoints: of config.json and every .safetensors file its name,
// size, first megabyte (the tensors' names and places) and 4 KiB at 256 places in between. Errors
// name the file that cannot be read. Two checkpoints that differ in fewer bytes than the samples
// see (a single edited value) have the same identity.
Expected<std::string> CheckpointIdentity(const std::string& directory);

}  // namespace fathom
