// What kind of character a code point is, as Hugging Face's regex engine sees it (Unicode 16).
//
// The table is data of the tokenizer's definition, not of the C library or of PCRE2: the same text
// must give the same ids on every machine.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fathom {

// Bits of a class. A code point has at most one of the first four.
enum CharClass : uint8_t {
  kLetter = 1,             // \p{L}
  kMark = 2,               // \p{M}
  kNumber = 4,             // \p{N}
  kPunctuationSymbol = 8,  // \p{P} or \p{S}
  kSpace = 16,             // \s, the property White_Space
  kLineBreak = 32,         // CR or LF
  kCjk = 64,               // U+4E00..9FA5, U+3040..309F, U+30A0..30FF (model.md 10.1)
};

class CharClasses {
 public:
  static const CharClasses& Get();  // built on first use, about 1 ms

  uint8_t operator[](char32_t c) const { return blocks_[block_of_[c >> 8]][c & 0xFF]; }

 private:
  CharClasses();
  std::array<uint16_t, 0x1100> block_of_{};
  std::vector<std::array<uint8_t, 256>> blocks_;  // distinct blocks only
};

// White space as a regex class body, "\x{9}-\x{d}\x{20}...": PCRE2's own \s has U+180E besides.
std::string_view WhiteSpaceClassBody();

// Code points of general category `name` ("L", "Lu", ...) that PCRE2 10.42 (Unicode 14) does not
// know yet, as a regex class body; empty if there are none.
std::string NewerCodePoints(std::string_view name);

// Whether `name` is a general category of one or two letters whose members the table knows.
bool IsGeneralCategory(std::string_view name);

}  // namespace fathom
