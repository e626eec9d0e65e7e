// Pre-tokenisation by the split regexes themselves, compiled by PCRE2.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>

#include "core/log.h"
#include "text/pre_tokenizer.h"

namespace fathom {
namespace {

template <auto Free>
struct Deleter {
  template <class T>
  void operator()(T* p) const {
    Free(p);
  }
};
using Code8 = std::unique_ptr<pcre2_code, Deleter<pcre2_code_free>>;
using MatchData = std::unique_ptr<pcre2_match_data, Deleter<pcre2_match_data_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Deleter<pcre2_match_context_free>>;
using CompileContext = std::unique_ptr<pcre2_compile_context, Deleter<pcre2_compile_context_free>>;
using JitStack = std::unique_ptr<pcre2_jit_stack, Deleter<pcre2_jit_stack_free>>;

// What one thread needs to match; made once per thread, shared by all regexes.
struct Matcher {
  MatchData data{pcre2_match_data_create(1, nullptr)};  // only the whole match is wanted
  MatchContext context{pcre2_match_context_create(nullptr)};
  JitStack stack{pcre2_jit_stack_create(32 << 10, 8 << 20, nullptr)};
  std::vector<uint32_t> before, after;
  Matcher() { pcre2_jit_stack_assign(context.get(), nullptr, stack.get()); }
};

std::string PcreMessage(int code) {
  PCRE2_UCHAR buffer[256];
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

Expected<Code8> Compile(const std::string& regex) {
  auto translated = TranslateRegex(regex);
  if (!translated) {
    return Fail(translated.error().code, "regex '{}': {}", regex, translated.error().message);
  }
  CompileContext context(pcre2_compile_context_create(nullptr));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);  // Ruby's only line end
  int code = 0;
  PCRE2_SIZE offset = 0;
  // MULTILINE because ^ and $ always match at lines in Ruby's syntax.
  Code8 compiled(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated->data()), translated->size(),
                               PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                               &code, &offset, context.get()));
  if (!compiled) {
    return Fail(Code::kInvalidArgument, "regex '{}': {}", regex, PcreMessage(code));
  }
  // Without JIT (no executable memory allowed) matching is slower and the same.
  pcre2_jit_compile(compiled.get(), PCRE2_JIT_COMPLETE);
  return compiled;
}

class RegexPreTokenizer final : public PreTokenizer {
 public:
  explicit RegexPreTokenizer(std::vector<Code8> steps) : steps_(std::move(steps)) {}

  void Split(std::string_view text, std::vector<uint32_t>& ends) const override {
    if (text.empty()) return;
    thread_local Matcher matcher;
    std::vector<uint32_t>& before = matcher.before;
    std::vector<uint32_t>& after = matcher.after;
    before.assign(1, static_cast<uint32_t>(text.size()));
    for (const Code8& step : steps_) {
      after.clear();
      uint32_t begin = 0;
      for (uint32_t end : before) {
        // Each piece is a text of its own: nothing outside is seen by ^, $ or a look-around.
        SplitPiece(step.get(), text.substr(begin, end - begin), begin, matcher, after);
        begin = end;
      }
      before.swap(after);
    }
    ends.insert(ends.end(), before.begin(), before.end());
  }

 private:
  static void SplitPiece(const pcre2_code* regex, std::string_view piece, uint32_t origin,
                         Matcher& matcher, std::vector<uint32_t>& ends) {
    size_t cut = 0;  // ends up to here are written
    auto cut_at = [&](size_t offset) {
      if (offset > cut) ends.push_back(origin + static_cast<uint32_t>(offset));
      cut = std::max(cut, offset);
    };
    size_t from = 0;
    size_t last_end = std::string_view::npos;
    while (from <= piece.size()) {
      int rc = pcre2_match(regex, reinterpret_cast<PCRE2_SPTR>(piece.data()), piece.size(), from,
                           PCRE2_NO_UTF_CHECK, matcher.data.get(), matcher.context.get());
      if (rc < 0) {
        if (rc != PCRE2_ERROR_NOMATCH) {
          Log().error("tokenizer: split regex gave up on a piece of {} bytes: {}", piece.size(),
                      PcreMessage(rc));
        }
        break;
      }
      const PCRE2_SIZE* match = pcre2_get_ovector_pointer(matcher.data.get());
      size_t begin = match[0], end = match[1];
      if (begin == end && end == last_end) {  // an empty match right after a match counts as none
        if (from == piece.size()) break;
        do ++from;
        while (from < piece.size() && (piece[from] & 0xC0) == 0x80);
        continue;
      }
      cut_at(begin);
      cut_at(end);
      from = last_end = end;
    }
    cut_at(piece.size());
  }

  std::vector<Code8> steps_;
};

}  // namespace

Expected<std::unique_ptr<PreTokenizer>> MakeRegexPreTokenizer(
    const std::vector<std::string>& regexes) {
  std::vector<Code8> steps;
  for (const std::string& regex : regexes) {
    FATHOM_ASSIGN(Code8 code, Compile(regex));
    steps.push_back(std::move(code));
  }
  return std::make_unique<RegexPreTokenizer>(std::move(steps));
}

}  // namespace fathom
