#include "cli/config_file.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

namespace fathom {
namespace {

std::string NormaliseKey(std::string key) {
  const auto end = std::find(key.begin(), key.end(), '.');
  std::replace(key.begin(), end, '_', '-');
  return key;
}

nlohmann::ordered_json ToJson(const YAML::Node& node) {
  if (node.IsMap()) {
    auto object = nlohmann::ordered_json::object();
    for (const auto& item : node) object[item.first.Scalar()] = ToJson(item.second);
    return object;
  }
  if (node.IsSequence()) {
    auto array = nlohmann::ordered_json::array();
    for (const auto& item : node) array.push_back(ToJson(item));
    return array;
  }
  if (node.IsNull()) return nullptr;
  if (node.Tag() != "!") {  // "!" marks a quoted scalar
    if (bool value = false; YAML::convert<bool>::decode(node, value)) return value;
    if (int64_t value = 0; YAML::convert<int64_t>::decode(node, value)) return value;
    if (double value = 0; YAML::convert<double>::decode(node, value)) return value;
  }
  return node.Scalar();
}

struct Reader {
  const std::string& path;
  const std::function<bool(const std::string&)>& is_setting;
  std::vector<ConfigEntry> entries;
  std::set<std::string> seen;

  Status Read(const YAML::Node& map, const std::string& prefix) {
    for (const auto& item : map) {
      const int line = item.first.Mark().line + 1;
      const std::string key = NormaliseKey(prefix + item.first.Scalar());
      const YAML::Node& value = item.second;
      if (value.IsMap() && !is_setting(key)) {
        FATHOM_TRY(Read(value, key + "."));
        continue;
      }
      if (!seen.insert(key).second) {
        return Fail(Code::kInvalidArgument, "{}:{}: '{}' is given twice", path, line, key);
      }
      FATHOM_ASSIGN(std::string text, Text(value, key, line));
      entries.push_back({key, std::move(text), line});
    }
    return {};
  }

  Expected<std::string> Text(const YAML::Node& value, const std::string& key, int line) const {
    if (value.IsScalar()) return value.Scalar();
    if (value.IsMap()) return ToJson(value).dump();
    if (value.IsSequence()) {
      auto items = nlohmann::json::array();  // as JSON, so that an item may hold a comma
      for (const auto& item : value) {
        if (!item.IsScalar()) {
          return Fail(Code::kInvalidArgument, "{}:{}: '{}' is a list of something else than text",
                      path, line, key);
        }
        items.push_back(item.Scalar());
      }
      return items.dump();
    }
    return Fail(Code::kInvalidArgument, "{}:{}: '{}' has no value", path, line, key);
  }
};

}  // namespace

Expected<std::vector<ConfigEntry>> ReadConfigFile(
    const std::string& path, const std::function<bool(const std::string&)>& is_setting) {
  std::error_code unknown;
  const auto type = std::filesystem::status(path, unknown).type();
  // A pipe would be waited for.
  if (std::filesystem::exists(std::filesystem::file_status(type)) &&
      type != std::filesystem::file_type::regular) {
    return Fail(Code::kInvalidArgument, "{}: is no regular file", path);
  }
  try {
    const YAML::Node root = YAML::LoadFile(path);
    if (root.IsNull()) return std::vector<ConfigEntry>();
    if (!root.IsMap()) {
      return Fail(Code::kInvalidArgument, "{}: a configuration is a map of names to values", path);
    }
    Reader reader{path, is_setting, {}, {}};
    FATHOM_TRY(reader.Read(root, ""));
    return std::move(reader.entries);
  } catch (const YAML::BadFile&) {
    return Fail(Code::kNotFound, "{}: cannot be read", path);
  } catch (const std::exception& error) {
    return Fail(Code::kInvalidArgument, "{}: {}", path, error.what());
  }
}

}  // namespace fathom
