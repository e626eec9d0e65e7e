#include "api/generation_config.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

namespace fathom {
namespace {

using nlohmann::json;

// Reads a number of [low, high] into *out when the key is there; null counts as absent.
Status Number(const json& object, const char* key, double low, double high, std::string_view origin,
              double* out) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return {};
  if (!found->is_number()) {
    return FailParam(Code::kInvalidArgument, key, "{}: {} must be a number", origin, key);
  }
  const double value = found->get<double>();
  if (!(value >= low && value <= high)) {
    return FailParam(Code::kInvalidArgument, key, "{}: {} is {}, not within {} .. {}", origin, key,
                     value, low, high);
  }
  *out = value;
  return {};
}

}  // namespace

Expected<GenerationDefaults> ParseGenerationDefaults(std::string_view text,
                                                     std::string_view origin) {
  const json object = json::parse(text, nullptr, false);
  if (!object.is_object()) {
    return Fail(Code::kInvalidArgument, "{}: not a JSON object", origin);
  }
  double temperature = 1, top_p = 1, top_k = 0, min_p = 0, repetition = 1;
  FATHOM_TRY(Number(object, "temperature", 0, 100, origin, &temperature));
  FATHOM_TRY(Number(object, "top_p", 0, 1, origin, &top_p));
  FATHOM_TRY(Number(object, "top_k", -1, 1e9, origin, &top_k));
  FATHOM_TRY(Number(object, "min_p", 0, 1, origin, &min_p));
  FATHOM_TRY(Number(object, "repetition_penalty", 1e-3, 1e3, origin, &repetition));
  if (const auto sample = object.find("do_sample"); sample != object.end()) {
    if (!sample->is_boolean()) {
      return FailParam(Code::kInvalidArgument, "do_sample", "{}: do_sample must be a boolean",
                       origin);
    }
    if (!sample->get<bool>()) temperature = 0;
  }
  GenerationDefaults defaults;
  defaults.temperature = static_cast<float>(temperature);
  defaults.top_p = top_p == 0 ? 1.0f : static_cast<float>(top_p);
  defaults.top_k = top_k < 0 ? 0 : static_cast<int>(top_k);
  defaults.min_p = static_cast<float>(min_p);
  defaults.repetition_penalty = static_cast<float>(repetition);
  if (const auto eos = object.find("eos_token_id"); eos != object.end() && !eos->is_null()) {
    const json list = eos->is_array() ? *eos : json::array({*eos});
    for (const json& id : list) {
      if (!id.is_number_integer()) {
        return FailParam(Code::kInvalidArgument, "eos_token_id",
                         "{}: eos_token_id must be a token id or a list of token ids", origin);
      }
      defaults.eos_tokens.push_back(id.get<TokenId>());
    }
  }
  return defaults;
}

Expected<GenerationDefaults> LoadGenerationDefaults(const std::string& directory) {
  const std::string path = directory + "/generation_config.json";
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return GenerationDefaults{};
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) return Fail(Code::kDataLoss, "{}: cannot be read", path);
  return ParseGenerationDefaults(text.str(), path);
}

}  // namespace fathom
