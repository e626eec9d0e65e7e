// The byte alphabet of GPT-2: every byte as one printable character, so that vocabularies can be
// written as text. Printable Latin-1 stands for itself, the other 68 bytes for U+0100, U+0101, ...
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace fathom {

// Character of each byte.
const std::array<char32_t, 256>& ByteAlphabet();

// The bytes that `text` (valid UTF-8) spells; none if a character is not in the alphabet.
std::optional<std::string> FromByteAlphabet(std::string_view text);

}  // namespace fathom
