#include "cli/compilation_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "model/strict_json.h"

namespace fathom {
namespace {

using nlohmann::json;

constexpr char kFlag[] = "--compilation-config";
constexpr int64_t kMostSequences = 1024;

template <class... Args>
tl::unexpected<Error> Refuse(fmt::format_string<Args...> format, Args&&... args) {
  return FailParam(Code::kInvalidArgument, kFlag, "{}: {}", kFlag,
                   fmt::format(format, std::forward<Args>(args)...));
}

Expected<int> ReadSize(const std::string& key, const json& value) {
  if (!value.is_number_integer() || value < 0 || value > kMostSequences) {
    return Refuse("{} must be an integer from 0 to {}, not {}", key, kMostSequences,
                  ShortJson(value));
  }
  return value.get<int>();
}

Expected<int> ReadSizes(const std::string& key, const json& value) {
  if (!value.is_array()) return Refuse("{} must be a list, not {}", key, ShortJson(value));
  int most = 0;
  for (const json& size : value) {
    FATHOM_ASSIGN(const int one, ReadSize(key, size));
    most = std::max(most, one);
  }
  return most;
}

// vLLM also takes the modes' numbers.
Expected<bool> ReadMode(const json& value) {
  const auto is = [&](const char* name, int number) { return value == name || value == number; };
  if (is("NONE", 0)) return false;
  if (is("PIECEWISE", 1) || is("FULL", 2) || value == "FULL_DECODE_ONLY" ||
      value == "FULL_AND_PIECEWISE") {
    return true;
  }
  return Refuse(
      "cudagraph_mode must be NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE, not "
      "{}",
      ShortJson(value));
}

}  // namespace

Expected<CompilationConfig> ParseCompilationConfig(std::string_view text) {
  FATHOM_ASSIGN(const json config, ParseStrictJson(text, kFlag));
  if (!config.is_object()) return Refuse("must be an object, not {}", ShortJson(config));
  CompilationConfig out;
  bool captures = true;
  for (const auto& [key, value] : config.items()) {
    if (key == "cudagraph_mode") {
      FATHOM_ASSIGN(captures, ReadMode(value));
    } else if (key == "max_cudagraph_capture_size") {
      FATHOM_ASSIGN(out.graph_sequences, ReadSize(key, value));
    } else if (key == "cudagraph_capture_sizes") {
      FATHOM_ASSIGN(out.graph_sequences, ReadSizes(key, value));
    } else {
      out.ignored.push_back(key);
    }
  }
  if (!captures) out.graph_sequences = 0;
  return out;
}

}  // namespace fathom
