// UTF-8 as the tokenizer needs it: checking, lossy repair, and finding where text is unfinished.
//
// Repair follows the Unicode standard's "maximal subpart" rule, as Rust's from_utf8_lossy and the
// WHATWG decoder do: each longest prefix of a well-formed sequence becomes one U+FFFD, every other
// stray byte one of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fathom {

bool IsValidUtf8(std::string_view text);

// `bytes` with every ill-formed part replaced by U+FFFD; a copy if nothing is wrong.
std::string RepairUtf8(std::string_view bytes);

// How many bytes at the end (0..3) begin a character that later bytes may still complete.
size_t UnfinishedTail(std::string_view bytes);

void AppendUtf8(std::string& out, char32_t code_point);

struct CodePoint {
  char32_t value;
  uint32_t length;  // bytes, 1..4
};

// The code point that begins at p; the text must be valid and p on a boundary.
inline CodePoint DecodeValidUtf8(const char* p) {
  auto at = [p](int i) { return static_cast<uint32_t>(static_cast<uint8_t>(p[i])); };
  uint32_t lead = at(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xE0) return {(lead & 0x1F) << 6 | (at(1) & 0x3F), 2};
  if (lead < 0xF0) return {(lead & 0x0F) << 12 | (at(1) & 0x3F) << 6 | (at(2) & 0x3F), 3};
  return {(lead & 0x07) << 18 | (at(1) & 0x3F) << 12 | (at(2) & 0x3F) << 6 | (at(3) & 0x3F), 4};
}

}  // namespace fathom
