#include "engine/retained_sessions.h"

#include <gtest/gtest.h>

namespace fathom {
namespace {

TEST(RetainedSessions, AreForgottenWhenTheirTimeHasRunOut) {
  RetainedSessions sessions(10);
  sessions.Retain("long", 30);
  sessions.Retain("short", 10);
  sessions.Retain("also short", 10);
  EXPECT_EQ(sessions.size(), 3u);
  sessions.Expire(9.9);
  EXPECT_EQ(sessions.size(), 3u);
  sessions.Expire(10);
  EXPECT_EQ(sessions.size(), 1u);
  sessions.Expire(31);
  EXPECT_EQ(sessions.size(), 0u);
}

TEST(RetainedSessions, TheLastTimeCounts) {
  RetainedSessions sessions(10);
  sessions.Retain("later", 10);
  sessions.Retain("sooner", 90);
  sessions.Retain("later", 50);
  sessions.Retain("sooner", 20);
  EXPECT_EQ(sessions.size(), 2u);
  sessions.Expire(20);
  EXPECT_EQ(sessions.size(), 1u);
  sessions.Expire(49);
  EXPECT_EQ(sessions.size(), 1u);
  sessions.Expire(50);
  EXPECT_EQ(sessions.size(), 0u);
}

TEST(RetainedSessions, BeyondTheCapacityThoseThatExpireFirstGo) {
  RetainedSessions sessions(100);
  for (int i = 0; i < 1'000; ++i) sessions.Retain(std::to_string(i), 1'000 - i);
  EXPECT_EQ(sessions.size(), 100u);  // the first hundred, until 901 .. 1000
  sessions.Retain("soon", 5);        // the first to go itself
  EXPECT_EQ(sessions.size(), 100u);
  sessions.Expire(900);
  EXPECT_EQ(sessions.size(), 100u);
  sessions.Retain("late", 2'000);  // takes the place of the one until 901
  sessions.Expire(901);
  EXPECT_EQ(sessions.size(), 100u);
  sessions.Expire(902);
  EXPECT_EQ(sessions.size(), 99u);
  sessions.Clear();
  EXPECT_EQ(sessions.size(), 0u);
}

}  // namespace
}  // namespace fathom
