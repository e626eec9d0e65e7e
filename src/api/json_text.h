// JSON text: strings written fast for streams, and request bodies read safely.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "core/status.h"

namespace fathom {

// Appends `text` as a JSON string, quotes included. Bytes that are no valid UTF-8 become U+FFFD.
// U+0085, U+2028 and U+2029 are escaped although JSON allows them raw: some SSE clients split lines
// at them.
void AppendJsonString(std::string_view text, std::string* out);

// Parses a request body: a JSON object in UTF-8, nested at most 64 deep. Errors say where.
Expected<nlohmann::json> ParseJsonObject(std::string_view body);

// As nlohmann's dump, never throwing: invalid UTF-8 becomes U+FFFD.
std::string DumpJson(const nlohmann::ordered_json& value);

}  // namespace fathom
