#include "text/stop_matcher.h"

#include <algorithm>

namespace fathom {

StopMatcher::StopMatcher(const std::vector<std::string>& stops) {
  for (const std::string& stop : stops) {
    if (stop.empty()) continue;
    Pattern pattern{stop, std::vector<uint32_t>(stop.size(), 0)};
    uint32_t border = 0;
    for (size_t i = 1; i < stop.size(); ++i) {
      while (border > 0 && stop[i] != stop[border]) border = pattern.border[border - 1];
      if (stop[i] == stop[border]) ++border;
      pattern.border[i] = border;
    }
    patterns_.push_back(std::move(pattern));
  }
}

bool StopMatcher::Pattern::Step(char c) {
  if (matched == text.size()) matched = border[matched - 1];
  while (matched > 0 && text[matched] != c) matched = border[matched - 1];
  if (text[matched] == c) ++matched;
  return matched == text.size();
}

bool StopMatcher::Advance(char c) {
  ++position_;
  uint64_t earliest = position_;  // where the earliest match that may still come true begins
  for (Pattern& pattern : patterns_) {
    if (pattern.Step(c)) {
      uint64_t begin = position_ - pattern.text.size();
      // A later match from the same place would be longer.
      if (!found_ || begin < found_begin_) {
        found_ = true;
        found_begin_ = begin;
        stop_string_ = pattern.text;
      }
    } else {
      earliest = std::min(earliest, position_ - pattern.matched);
    }
  }
  return found_ && earliest >= found_begin_;
}

std::string StopMatcher::Push(std::string_view text) {
  if (stopped_) return {};
  if (patterns_.empty()) return std::string(text);
  for (size_t i = 0; i < text.size(); ++i) {
    if (!Advance(text[i])) continue;
    held_ += text.substr(0, i + 1);
    std::string safe = Stop();
    rest_ += text.substr(i + 1);
    return safe;
  }
  held_ += text;
  size_t keep = found_ ? position_ - found_begin_ : 0;
  for (const Pattern& pattern : patterns_) {
    if (pattern.matched < pattern.text.size()) keep = std::max(keep, pattern.matched);
  }
  std::string safe = held_.substr(0, held_.size() - keep);
  held_.erase(0, safe.size());
  return safe;
}

std::string StopMatcher::Finish() {
  if (stopped_) return {};
  if (found_) return Stop();
  std::string safe = std::move(held_);
  held_.clear();
  return safe;
}

// Ends with the match found; returns the text before it.
std::string StopMatcher::Stop() {
  stopped_ = true;
  const uint64_t held_begin = position_ - held_.size();
  std::string safe = held_.substr(0, found_begin_ - held_begin);
  rest_ = held_.substr(safe.size() + stop_string_.size());
  held_.clear();
  return safe;
}

}  // namespace fathom
