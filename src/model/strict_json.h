// JSON files of a checkpoint, read strictly: duplicate keys, trailing text, nesting beyond
// kMaxJsonDepth, invalid UTF-8 and numbers out of range are errors, never a silent choice.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/status.h"

namespace fathom {

inline constexpr int kMaxJsonDepth = 32;

// `origin` names the text in errors. code: kInvalidArgument.
Expected<nlohmann::json> ParseStrictJson(std::string_view text, std::string_view origin);

// The whole file. kNotFound if it cannot be opened, kDataLoss if it cannot be read or is longer
// than `max_bytes`.
Expected<std::string> ReadTextFile(const std::string& path, int64_t max_bytes);

// The value as it stands in the file, cut to a length fit for an error message.
std::string ShortJson(const nlohmann::json& value);

}  // namespace fathom
