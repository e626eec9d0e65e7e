#include "text/stop_matcher.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "text/testing.h"

namespace fathom {
namespace {

struct Outcome {
  std::string text, stop;
  bool operator==(const Outcome&) const = default;
};

// What the text as a whole gives: the match that begins first, the shortest of those.
Outcome ByDefinition(const std::vector<std::string>& stops, const std::string& text) {
  size_t begin = text.size() + 1;
  std::string found;
  for (const std::string& stop : stops) {
    if (stop.empty()) continue;
    const size_t at = text.find(stop);
    if (at == std::string::npos || at > begin) continue;
    if (at == begin && stop.size() > found.size()) continue;
    begin = at;
    found = stop;
  }
  if (found.empty()) return {text, ""};
  return {text.substr(0, begin), found};
}

Outcome InPieces(const std::vector<std::string>& stops, const std::vector<std::string>& pieces) {
  StopMatcher matcher(stops);
  Outcome outcome;
  for (const std::string& piece : pieces) outcome.text += matcher.Push(piece);
  outcome.text += matcher.Finish();
  outcome.stop = matcher.stop_string();
  return outcome;
}

RC_GTEST_PROP(StopMatcher, OutcomeIsThatOfTheWholeText, ()) {
  const auto word = rc::gen::container<std::string>(rc::gen::element('a', 'b'));
  const auto stops = *rc::gen::container<std::vector<std::string>>(word);
  const auto pieces = *rc::gen::container<std::vector<std::string>>(word);
  std::string text;
  for (const std::string& piece : pieces) text += piece;
  const Outcome expected = ByDefinition(stops, text);
  RC_ASSERT(InPieces(stops, pieces) == expected);
  RC_ASSERT(InPieces(stops, {text}) == expected);
}

TEST(StopMatcher, AnEarlierMatchIsWaitedFor) {
  EXPECT_EQ(InPieces({"abcd", "bc"}, {"xabc", "d"}), (Outcome{"x", "abcd"}));
  EXPECT_EQ(InPieces({"abcd", "bc"}, {"xabc", "e"}), (Outcome{"xa", "bc"}));
  EXPECT_EQ(InPieces({"abcd", "bc"}, {"xabc"}), (Outcome{"xa", "bc"}));
}

TEST(StopMatcher, TextIsHeldOnlyAsLongAsAStopStringMayBegin) {
  StopMatcher matcher({"END"});
  EXPECT_EQ(matcher.Push("the E"), "the ");
  EXPECT_EQ(matcher.Push("N"), "");
  EXPECT_EQ(matcher.Push("E"), "EN");
  EXPECT_EQ(matcher.Push("NDrest"), "");
  EXPECT_TRUE(matcher.stopped());
  EXPECT_EQ(matcher.rest(), "rest");
  EXPECT_EQ(matcher.Push("more"), "");
  EXPECT_EQ(matcher.Finish(), "");
}

}  // namespace
}  // namespace fathom
