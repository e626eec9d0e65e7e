#include "text/byte_level.h"

#include <cstdint>

#include "text/utf8.h"

namespace fathom {
namespace {

constexpr char32_t kAlphabetEnd = 0x100 + 68;

bool StandsForItself(unsigned b) {
  return (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
}

// Byte of each character, -1 where there is none.
const std::array<int16_t, kAlphabetEnd>& BytesOfAlphabet() {
  static const auto bytes = [] {
    std::array<int16_t, kAlphabetEnd> table;
    table.fill(-1);
    for (int b = 0; b < 256; ++b) table[ByteAlphabet()[b]] = static_cast<int16_t>(b);
    return table;
  }();
  return bytes;
}

}  // namespace

const std::array<char32_t, 256>& ByteAlphabet() {
  static const auto alphabet = [] {
    std::array<char32_t, 256> table;
    char32_t next = 0x100;
    for (unsigned b = 0; b < 256; ++b) table[b] = StandsForItself(b) ? b : next++;
    return table;
  }();
  return alphabet;
}

std::optional<std::string> FromByteAlphabet(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    CodePoint c = DecodeValidUtf8(text.data() + at);
    at += c.length;
    if (c.value >= kAlphabetEnd || BytesOfAlphabet()[c.value] < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(BytesOfAlphabet()[c.value]));
  }
  return bytes;
}

}  // namespace fathom
