#include "model/strict_json.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <vector>

namespace fathom {
namespace {

using nlohmann::json;

// Builds the document and stops at the first duplicate key or at too deep a nesting, both of which
// json::parse accepts.
class StrictBuilder : public nlohmann::json_sax<json> {
 public:
  json root;
  std::string error;

  bool null() override { return Add(nullptr); }
  bool boolean(bool value) override { return Add(value); }
  bool number_integer(number_integer_t value) override { return Add(value); }
  bool number_unsigned(number_unsigned_t value) override { return Add(value); }
  bool number_float(number_float_t value, const string_t&) override { return Add(value); }
  bool string(string_t& value) override { return Add(std::move(value)); }
  bool binary(binary_t&) override { return Stop("binary value"); }
  bool start_object(size_t) override { return Open(json::object()); }
  bool start_array(size_t) override { return Open(json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& name) override {
    auto [slot, fresh] = stack_.back()->get_ref<json::object_t&>().emplace(name, nullptr);
    if (!fresh) return Stop(fmt::format("duplicate key \"{}\"", name.substr(0, 100)));
    slot_ = &slot->second;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const json::exception& e) override {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ..." without the tag.
    std::string_view what = e.what();
    if (const size_t tag = what.find("] "); tag != what.npos) what.remove_prefix(tag + 2);
    return Stop(fmt::format("not valid JSON (byte {}): {}", position, what.substr(0, 200)));
  }

 private:
  bool Stop(std::string message) {
    if (error.empty()) error = std::move(message);
    return false;
  }

  json* Place(json value) {
    if (stack_.empty()) {
      root = std::move(value);
      return &root;
    }
    if (stack_.back()->is_array()) {
      auto& array = stack_.back()->get_ref<json::array_t&>();
      array.push_back(std::move(value));
      return &array.back();
    }
    *slot_ = std::move(value);
    return slot_;
  }

  bool Add(json value) {
    Place(std::move(value));
    return true;
  }

  bool Open(json container) {
    if (stack_.size() >= kMaxJsonDepth) {
      return Stop(fmt::format("nested deeper than {} levels", kMaxJsonDepth));
    }
    stack_.push_back(Place(std::move(container)));
    return true;
  }

  bool Close() {
    stack_.pop_back();
    return true;
  }

  std::vector<json*> stack_;  // open containers; a parent is not touched while a child is open
  json* slot_ = nullptr;      // where the value of the last key goes
};

}  // namespace

Expected<json> ParseStrictJson(std::string_view text, std::string_view origin) {
  StrictBuilder builder;
  try {
    if (json::sax_parse(text.begin(), text.end(), &builder)) return std::move(builder.root);
  } catch (const std::exception& e) {
    builder.error = e.what();
  }
  return Fail(Code::kInvalidArgument, "{}: {}", origin, builder.error);
}

Expected<std::string> ReadTextFile(const std::string& path, int64_t max_bytes) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return Fail(Code::kNotFound, "{}: cannot be opened: {}", path, std::strerror(errno));
  std::string text;
  char buffer[1 << 16];
  while (in.read(buffer, sizeof buffer) || in.gcount() > 0) {
    text.append(buffer, static_cast<size_t>(in.gcount()));
    if (static_cast<int64_t>(text.size()) > max_bytes) {
      return Fail(Code::kDataLoss, "{}: longer than {} bytes", path, max_bytes);
    }
  }
  if (in.bad()) return Fail(Code::kDataLoss, "{}: read error", path);
  return text;
}

std::string ShortJson(const json& value) {
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

}  // namespace fathom
