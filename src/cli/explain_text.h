// The table of `fathom explain`.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "core/status.h"

namespace fathom {

// `entry` is what GET /v1/explain/ID answers. kDataLoss names the field when it is not of that
// form.
Expected<std::string> ExplainText(const nlohmann::json& entry);

}  // namespace fathom
