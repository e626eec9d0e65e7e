// Shared by the tests of src/text.
#pragma once

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <memory>
#include <string>
#include <vector>

#include "text/tokenizer.h"
#include "text/utf8.h"

namespace fathom {

// The demo checkpoint's tokenizer, loaded once.
inline const Tokenizer& DemoTokenizer() {
  static const std::unique_ptr<Tokenizer> tokenizer = [] {
    auto loaded = Tokenizer::Load(FATHOM_SOURCE_DIR "/models/demo/tokenizer.json");
    if (!loaded) ADD_FAILURE() << loaded.error().message;
    return std::move(*loaded);
  }();
  return *tokenizer;
}

// Characters that sit on some boundary of the tokenizer: each class, each end of the CJK ranges,
// white space of every kind, added-token letters, and code points that younger Unicode versions
// assigned.
inline rc::Gen<std::string> GenText() {
  static const std::vector<char32_t> kSpecial = {
      0,      '\t',    '\n',    '\v',    '\r',    ' ',     ' ',     '!',     '\'',   '-',    '_',
      '<',    '>',     '|',     '0',     '9',     'A',     'Z',     'a',     'z',    0x7F,   0x85,
      0xA0,   0xAA,    0xB2,    0xBD,    0xE9,    0x300,   0x301,   0x378,   0x661,  0x6DD,  0x180E,
      0x1680, 0x200B,  0x200D,  0x2028,  0x2029,  0x202F,  0x205F,  0x20DD,  0x2163, 0x2581, 0x3000,
      0x3007, 0x303F,  0x3040,  0x3099,  0x309B,  0x309F,  0x30A0,  0x30FB,  0x30FC, 0x30FF, 0x3100,
      0x4DFF, 0x4E00,  0x4E2D,  0x9FA5,  0x9FA6,  0xAC00,  0xE000,  0xFE0F,  0xFEFF, 0xFF11, 0xFF5C,
      0xFFFD, 0x1171E, 0x1F600, 0x1FAE8, 0x2EBF0, 0x31350, 0xE0020, 0x10FFFF};
  auto character = rc::gen::oneOf(
      rc::gen::elementOf(kSpecial), rc::gen::elementOf(kSpecial),
      rc::gen::map(rc::gen::inRange<uint32_t>(0x20, 0x7F), [](uint32_t c) { return char32_t{c}; }),
      rc::gen::map(rc::gen::inRange<uint32_t>(0, 0x110000 - 0x800),
                   [](uint32_t c) { return static_cast<char32_t>(c < 0xD800 ? c : c + 0x800); }));
  return rc::gen::map(rc::gen::container<std::vector<char32_t>>(character),
                      [](const std::vector<char32_t>& characters) {
                        std::string text;
                        for (char32_t c : characters) AppendUtf8(text, c);
                        return text;
                      });
}

// Any bytes, often nearly UTF-8.
inline rc::Gen<std::string> GenBytes() {
  auto byte =
      rc::gen::oneOf(rc::gen::arbitrary<char>(),
                     rc::gen::elementOf(std::string("\xE4\xB8\xAD\xF0\x9F\x98\xED\xA0\xC3 a")));
  return rc::gen::container<std::string>(byte);
}

}  // namespace fathom
