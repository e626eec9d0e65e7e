// From Oniguruma's Ruby syntax to PCRE2. See TranslateRegex in pre_tokenizer.h.
#include <fmt/format.h>

#include "text/pre_tokenizer.h"
#include "text/unicode_classes.h"

namespace fathom {
namespace {

class Translator {
 public:
  explicit Translator(std::string_view regex) : regex_(regex) {}

  Expected<std::string> Run() {
    while (at_ < regex_.size()) {
      if (regex_[at_] == '\\') {
        FATHOM_TRY(Escape());
      } else if (in_class_) {
        FATHOM_TRY(InClass());
      } else {
        FATHOM_TRY(Outside());
      }
    }
    if (in_class_) return Fail(Code::kInvalidArgument, "'[' without ']'");
    return std::move(out_);
  }

 private:
  tl::unexpected<Error> Refuse(std::string_view what) const {
    return Fail(Code::kUnimplemented, "'{}' at offset {} is not supported", what, at_);
  }
  bool Next(std::string_view text) const { return regex_.substr(at_).starts_with(text); }
  void Copy(size_t n) {
    out_ += regex_.substr(at_, n);
    at_ += n;
  }

  Status InClass() {
    if (Next("[")) return Refuse("[ inside a class");
    if (Next("&&")) return Refuse("&&");
    if (Next("]")) in_class_ = false;
    Copy(1);
    return {};
  }

  Status Outside() {
    if (Next("[")) {
      in_class_ = true;
      Copy(Next("[^") ? 2 : 1);
      if (Next("]")) return Refuse("] first in a class");
      return {};
    }
    if (Next("(?")) {
      for (std::string_view group : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:"}) {
        if (!Next(group)) continue;
        Copy(group.size());
        return {};
      }
      return Refuse(regex_.substr(at_, 3));
    }
    if (Next("}+") || Next("}?")) return Refuse(regex_.substr(at_, 2));  // read differently by Ruby
    if (Next("(*")) return Refuse("(*");                                 // a PCRE2 verb
    Copy(1);
    return {};
  }

  Status Escape() {
    if (at_ + 1 >= regex_.size()) return Fail(Code::kInvalidArgument, "'\\' at the end");
    char c = regex_[at_ + 1];
    switch (c) {
      case 's': return Class(std::string(WhiteSpaceClassBody()), false);
      case 'S':
        // PCRE2's white space is Unicode's and U+180E.
        if (in_class_) return Class("\\S\\x{180e}", false);
        return Class(std::string(WhiteSpaceClassBody()), true);
      case 'd': return Property("Nd", false);
      case 'D': return Property("Nd", true);
      case 'p':
      case 'P': return NamedProperty(c == 'P');
      case 'r':
      case 'n':
      case 't':
      case 'f': Copy(2); return {};
      default: break;
    }
    bool letter_or_digit = (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z');
    if (letter_or_digit) return Refuse(regex_.substr(at_, 2));
    // Escaped punctuation stands for itself in both; beyond ASCII the backslash is dropped.
    if (static_cast<unsigned char>(c) >= 0x80) {
      ++at_;
      return {};
    }
    Copy(2);
    return {};
  }

  Status NamedProperty(bool negated) {
    size_t close = regex_.find('}', at_);
    if (regex_.substr(at_ + 2, 1) != "{" || close == std::string_view::npos) {
      return Refuse(regex_.substr(at_, 3));
    }
    std::string_view name = regex_.substr(at_ + 3, close - at_ - 3);
    if (name.starts_with("^")) {
      negated = !negated;
      name.remove_prefix(1);
    }
    if (!IsGeneralCategory(name)) return Refuse(regex_.substr(at_, close + 1 - at_));
    FATHOM_TRY(Property(name, negated));
    at_ = close + 1;
    return {};
  }

  Status Property(std::string_view name, bool negated) {
    return Class(fmt::format("\\p{{{}}}{}", name, NewerCodePoints(name)), negated);
  }

  // Writes a class body, as part of the class it stands in or as a class of its own, for the
  // two-character escape at hand.
  Status Class(const std::string& body, bool negated) {
    if (in_class_ && negated) return Refuse("negated property inside a class");
    out_ += in_class_ ? body : fmt::format("[{}{}]", negated ? "^" : "", body);
    at_ += 2;
    return {};
  }

  std::string_view regex_;
  size_t at_ = 0;
  bool in_class_ = false;
  std::string out_;
};

}  // namespace

Expected<std::string> TranslateRegex(std::string_view regex) {
  return Translator(regex).Run();
}

}  // namespace fathom
