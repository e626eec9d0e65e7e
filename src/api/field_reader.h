// FieldReader: the fields of one JSON object with their types checked. The first problem is kept
// and names the field; later calls then change nothing.
//
//   FieldReader fields(json, "");
//   fields.Number("temperature", 0, 2, &temperature);
//   fields.Bool("stream", &stream);
//   FATHOM_TRY(fields.status());
//
// A field that is absent or null leaves its target alone, as OpenAI's clients send nulls freely.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/ids.h"
#include "core/status.h"

namespace fathom {

class FieldReader {
 public:
  // `prefix` stands before the names in errors: "", "stream_options.", "messages[3].".
  FieldReader(const nlohmann::json& object, std::string prefix)
      : object_(object), prefix_(std::move(prefix)) {}

  // The value, or null when it is absent or JSON null.
  const nlohmann::json* Find(const char* key) const;

  void Bool(const char* key, bool* out);
  void Bool(const char* key, std::optional<bool>* out);
  void String(const char* key, std::string* out);
  // A finite number of [low, high].
  void Number(const char* key, double low, double high, float* out);
  // An integer of [low, high]; 5.0 counts as 5.
  void Integer(const char* key, int64_t low, int64_t high, int64_t* out);
  void Integer(const char* key, int64_t low, int64_t high, int* out);
  void Integer(const char* key, int64_t low, int64_t high, std::optional<int64_t>* out);
  // A string or a list of at most `max_count` strings.
  void Strings(const char* key, size_t max_count, std::vector<std::string>* out);
  // A list of token ids in [0, vocab_size).
  void TokenIds(const char* key, int64_t vocab_size, std::vector<TokenId>* out);
  // An object or array, or null when absent; any other type is an error.
  const nlohmann::json* Object(const char* key);
  const nlohmann::json* Array(const char* key);

  // Notes an error about `key` unless there is one already.
  void Refuse(const char* key, std::string message, Code code = Code::kInvalidArgument);

  // The names of the object that nobody has asked for, in its order. Kept by readers of a whole
  // body alone, those with an empty prefix; MarkRead adds names that are read elsewhere.
  std::vector<std::string_view> Unread() const;
  void MarkRead(std::initializer_list<const char*> keys);

  // Takes over the error of a reader of an inner object.
  void Adopt(const FieldReader& inner);

  std::string Name(const char* key) const { return prefix_ + key; }
  bool ok() const { return !error_.has_value(); }
  Status status() const;

 private:
  const nlohmann::json& object_;
  std::string prefix_;
  std::optional<Error> error_;
  mutable std::vector<const char*> asked_;
};

// The exact integer a JSON number stands for, if it is one that fits.
std::optional<int64_t> JsonInteger(const nlohmann::json& value);

}  // namespace fathom
