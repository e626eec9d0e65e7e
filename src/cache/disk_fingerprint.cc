// What must agree between the writer and the reader of a segment: see DiskFingerprint.
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <set>

#include "cache/disk_segment.h"

namespace fathom {
namespace {

constexpr size_t kNamedDifferences = 3;
constexpr size_t kShownBytes = 80;

// As ASCII: what a file says reaches terminals and logs.
std::string Escaped(const nlohmann::json& value) {
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kShownBytes) text = text.substr(0, kShownBytes) + "...";
  return text;
}

std::string Shown(const nlohmann::json& object, const std::string& key) {
  if (!object.contains(key)) return "missing";
  const nlohmann::json& value = object[key];
  return value.is_primitive() ? Escaped(value) : value.type_name();
}

}  // namespace

DiskFingerprint MakeDiskFingerprint(std::string json) {
  const BlockHash hash = BlockHasher(HashAlgorithm::kSha256).Of(json);
  return {hash, std::move(json)};
}

std::string FingerprintDifference(std::string_view file_json, std::string_view own_json) {
  const auto file = nlohmann::json::parse(file_json, nullptr, false);
  const auto own = nlohmann::json::parse(own_json, nullptr, false);
  if (!file.is_object() || !own.is_object()) return "the fingerprint differs";
  std::set<std::string> keys;
  for (const auto* object : {&file, &own}) {
    for (const auto& [key, value] : object->items()) keys.insert(key);
  }
  std::vector<std::string> differences;
  for (const std::string& key : keys) {
    if (file.contains(key) && own.contains(key) && file[key] == own[key]) continue;
    std::string name = Escaped(key);
    if (name == '"' + key + '"') name = key;
    differences.push_back(
        fmt::format("{} is {} in the file and {} here", name, Shown(file, key), Shown(own, key)));
  }
  if (differences.empty()) return "the fingerprint differs in spelling only";
  const size_t more = differences.size() - std::min(differences.size(), kNamedDifferences);
  differences.resize(differences.size() - more);
  return fmt::format("{}{}", fmt::join(differences, "; "),
                     more > 0 ? fmt::format("; {} more", more) : "");
}

}  // namespace fathom
