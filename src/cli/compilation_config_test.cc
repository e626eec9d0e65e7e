#include "cli/compilation_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fathom {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

int Sequences(const char* text) {
  const auto config = ParseCompilationConfig(text);
  EXPECT_TRUE(config.has_value()) << (config ? "" : config.error().message);
  return config ? config->graph_sequences : -1;
}

TEST(CompilationConfig, ModesAndSizesSayWhatIsCaptured) {
  EXPECT_EQ(Sequences("{}"), kGraphSequences);
  EXPECT_EQ(Sequences(R"({"cudagraph_mode": "NONE"})"), 0);
  EXPECT_EQ(Sequences(R"({"cudagraph_mode": 0})"), 0);
  for (const char* mode : {"PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"}) {
    EXPECT_EQ(Sequences(fmt::format(R"({{"cudagraph_mode": "{}"}})", mode).c_str()),
              kGraphSequences)
        << mode;
  }
  EXPECT_EQ(Sequences(R"({"max_cudagraph_capture_size": 16})"), 16);
  EXPECT_EQ(Sequences(R"({"cudagraph_capture_sizes": [1, 8, 4]})"), 8);
  EXPECT_EQ(Sequences(R"({"cudagraph_capture_sizes": [8], "cudagraph_mode": "NONE"})"), 0);
}

TEST(CompilationConfig, OtherKeysAreNamed) {
  const auto config = ParseCompilationConfig(R"({"level": 3, "custom_ops": ["all"]})");
  ASSERT_TRUE(config.has_value());
  EXPECT_THAT(config->ignored, ElementsAre("custom_ops", "level"));
}

TEST(CompilationConfig, RefusesWhatItCannotRead) {
  const auto fails = [](const char* text, const char* what) {
    const auto config = ParseCompilationConfig(text);
    ASSERT_FALSE(config.has_value()) << text;
    EXPECT_THAT(config.error().message, HasSubstr(what));
    EXPECT_THAT(config.error().message, HasSubstr("--compilation-config"));
  };
  fails("{", "");
  fails("[]", "object");
  fails("3", "object");
  fails(R"({"cudagraph_mode": "SOME"})", "SOME");
  fails(R"({"max_cudagraph_capture_size": -1})", "-1");
  fails(R"({"max_cudagraph_capture_size": 1e9})", "max_cudagraph_capture_size");
  fails(R"({"cudagraph_capture_sizes": 8})", "a list");
  fails(R"({"cudagraph_capture_sizes": ["8"]})", "cudagraph_capture_sizes");
}

}  // namespace
}  // namespace fathom
