// The scanner for DeepSeek's three split regexes (model.md 10.1), in one pass.
//
// The first two regexes cut the text into segments of three kinds: up to three numbers, CJK runs,
// and the rest. The third is then matched inside each segment; it leaves numbers as they are, so
// only the other two kinds are scanned. Its alternatives, tried in order at each character:
//   a  [!-/:-@\[-`{-~][A-Za-z]+               one ASCII punctuation character, ASCII letters
//   b  [^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+   a word, with at most one character before it
//   c   ?[\p{P}\p{S}]+[\r\n]*                 punctuation, with the line breaks that follow
//   d  \s*[\r\n]+                             white space up to its last line break
//   e  \s+(?!\S)                              white space but for the blank before a word
//   f  \s+
// Characters that no alternative can begin with are gathered into a piece of their own.
#include "text/pre_tokenizer.h"
#include "text/unicode_classes.h"
#include "text/utf8.h"

namespace fathom {
namespace {

constexpr uint8_t kEnd = 128;  // beyond the segment; no class uses this bit

struct Char {
  uint8_t kind;     // CharClass bits, or kEnd
  uint32_t length;  // bytes
};

class Scanner {
 public:
  Scanner(const CharClasses& classes, std::string_view text, std::vector<uint32_t>& ends)
      : classes_(classes),
        text_(text.data()),
        size_(static_cast<uint32_t>(text.size())),
        ends_(ends) {}

  void Run() {
    uint32_t p = 0;
    while (p < size_) {
      Char c = Any(p);
      if (c.kind & kNumber) {
        for (int count = 0; count < 3 && (c.kind & kNumber); ++count) {
          p += c.length;
          c = Any(p);
        }
        ends_.push_back(p);
      } else {
        segment_kind_ = c.kind & kCjk;
        p = Segment(p);
      }
    }
  }

 private:
  Char Any(uint32_t p) const {
    if (p >= size_) return {kEnd, 0};
    CodePoint c = DecodeValidUtf8(text_ + p);
    return {classes_[c.value], c.length};
  }

  // As Any, but kEnd where the segment stops.
  Char At(uint32_t p) const {
    Char c = Any(p);
    return (c.kind & (kNumber | kCjk)) == segment_kind_ ? c : Char{kEnd, 0};
  }

  // First position from p on whose character has none of `kinds`.
  uint32_t Skip(uint32_t p, uint8_t kinds) const {
    for (Char c = At(p); c.kind & kinds; c = At(p)) p += c.length;
    return p;
  }

  // Scans the segment that begins at p; returns its end.
  uint32_t Segment(uint32_t p) {
    uint32_t rest = p;  // where characters that no match covers begin
    for (Char c = At(p); c.kind != kEnd; c = At(p)) {
      uint32_t end = Match(p, c);
      if (end == p) {
        p += c.length;
        continue;
      }
      if (rest < p) ends_.push_back(p);
      ends_.push_back(end);
      p = rest = end;
    }
    if (rest < p) ends_.push_back(p);
    return p;
  }

  // End of the match at p, whose character is c; p if there is none.
  uint32_t Match(uint32_t p, Char c) const {
    uint32_t next = p + c.length;
    if (c.kind & (kLetter | kMark)) return Skip(next, kLetter | kMark);  // b
    if (c.kind & kPunctuationSymbol) {
      if (c.length == 1 && IsAsciiLetter(next)) return SkipAsciiLetters(next);  // a
      return Punctuation(next);                                                 // c
    }
    Char second = At(next);
    if (!(c.kind & kLineBreak) && (second.kind & (kLetter | kMark))) {
      return Skip(next + second.length, kLetter | kMark);  // b
    }
    if (text_[p] == ' ' && (second.kind & kPunctuationSymbol)) {
      return Punctuation(next + second.length);  // c
    }
    if (c.kind & kSpace) return WhiteSpace(p);  // d, e, f
    return p;
  }

  bool IsAsciiLetter(uint32_t p) const {
    return p < size_ && static_cast<uint8_t>((text_[p] | 0x20) - 'a') < 26;
  }
  uint32_t SkipAsciiLetters(uint32_t p) const {
    while (IsAsciiLetter(p)) ++p;
    return p;
  }
  uint32_t Punctuation(uint32_t p) const { return Skip(Skip(p, kPunctuationSymbol), kLineBreak); }

  uint32_t WhiteSpace(uint32_t begin) const {
    uint32_t p = begin, last = begin, after_break = begin;
    Char c = At(p);
    for (; c.kind & kSpace; c = At(p)) {
      last = p;
      p += c.length;
      if (c.kind & kLineBreak) after_break = p;
    }
    if (after_break > begin) return after_break;    // d
    if (c.kind == kEnd || last == begin) return p;  // e at the segment's end, or f
    return last;                                    // e
  }

  const CharClasses& classes_;
  const char* text_;
  uint32_t size_;
  std::vector<uint32_t>& ends_;
  uint8_t segment_kind_ = 0;
};

class DeepSeekPreTokenizer final : public PreTokenizer {
 public:
  void Split(std::string_view text, std::vector<uint32_t>& ends) const override {
    Scanner(CharClasses::Get(), text, ends).Run();
  }
};

}  // namespace

std::unique_ptr<PreTokenizer> MakeDeepSeekPreTokenizer() {
  CharClasses::Get();  // pay for the table at load, not in the first request
  return std::make_unique<DeepSeekPreTokenizer>();
}

}  // namespace fathom
