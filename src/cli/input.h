// Reading what a command is given: standard input and files.
#pragma once

#include <string>

#include "core/status.h"

namespace fathom {

// Each refuses what is not UTF-8 text (a NUL byte is none).
Expected<std::string> ReadStandardInput();  // to its end
Expected<std::string> ReadTextFile(const std::string& path);

// A file to put before something else: its text, ending in an empty line.
Expected<std::string> ReadDocument(const std::string& path);

}  // namespace fathom
