#include "api/json_text.h"

#include <cstdint>

namespace fathom {
namespace {

constexpr int kMaxDepth = 64;

// Length of the valid UTF-8 sequence at text[i], 0 when there is none (RFC 3629).
size_t Utf8Length(std::string_view text, size_t i) {
  const auto byte = [&](size_t k) -> uint32_t {
    return k < text.size() ? static_cast<uint8_t>(text[k]) : 0;
  };
  const auto tail = [&](size_t k) { return (byte(k) & 0xc0u) == 0x80u; };
  const uint32_t b0 = byte(i), b1 = byte(i + 1);
  if (b0 < 0x80) return 1;
  if (b0 >= 0xc2 && b0 <= 0xdf) return tail(i + 1) ? 2 : 0;
  if (b0 >= 0xe0 && b0 <= 0xef) {
    if (!tail(i + 1) || !tail(i + 2)) return 0;
    if ((b0 == 0xe0 && b1 < 0xa0) || (b0 == 0xed && b1 > 0x9f)) return 0;
    return 3;
  }
  if (b0 >= 0xf0 && b0 <= 0xf4) {
    if (!tail(i + 1) || !tail(i + 2) || !tail(i + 3)) return 0;
    if ((b0 == 0xf0 && b1 < 0x90) || (b0 == 0xf4 && b1 > 0x8f)) return 0;
    return 4;
  }
  return 0;
}

// Counts brackets outside strings, so that no recursive part of the JSON library meets more depth
// than its stack can hold.
bool TooDeep(std::string_view body) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < body.size(); ++i) {
    const char c = body[i];
    if (in_string) {
      if (c == '\\') ++i;
      else if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxDepth) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

// What the library found wrong, without its error numbers, its grammar's states and its quotation
// of the input: "unexpected end of input; expected string literal at byte 2".
std::string Cause(const nlohmann::json::exception& error) {
  std::string_view what = error.what();
  if (const size_t number = what.find("] "); number != what.npos) what.remove_prefix(number + 2);
  const auto* parse = dynamic_cast<const nlohmann::json::parse_error*>(&error);
  if (parse == nullptr) return std::string(what.substr(0, 80));
  if (const size_t state = what.find(" - "); state != what.npos) what.remove_prefix(state + 3);
  if (const size_t quoted = what.find("; last read"); quoted != what.npos) {
    what = what.substr(0, quoted);
  }
  return fmt::format("{} at byte {}", what, parse->byte);
}

}  // namespace

void AppendJsonString(std::string_view text, std::string* out) {
  static constexpr char kHex[] = "0123456789abcdef";
  out->push_back('"');
  size_t run = 0;  // start of bytes that are copied as they are
  for (size_t i = 0; i < text.size();) {
    const uint8_t c = static_cast<uint8_t>(text[i]);
    if (c >= 0x20 && c < 0x80 && c != '"' && c != '\\') {
      ++i;
      continue;
    }
    size_t length = 1;
    char escape[8];
    std::string_view replacement;
    if (c == '"') replacement = "\\\"";
    else if (c == '\\') replacement = "\\\\";
    else if (c == '\n') replacement = "\\n";
    else if (c == '\r') replacement = "\\r";
    else if (c == '\t') replacement = "\\t";
    else if (c < 0x20) {
      const char code[7] = {'\\', 'u', '0', '0', kHex[c >> 4], kHex[c & 15], 0};
      std::copy(code, code + 7, escape);
      replacement = std::string_view(escape, 6);
    } else {
      length = Utf8Length(text, i);
      const std::string_view sequence = text.substr(i, length);
      if (length == 0) {
        length = 1;
        replacement = "\xEF\xBF\xBD";
      } else if (sequence == "\xC2\x85") {
        replacement = "\\u0085";
      } else if (sequence == "\xE2\x80\xA8") {
        replacement = "\\u2028";
      } else if (sequence == "\xE2\x80\xA9") {
        replacement = "\\u2029";
      }
    }
    if (!replacement.empty()) {
      out->append(text, run, i - run);
      out->append(replacement);
      run = i + length;
    }
    i += length;
  }
  out->append(text, run, text.size() - run);
  out->push_back('"');
}

Expected<nlohmann::json> ParseJsonObject(std::string_view body) {
  if (TooDeep(body)) {
    return Fail(Code::kInvalidArgument, "the request body is nested more than {} levels deep",
                kMaxDepth);
  }
  try {
    nlohmann::json value = nlohmann::json::parse(body);
    if (!value.is_object()) {
      return Fail(Code::kInvalidArgument, "the request body must be a JSON object, not {}",
                  value.type_name());
    }
    return value;
  } catch (const nlohmann::json::exception& error) {
    return Fail(Code::kInvalidArgument, "the body is not JSON: {}", Cause(error));
  }
}

std::string DumpJson(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace fathom
