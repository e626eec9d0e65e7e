#include "api/field_reader.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fathom {

std::optional<int64_t> JsonInteger(const nlohmann::json& value) {
  if (value.is_number_unsigned()) {
    const uint64_t number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (std::abs(number) <= 0x1p53 && number == std::floor(number)) {
      return static_cast<int64_t>(number);
    }
  }
  return std::nullopt;
}

const nlohmann::json* FieldReader::Find(const char* key) const {
  if (prefix_.empty()) asked_.push_back(key);
  const auto found = object_.find(key);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void FieldReader::Refuse(const char* key, std::string message, Code code) {
  if (!error_) error_ = Error{code, Name(key) + " " + std::move(message), Name(key)};
}

std::vector<std::string_view> FieldReader::Unread() const {
  std::vector<std::string_view> unread;
  for (auto field = object_.begin(); field != object_.end(); ++field) {
    const auto same = [&](const char* asked) { return field.key() == asked; };
    if (std::none_of(asked_.begin(), asked_.end(), same)) unread.push_back(field.key());
  }
  return unread;
}

void FieldReader::MarkRead(std::initializer_list<const char*> keys) {
  asked_.insert(asked_.end(), keys);
}

void FieldReader::Adopt(const FieldReader& inner) {
  if (!error_) error_ = inner.error_;
}

Status FieldReader::status() const {
  if (error_) return tl::unexpected<Error>(*error_);
  return {};
}

void FieldReader::Bool(const char* key, bool* out) {
  std::optional<bool> value;
  Bool(key, &value);
  if (value) *out = *value;
}

void FieldReader::Bool(const char* key, std::optional<bool>* out) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) return;
  if (!value->is_boolean()) {
    return Refuse(key, fmt::format("must be a boolean, not {}", value->type_name()));
  }
  *out = value->get<bool>();
}

void FieldReader::String(const char* key, std::string* out) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) return;
  if (!value->is_string()) {
    return Refuse(key, fmt::format("must be a string, not {}", value->type_name()));
  }
  *out = value->get_ref<const std::string&>();
}

void FieldReader::Number(const char* key, double low, double high, float* out) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) return;
  if (!value->is_number()) {
    return Refuse(key, fmt::format("must be a number, not {}", value->type_name()));
  }
  const double number = value->get<double>();
  if (!(number >= low && number <= high)) {
    return Refuse(key, fmt::format("must lie within {} .. {}, not {}", low, high, number));
  }
  *out = static_cast<float>(number);
}

void FieldReader::Integer(const char* key, int64_t low, int64_t high, int64_t* out) {
  std::optional<int64_t> value;
  Integer(key, low, high, &value);
  if (value) *out = *value;
}

void FieldReader::Integer(const char* key, int64_t low, int64_t high, int* out) {
  std::optional<int64_t> value;
  Integer(key, low, high, &value);
  if (value) *out = static_cast<int>(*value);
}

void FieldReader::Integer(const char* key, int64_t low, int64_t high, std::optional<int64_t>* out) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) return;
  if (!value->is_number()) {
    return Refuse(key, fmt::format("must be an integer, not {}", value->type_name()));
  }
  const std::optional<int64_t> number = JsonInteger(*value);
  if (!number) {
    return Refuse(key, fmt::format("must be an integer within {} .. {}, not {}", low, high,
                                   value->get<double>()));
  }
  if (*number < low || *number > high) {
    return Refuse(key, fmt::format("must lie within {} .. {}, not {}", low, high, *number));
  }
  *out = *number;
}

void FieldReader::Strings(const char* key, size_t max_count, std::vector<std::string>* out) {
  const nlohmann::json* value = Find(key);
  if (value == nullptr) return;
  if (value->is_string()) {
    *out = {value->get_ref<const std::string&>()};
    return;
  }
  if (!value->is_array()) {
    return Refuse(key,
                  fmt::format("must be a string or a list of strings, not {}", value->type_name()));
  }
  if (value->size() > max_count) {
    return Refuse(
        key, fmt::format("holds {} strings; at most {} are allowed", value->size(), max_count));
  }
  std::vector<std::string> strings;
  for (const nlohmann::json& item : *value) {
    if (!item.is_string()) {
      return Refuse(key, fmt::format("must be a list of strings; item {} is {}", strings.size(),
                                     item.type_name()));
    }
    strings.push_back(item.get_ref<const std::string&>());
  }
  *out = std::move(strings);
}

void FieldReader::TokenIds(const char* key, int64_t vocab_size, std::vector<TokenId>* out) {
  const nlohmann::json* value = Array(key);
  if (value == nullptr) return;
  std::vector<TokenId> ids;
  ids.reserve(value->size());
  for (const nlohmann::json& item : *value) {
    const std::optional<int64_t> id = item.is_number() ? JsonInteger(item) : std::nullopt;
    if (!id) {
      return Refuse(key, fmt::format("must be a list of token ids; item {} is {}", ids.size(),
                                     item.is_number() ? "no token id" : item.type_name()));
    }
    if (*id < 0 || *id >= vocab_size) {
      return Refuse(key, fmt::format("holds token id {}, outside the vocabulary 0 .. {}", *id,
                                     vocab_size - 1));
    }
    ids.push_back(static_cast<TokenId>(*id));
  }
  *out = std::move(ids);
}

const nlohmann::json* FieldReader::Object(const char* key) {
  const nlohmann::json* value = Find(key);
  if (value != nullptr && !value->is_object()) {
    Refuse(key, fmt::format("must be an object, not {}", value->type_name()));
    return nullptr;
  }
  return value;
}

const nlohmann::json* FieldReader::Array(const char* key) {
  const nlohmann::json* value = Find(key);
  if (value != nullptr && !value->is_array()) {
    Refuse(key, fmt::format("must be a list, not {}", value->type_name()));
    return nullptr;
  }
  return value;
}

}  // namespace fathom
