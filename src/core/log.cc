#include "core/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>

#include <memory>

namespace fathom {

spdlog::logger& Log() {
  static const std::shared_ptr<spdlog::logger> logger = [] {
    auto made = std::make_shared<spdlog::logger>(
        "fathom", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    made->set_pattern("%Y-%m-%d %H:%M:%S.%e %^%l%$ %v");
    return made;
  }();
  return *logger;
}

Status SetUpLogging(std::string_view level) {
  const auto parsed = spdlog::level::from_str(std::string(level));
  if (parsed == spdlog::level::off && level != "off") {
    return FailParam(Code::kInvalidArgument, "--log-level",
                     "--log-level '{}' is not one of trace, debug, info, warning, error, off",
                     level);
  }
  Log().set_level(parsed);
  return {};
}

}  // namespace fathom
