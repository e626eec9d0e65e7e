// Finding stop strings in text that arrives in pieces.
//
//   StopMatcher stops({"END", "\n\n"});
//   std::string safe = stops.Push(text);     // may be delivered
//   if (stops.stopped()) ...                 // stops.stop_string() was met; nothing follows
//   std::string last = stops.Finish();       // what was held back in case a stop string had begun
//
// Among several matches the one that begins first in the text wins, among those the shortest. The
// outcome depends on the text alone, not on its pieces. If every piece ends at a character, so does
// everything returned. Not thread-safe; one object per stream.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fathom {

class StopMatcher {
 public:
  explicit StopMatcher(const std::vector<std::string>& stops);  // empty strings are left out

  // Text that no stop string can reach any more. After a match: nothing. Time is linear in the text
  // times the number of stop strings.
  std::string Push(std::string_view text);
  std::string Finish();

  bool stopped() const { return stopped_; }
  const std::string& stop_string() const { return stop_string_; }
  // After a match: the text behind it that had already arrived.
  const std::string& rest() const { return rest_; }

 private:
  // Knuth-Morris-Pratt: `matched` bytes of the pattern are a suffix of the text so far.
  struct Pattern {
    std::string text;
    std::vector<uint32_t> border;  // of each prefix, the longest proper prefix that ends it
    size_t matched = 0;
    bool Step(char c);  // true if the pattern ends here
  };

  bool Advance(char c);  // true once the match is settled
  std::string Stop();

  std::vector<Pattern> patterns_;
  uint64_t position_ = 0;  // bytes of text seen
  std::string held_;       // the last of them, not yet returned
  bool found_ = false;     // a match is complete, but an earlier one may still come true
  uint64_t found_begin_ = 0;
  std::string stop_string_, rest_;
  bool stopped_ = false;
};

}  // namespace fathom
