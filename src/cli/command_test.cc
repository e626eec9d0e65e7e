#include "cli/command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <fstream>

namespace fathom {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ParseCount, ReadsVllmsSuffixes) {
  EXPECT_EQ(ParseCount("0"), 0);
  EXPECT_EQ(ParseCount("25000"), 25000);
  EXPECT_EQ(ParseCount("-1"), -1);
  EXPECT_EQ(ParseCount("25k"), 25000);
  EXPECT_EQ(ParseCount("25.6k"), 25600);
  EXPECT_EQ(ParseCount("1K"), 1024);
  EXPECT_EQ(ParseCount("1m"), 1'000'000);
  EXPECT_EQ(ParseCount("1M"), 1'048'576);
  EXPECT_EQ(ParseCount("2g"), 2'000'000'000);
  EXPECT_EQ(ParseCount("2G"), int64_t{2} << 30);
  EXPECT_EQ(ParseCount("2t"), 2'000'000'000'000);
  EXPECT_EQ(ParseCount("1024T"), int64_t{1} << 50);
  EXPECT_EQ(ParseCount("1.5T"), int64_t{3} << 39);
  EXPECT_EQ(ParseCount("1e6"), 1'000'000);
  EXPECT_EQ(ParseCount("9007199254740993"), 9'007'199'254'740'993);  // no double
  EXPECT_EQ(ParseCount("9223372036854775807"), INT64_MAX);
}

TEST(ParseCount, SaysWhatIsWrong) {
  const auto error = [](const char* text) { return ParseCount(text).error().message; };
  for (const char* text : {"1e30", "1e999", "9223372036854775808", "99999999999999999999",
                           "9223372036854775807K", "8388608T", "1e19k"}) {
    EXPECT_EQ(error(text), fmt::format("'{}' is too large: the most is 9223372036854775807", text));
  }
  EXPECT_THAT(error("1P"), HasSubstr("'1P' ends in 'P', which is no suffix: known are k, m, g, t"));
  EXPECT_THAT(error("1GB"), HasSubstr("ends in 'GB'"));
  for (const char* text : {"", "x", "1.5", "0.0001K", "1e-999", "nan", "inf"}) {
    EXPECT_EQ(error(text), fmt::format("'{}' is not a whole number (25000, 25k, 1M)", text));
  }
}

TEST(ParseCount, RefusesWhatIsNoWholeNumber) {
  for (const char* text : {"", "k", "1.5", "1kk", "1x", "0x10", " 1", "1 ", "nan", "inf", "1e30",
                           "99999999999999999999"}) {
    const Expected<int64_t> count = ParseCount(text);
    EXPECT_FALSE(count.has_value()) << text;
    EXPECT_THAT(count.error().message, HasSubstr(fmt::format("'{}'", text)));
  }
}

TEST(EnvironmentName, IsTheFlagInCapitals) {
  EXPECT_EQ(EnvironmentName("max-model-len"), "FATHOM_MAX_MODEL_LEN");
  EXPECT_EQ(EnvironmentName("attention-config.indexer_kv_dtype"),
            "FATHOM_ATTENTION_CONFIG_INDEXER_KV_DTYPE");
}

TEST(NormaliseArguments, TouchesOnlyTheFirstPartOfLongFlags) {
  std::vector<std::string> words = {"fathom", "a_model", "--max_model_len", "--a_b.c_d=e_f", "-x_y",
                                    "--",     "--x_y"};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  EXPECT_THAT(NormaliseArguments(static_cast<int>(argv.size()), argv.data()),
              ElementsAre("a_model", "--max-model-len", "--a-b.c_d=e_f", "-x_y", "--", "--x_y"));
}

// One command with a setting of every type.
class CommandTest : public ::testing::Test {
 protected:
  struct Values {
    std::string text = "t", choice = "a", word, full;
    std::vector<std::string> list;
    int count = 7;
    int64_t length = 5;
    double real = 0.5;
    bool off = false, on = true;
  };

  ~CommandTest() override {
    for (const std::string& name : environment_) unsetenv(name.c_str());
    std::remove(path_.c_str());
  }

  void SetEnvironment(const std::string& name, const std::string& value) {
    setenv(name.c_str(), value.c_str(), 1);
    environment_.push_back(name);
  }

  std::string WriteFile(const std::string& text) {
    std::ofstream(path_) << text;
    return path_;
  }

  // The message of the error that ended parsing; empty when there was none.
  std::string Run(std::vector<std::string> arguments) {
    values_ = {};
    ran_ = false;
    CLI::App app("test");
    auto command = Command::Add(app, "go", "summary", "  example");
    command->Text("--text", values_.text, "T", "help");
    command->Text("--full", values_.full, "F", "help");
    command->NotEmpty("--full");
    command->Choice("--choice", values_.choice, {"a", "b"}, "help", {{"beta", "b"}});
    command->List("--list", values_.list, "L", "help");
    command->Count("--length,--length-tokens", values_.length, 0, 100, "help", true);
    command->Count("--count", values_.count, 1, 100, "help");
    command->Real("--real", values_.real, 0, 1, "help");
    command->Switch("--off", values_.off, "help");
    command->Switch("--on", values_.on, "help");
    command->NoEffect("--other", false, "reason");
    command->NoEffect("--devices", false, "one only", {"1"});
    command->NoEffect("--cached", true, "no cache", {"false"});
    command->Positional("word", values_.word, "help");
    command->Secret("--text");
    int exit_code = -1;
    command->OnRun(&exit_code, [this](Command& self) {
      ran_ = true;
      config_ = self.PrintConfig();
      notices_ = self.Notices();
      return 0;
    });
    arguments.insert(arguments.begin(), "go");
    Expected<std::vector<std::string>> prepared = PrepareArguments(app, std::move(arguments));
    if (!prepared) return prepared.error().message;
    arguments = std::move(*prepared);
    std::reverse(arguments.begin(), arguments.end());
    try {
      app.parse(std::move(arguments));
    } catch (const CLI::ParseError& error) {
      return error.what();
    }
    EXPECT_EQ(exit_code, 0);
    return "";
  }

  Values values_;
  bool ran_ = false;
  std::string config_;
  std::vector<std::string> notices_;

 private:
  // Its own: the tests of another build may run at the same time.
  std::string path_ =
      ::testing::TempDir() + "/fathom_command_test." + std::to_string(getpid()) + ".yaml";
  std::vector<std::string> environment_;
};

TEST_F(CommandTest, DefaultsStandWithoutAnySource) {
  ASSERT_EQ(Run({}), "");
  EXPECT_EQ(values_.count, 7);
  EXPECT_TRUE(values_.on);
  EXPECT_THAT(config_, HasSubstr("count: 7"));
  EXPECT_TRUE(notices_.empty());
}

TEST_F(CommandTest, FlagBeatsEnvironmentBeatsFileBeatsDefault) {
  const std::string file = WriteFile("count: 10\nreal: 0.25\nchoice: b\n");
  SetEnvironment("FATHOM_COUNT", "20");
  SetEnvironment("FATHOM_REAL", "0.75");
  ASSERT_EQ(Run({"--config", file, "--count", "30"}), "");
  EXPECT_EQ(values_.count, 30);
  EXPECT_EQ(values_.real, 0.75);
  EXPECT_EQ(values_.choice, "b");
  EXPECT_EQ(values_.text, "t");
}

TEST_F(CommandTest, SwitchesHaveTwoFormsInEverySource) {
  ASSERT_EQ(Run({"--off", "--no-on"}), "");
  EXPECT_TRUE(values_.off);
  EXPECT_FALSE(values_.on);
  ASSERT_EQ(Run({"--off=True", "--on=false"}), "");
  EXPECT_TRUE(values_.off);
  EXPECT_FALSE(values_.on);
  SetEnvironment("FATHOM_OFF", "1");
  SetEnvironment("FATHOM_ON", "off");
  ASSERT_EQ(Run({}), "");
  EXPECT_TRUE(values_.off);
  EXPECT_FALSE(values_.on);
  ASSERT_EQ(Run({"--no-off", "--config", WriteFile("on: true")}), "");
  EXPECT_FALSE(values_.off);
  EXPECT_FALSE(values_.on);  // the environment beats the file
}

TEST_F(CommandTest, ListsComeFromRepeatedFlagsCommasAndSequences) {
  ASSERT_EQ(Run({"--list", "a", "--list", "b"}), "");
  EXPECT_THAT(values_.list, ElementsAre("a", "b"));
  ASSERT_EQ(Run({"--list", "a", "w"}), "");  // one value a flag: what follows is an argument
  EXPECT_THAT(values_.list, ElementsAre("a"));
  EXPECT_EQ(values_.word, "w");
  ASSERT_EQ(Run({"--list", R"(["a", "b,c"])", "--list=d"}), "");
  EXPECT_THAT(values_.list, ElementsAre("a", "b,c", "d"));
  ASSERT_EQ(Run({"--config", WriteFile("list: []")}), "");
  EXPECT_TRUE(values_.list.empty());
  ASSERT_EQ(Run({"--config", WriteFile("list: [c, d]")}), "");
  EXPECT_THAT(values_.list, ElementsAre("c", "d"));
  SetEnvironment("FATHOM_LIST", "e,f");
  ASSERT_EQ(Run({}), "");
  EXPECT_THAT(values_.list, ElementsAre("e", "f"));
}

TEST_F(CommandTest, MistakesNameTheirSource) {
  EXPECT_THAT(Run({"--count", "0"}), HasSubstr("--count"));
  EXPECT_THAT(Run({"--count", "101"}), HasSubstr("between 1 and 100"));
  EXPECT_THAT(Run({"--real", "1.5"}), HasSubstr("--real"));
  EXPECT_THAT(Run({"--choice", "c"}), HasSubstr("a, b"));
  EXPECT_THAT(Run({"--unknown"}), HasSubstr("--unknown"));
  EXPECT_THAT(Run({"--config", WriteFile("real: 1\ncount: x")}), HasSubstr(".yaml:2"));
  EXPECT_THAT(Run({"--config", WriteFile("unknown: 1")}), HasSubstr("unknown"));
  EXPECT_THAT(Run({"--config", WriteFile("config: other.yaml")}), HasSubstr("config"));
  EXPECT_THAT(Run({"--config", WriteFile("off: maybe")}), HasSubstr("maybe"));
  EXPECT_THAT(Run({"--config", WriteFile("- a\n- b")}), HasSubstr("map"));
  EXPECT_THAT(Run({"--config", WriteFile("count: 1\ncount: 2")}), HasSubstr("twice"));
  EXPECT_THAT(Run({"--config", WriteFile("{")}), HasSubstr(".yaml"));
  EXPECT_FALSE(ran_);
  SetEnvironment("FATHOM_COUNT", "many");
  EXPECT_THAT(Run({}), HasSubstr("FATHOM_COUNT"));
}

TEST_F(CommandTest, AnEmptyInlineValueIsTheFlagsOwn) {
  ASSERT_EQ(Run({"--text=", "--count", "30"}), "");
  EXPECT_EQ(values_.text, "");
  EXPECT_EQ(values_.count, 30);
  for (const char* flag : {"--list", "--count", "--real", "--choice", "--off", "--config"}) {
    EXPECT_THAT(Run({std::string(flag) + "=", "--text", "x"}), HasSubstr(flag));
    EXPECT_FALSE(ran_) << flag;
  }
  ASSERT_EQ(Run({"--text", "--count=3"}), "");  // a value may look like a flag
  EXPECT_EQ(values_.text, "--count=3");
}

TEST_F(CommandTest, AConfigurationIsARegularFile) {
  const std::string path = WriteFile("");
  std::remove(path.c_str());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);  // nobody writes: opening it would never end
  EXPECT_THAT(Run({"--config", path}), HasSubstr(path + ": is no regular file"));
  const std::string folder = ::testing::TempDir();
  EXPECT_THAT(Run({"--config", folder}), HasSubstr(folder + ": is no regular file"));
  EXPECT_THAT(Run({"--config", path + ".absent"}), HasSubstr(".absent: cannot be read"));
  EXPECT_FALSE(ran_);
}

TEST_F(CommandTest, ATextThatMayNotBeEmptyIsRefusedFromEverySource) {
  EXPECT_THAT(Run({"--full="}), HasSubstr("--full: F must not be empty"));
  EXPECT_THAT(Run({"--full", ""}), HasSubstr("--full: F must not be empty"));
  EXPECT_THAT(Run({"--config", WriteFile("full: ''")}), HasSubstr("F must not be empty"));
  EXPECT_FALSE(ran_);
  ASSERT_EQ(Run({"--full", "x"}), "");
  EXPECT_EQ(values_.full, "x");
  SetEnvironment("FATHOM_FULL", "");  // as good as not set
  ASSERT_EQ(Run({}), "");
}

TEST_F(CommandTest, NoValueOfAListIsEmpty) {
  EXPECT_THAT(Run({"--list", ""}), HasSubstr("L must not be empty"));
  EXPECT_THAT(Run({"--config", WriteFile("list: ''")}), HasSubstr("L must not be empty"));
  EXPECT_THAT(Run({"--config", WriteFile("list: [a, '']")}), HasSubstr("L must not be empty"));
  SetEnvironment("FATHOM_LIST", "a,,b");
  EXPECT_THAT(Run({}), HasSubstr("FATHOM_LIST"));
}

TEST_F(CommandTest, UnknownNamesAreRefusedWithTheNearestKnownOne) {
  EXPECT_EQ(Run({"--cuont", "3"}), "--cuont is no flag of go; did you mean --count?");
  EXPECT_EQ(Run({"--nothing-of-the-kind"}), "--nothing-of-the-kind is no flag of go");
  CLI::App app("test");
  Command::Add(app, "go", "summary", "");
  Command::Add(app, "stay", "summary", "");
  EXPECT_EQ(PrepareArguments(app, {"goo"}).error().message,
            "there is no command 'goo'; commands are: go, stay");
  EXPECT_THAT(*PrepareArguments(app, {"help"}), ElementsAre("--help"));
  EXPECT_THAT(*PrepareArguments(app, {"help", "go"}), ElementsAre("go", "--help"));
  EXPECT_THAT(*PrepareArguments(app, {"go", "--", "--x"}), ElementsAre("go", "--", "--x"));
}

TEST_F(CommandTest, OtherSpellingsMeanTheSame) {
  for (const char* text : {"auto", "-1", "AUTO", "0"}) {
    ASSERT_EQ(Run({"--length-tokens", text}), "");
    EXPECT_EQ(values_.length, 0);
  }
  ASSERT_EQ(Run({"--config", WriteFile("length_tokens: 9")}), "");
  EXPECT_EQ(values_.length, 9);
  ASSERT_EQ(Run({"--choice", "B"}), "");
  EXPECT_EQ(values_.choice, "b");
  ASSERT_EQ(Run({"--choice", "beta"}), "");
  EXPECT_EQ(values_.choice, "b");
  SetEnvironment("FATHOM_LENGTH_TOKENS", "8");
  ASSERT_EQ(Run({}), "");
  EXPECT_EQ(values_.length, 8);
}

TEST_F(CommandTest, WhatHasNoEffectIsRefusedWhereItWouldHaveOne) {
  ASSERT_EQ(Run({"--devices", "1", "--no-cached"}), "");
  EXPECT_THAT(notices_,
              ElementsAre("--devices has no effect: one only", "--cached has no effect: no cache"));
  EXPECT_THAT(Run({"--devices=2"}), HasSubstr("'2' is not supported: one only"));
  EXPECT_THAT(Run({"--cached"}), HasSubstr("no cache"));
  EXPECT_FALSE(ran_);
}

TEST_F(CommandTest, PrintedConfigurationReadsBack) {
  ASSERT_EQ(Run({"--text", "s", "--list", "a,b", "--list", "null", "--off", "--count", "3"}), "");
  const std::string first = config_;
  ASSERT_EQ(Run({"--config", WriteFile(first)}), "");
  EXPECT_THAT(values_.list, ElementsAre("a,b", "null"));
  EXPECT_EQ(values_.text, "t");  // a secret is a comment
  EXPECT_EQ(values_.count, 3);
  EXPECT_TRUE(values_.off);
  ASSERT_EQ(Run({"two\nlines"}), "");
  ASSERT_EQ(Run({"--config", WriteFile(config_)}), "");
  EXPECT_EQ(values_.word, "two\nlines");
}

TEST_F(CommandTest, WhatHasNoEffectIsNamedWhenGiven) {
  ASSERT_EQ(Run({"--other", "x"}), "");
  EXPECT_THAT(notices_, ElementsAre("--other has no effect: reason"));
  ASSERT_EQ(Run({"--config", WriteFile("other: {a: 1, b: [true, 'no']}")}), "");
  EXPECT_THAT(notices_, ElementsAre("--other has no effect: reason"));
  EXPECT_THAT(config_, HasSubstr(R"({"a":1,"b":[true,"no"]})"));
}

TEST_F(CommandTest, SecretsAreNotPrinted) {
  ASSERT_EQ(Run({"--text", "hunter2"}), "");
  EXPECT_THAT(config_, HasSubstr("(hidden)"));
  EXPECT_THAT(config_, ::testing::Not(HasSubstr("hunter2")));
  EXPECT_THAT(config_, HasSubstr("# text:"));
}

}  // namespace
}  // namespace fathom
