#include "model/config_reader.h"

#include <cmath>

#include "model/strict_json.h"

namespace fathom {

using nlohmann::json;

namespace {

// Out of [low, high] or no integer: nullopt.
std::optional<int64_t> IntIn(const json& value, int64_t low, int64_t high) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
    return std::nullopt;
  }
  const int64_t number = value.get<int64_t>();
  if (number < low || number > high) return std::nullopt;
  return number;
}

}  // namespace

ConfigReader::ConfigReader(const json& object, std::string_view origin, std::string prefix)
    : object_(object), origin_(origin), prefix_(std::move(prefix)) {}

const json* ConfigReader::Raw(const char* key) {
  const auto it = object_.find(key);
  if (it == object_.end()) {
    Refuse(key, "missing");
    return nullptr;
  }
  return &*it;
}

int64_t ConfigReader::Int(const char* key, int64_t low, int64_t high) {
  const json* value = Raw(key);
  if (value == nullptr) return 0;
  if (const std::optional<int64_t> number = IntIn(*value, low, high)) return *number;
  Refuse(key, fmt::format("is {}, must be an integer in [{}, {}]", ShortJson(*value), low, high));
  return 0;
}

double ConfigReader::Number(const char* key, double low, double high) {
  const json* value = Raw(key);
  if (value == nullptr) return 0;
  const double number = value->is_number() ? value->get<double>() : std::nan("");
  if (number >= low && number <= high) return number;
  Refuse(key, fmt::format("is {}, must be a number in [{}, {}]", ShortJson(*value), low, high));
  return 0;
}

std::vector<int> ConfigReader::Ints(const char* key, int64_t low, int64_t high) {
  std::vector<int> list;
  const json* value = Raw(key);
  if (value == nullptr) return list;
  if (!value->is_array()) {
    Refuse(key, fmt::format("is {}, must be a list of integers", ShortJson(*value)));
    return list;
  }
  for (const json& item : *value) {
    const std::optional<int64_t> number = IntIn(item, low, high);
    if (!number) {
      Refuse(key, fmt::format("entry {} is {}, must be an integer in [{}, {}]", list.size(),
                              ShortJson(item), low, high));
      return {};
    }
    list.push_back(static_cast<int>(*number));
  }
  return list;
}

void ConfigReader::Equals(const char* key, const json& value) {
  const json* found = Raw(key);
  // json compares true with 1 as unequal and 0 with 0.0 as equal, as wanted here.
  if (found != nullptr && *found != value) {
    Refuse(key, fmt::format("is {}, only {} is supported", ShortJson(*found), ShortJson(value)));
  }
}

void ConfigReader::EqualsIfPresent(const char* key, const json& value) {
  if (Has(key)) Equals(key, value);
}

void ConfigReader::Refuse(const char* key, const std::string& what) {
  if (error_) return;
  const std::string name = prefix_ + key;
  error_ = Error{Code::kInvalidArgument, fmt::format("{}: {}: {}", origin_, name, what), name};
}

void ConfigReader::Absorb(const ConfigReader& nested) {
  if (!error_) error_ = nested.error_;
}

Status ConfigReader::Finish() const {
  if (error_) return tl::unexpected<Error>(*error_);
  return {};
}

}  // namespace fathom
