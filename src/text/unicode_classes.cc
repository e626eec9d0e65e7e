#include "text/unicode_classes.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <string>

namespace fathom {
namespace {

struct ClassRange {
  uint32_t first;
  char kind;  // L, M, N, P, S, or '-' for everything else
};
struct NewRange {
  uint32_t first, last;
  const char* category;
};

#include "text/unicode_ranges.inc"

struct Range {
  uint32_t first, last;
};
constexpr Range kWhiteSpace[] = {
    {0x9, 0xD},       {0x20, 0x20},     {0x85, 0x85},     {0xA0, 0xA0},     {0x1680, 0x1680},
    {0x2000, 0x200A}, {0x2028, 0x2029}, {0x202F, 0x202F}, {0x205F, 0x205F}, {0x3000, 0x3000}};
constexpr Range kCjkRuns[] = {{0x3040, 0x309F}, {0x30A0, 0x30FF}, {0x4E00, 0x9FA5}};

uint8_t ClassOfKind(char kind) {
  switch (kind) {
    case 'L': return kLetter;
    case 'M': return kMark;
    case 'N': return kNumber;
    case 'P':
    case 'S': return kPunctuationSymbol;
    default: return 0;
  }
}

}  // namespace

const CharClasses& CharClasses::Get() {
  static const CharClasses classes;
  return classes;
}

CharClasses::CharClasses() {
  std::vector<uint8_t> flat(0x110000, 0);
  for (size_t i = 0; i < std::size(kClassRanges); ++i) {
    uint32_t end = i + 1 < std::size(kClassRanges) ? kClassRanges[i + 1].first : 0x110000;
    std::fill(flat.begin() + kClassRanges[i].first, flat.begin() + end,
              ClassOfKind(kClassRanges[i].kind));
  }
  auto add = [&flat](Range range, uint8_t bit) {
    for (uint32_t c = range.first; c <= range.last; ++c) flat[c] |= bit;
  };
  for (Range range : kWhiteSpace) add(range, kSpace);
  for (Range range : kCjkRuns) add(range, kCjk);
  add({'\n', '\n'}, kLineBreak);
  add({'\r', '\r'}, kLineBreak);

  std::map<std::array<uint8_t, 256>, uint16_t> seen;
  for (size_t block = 0; block < block_of_.size(); ++block) {
    std::array<uint8_t, 256> content;
    std::copy_n(flat.begin() + block * 256, 256, content.begin());
    auto [it, fresh] = seen.emplace(content, static_cast<uint16_t>(blocks_.size()));
    if (fresh) blocks_.push_back(content);
    block_of_[block] = it->second;
  }
}

std::string_view WhiteSpaceClassBody() {
  static const std::string body = [] {
    std::string text;
    for (Range r : kWhiteSpace) text += fmt::format("\\x{{{:x}}}-\\x{{{:x}}}", r.first, r.last);
    return text;
  }();
  return body;
}

std::string NewerCodePoints(std::string_view name) {
  std::string text;
  for (const NewRange& r : kAssignedAfterUnicode14) {
    if (std::string_view(r.category).starts_with(name)) {
      text += fmt::format("\\x{{{:x}}}-\\x{{{:x}}}", r.first, r.last);
    }
  }
  return text;
}

bool IsGeneralCategory(std::string_view name) {
  // Without "C": it holds the unassigned code points, which differ between Unicode versions.
  static constexpr std::string_view kNames[] = {
      "L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N", "Nd",
      "Nl", "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S", "Sm",
      "Sc", "Sk", "So", "Z",  "Zs", "Zl", "Zp", "Cc", "Cf", "Co"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

}  // namespace fathom
