// Typed, bounded access to the keys of one JSON object. The first bad key is kept as the error and
// later reads return zero, so a parser reads all its keys in a row and looks once at the end.
//
//   ConfigReader in(document, "config.json");
//   config.vocab_size = in.Int("vocab_size", 2, 1 << 24);
//   FATHOM_TRY(in.Finish());
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/status.h"

namespace fathom {

class ConfigReader {
 public:
  // `prefix` ("rope_scaling.") stands before key names in errors. The object must outlive this.
  ConfigReader(const nlohmann::json& object, std::string_view origin, std::string prefix = {});

  bool Has(const char* key) const { return object_.contains(key); }
  const nlohmann::json* Raw(const char* key);  // null (and the error set) when missing

  int64_t Int(const char* key, int64_t low, int64_t high);  // a JSON integer in [low, high]
  double Number(const char* key, double low, double high);  // any JSON number in [low, high]
  std::vector<int> Ints(const char* key, int64_t low, int64_t high);  // a list of such integers
  void Equals(const char* key, const nlohmann::json& value);          // the one value V4 has
  void EqualsIfPresent(const char* key, const nlohmann::json& value);

  // Records that `key` is wrong; the first call wins.
  void Refuse(const char* key, const std::string& what);
  // Takes over the error of a reader of a nested object.
  void Absorb(const ConfigReader& nested);
  bool failed() const { return error_.has_value(); }
  const std::string& origin() const { return origin_; }
  Status Finish() const;

 private:
  const nlohmann::json& object_;
  std::string origin_;
  std::string prefix_;
  std::optional<Error> error_;
};

}  // namespace fathom
