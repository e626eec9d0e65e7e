// The one logger: spdlog to standard error, set up by SetUpLogging from --log-level.
//   Log().info("loaded {} tensors", n);
#pragma once

#include <spdlog/spdlog.h>

#include <string_view>

#include "core/status.h"

namespace fathom {

spdlog::logger& Log();

// level: trace | debug | info | warning | error | off
Status SetUpLogging(std::string_view level);

}  // namespace fathom
