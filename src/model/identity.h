// Which weights a directory holds, without reading all of them: for files that outlive a process.
#pragma once

#include <string>
#include <string_view>

#include "core/status.h"

namespace fathom {

// 32 hex digits that differ between checkpoints: of every .safetensors file its name, size, first
// megabyte (the tensors' names and places) and 4 KiB at 256 places in between. Errors name the file
// that cannot be read. Two checkpoints that differ in fewer bytes than the samples see (a single
// edited value) have the same identity.
Expected<std::string> WeightsIdentity(const std::string& directory);

// 32 hex digits that differ between texts.
std::string TextIdentity(std::string_view text);

}  // namespace fathom
