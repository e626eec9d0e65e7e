#include "text/utf8.h"

#include <cstring>

namespace fathom {
namespace {

enum class Form { kValid, kIllFormed, kUnfinished };
struct Sequence {
  Form form;
  size_t length;  // bytes of the character, or of the maximal ill-formed or unfinished part
};

// The sequence that begins at p, of n >= 1 bytes left (Unicode standard, table 3-7).
Sequence Scan(const char* text, size_t n) {
  const auto* p = reinterpret_cast<const uint8_t*>(text);
  if (p[0] < 0x80) return {Form::kValid, 1};
  size_t length = 0;
  uint8_t low = 0x80, high = 0xBF;  // the second byte's range; the others are 80..BF
  if (p[0] >= 0xC2 && p[0] <= 0xDF) {
    length = 2;
  } else if (p[0] >= 0xE0 && p[0] <= 0xEF) {
    length = 3;
    if (p[0] == 0xE0) low = 0xA0;   // shorter form exists
    if (p[0] == 0xED) high = 0x9F;  // surrogates
  } else if (p[0] >= 0xF0 && p[0] <= 0xF4) {
    length = 4;
    if (p[0] == 0xF0) low = 0x90;   // shorter form exists
    if (p[0] == 0xF4) high = 0x8F;  // above U+10FFFF
  } else {
    return {Form::kIllFormed, 1};
  }
  for (size_t i = 1; i < length; ++i) {
    if (i == n) return {Form::kUnfinished, n};
    if (p[i] < low || p[i] > high) return {Form::kIllFormed, i};
    low = 0x80, high = 0xBF;
  }
  return {Form::kValid, length};
}

// Bytes from p on that are ASCII, in steps of eight.
size_t AsciiRun(const char* p, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t word;
    std::memcpy(&word, p + i, 8);
    if (word & 0x8080808080808080u) break;
  }
  return i;
}

// Bytes of the longest valid prefix.
size_t ValidPrefix(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    i += AsciiRun(text.data() + i, text.size() - i);
    // Up to eight characters one by one, then try the fast lane again.
    for (int k = 0; k < 8 && i < text.size(); ++k) {
      Sequence s = Scan(text.data() + i, text.size() - i);
      if (s.form != Form::kValid) return i;
      i += s.length;
    }
  }
  return i;
}

}  // namespace

bool IsValidUtf8(std::string_view text) {
  return ValidPrefix(text) == text.size();
}

std::string RepairUtf8(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  while (!bytes.empty()) {
    size_t valid = ValidPrefix(bytes);
    out.append(bytes.substr(0, valid));
    bytes.remove_prefix(valid);
    if (bytes.empty()) break;
    out.append("\xEF\xBF\xBD");
    bytes.remove_prefix(Scan(bytes.data(), bytes.size()).length);
  }
  return out;
}

size_t UnfinishedTail(std::string_view bytes) {
  // An unfinished character has its lead byte among the last three.
  size_t most = bytes.size() < 3 ? bytes.size() : 3;
  for (size_t back = most; back >= 1; --back) {
    Sequence s = Scan(bytes.data() + bytes.size() - back, back);
    if (s.form == Form::kUnfinished) return back;
  }
  return 0;
}

void AppendUtf8(std::string& out, char32_t c) {
  auto put = [&out](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6), put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18), put(0x80 | (c >> 12 & 0x3F)), put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  }
}

}  // namespace fathom
