// `fathom plan` on the demo model: what its exit status says, whatever it prints.
#include <gmock/gmock.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/commands.h"

namespace fathom {
namespace {

using ::testing::HasSubstr;

const std::string kDemo = FATHOM_SOURCE_DIR "/models/demo";

struct Result {
  int status = -1;
  std::string out, err;
};

Result RunPlan(std::vector<std::string> arguments) {
  CLI::App app("test", "fathom");
  Result result;
  AddPlanCommand(app, &result.status);
  arguments.insert(arguments.begin(), {"plan", kDemo, "--device", "cpu"});
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  std::fflush(stdout);
  result.out = testing::internal::GetCapturedStdout();
  result.err = testing::internal::GetCapturedStderr();
  return result;
}

TEST(PlanCommand, TheStatusIsOneWhereItDoesNotFitWhateverIsPrinted) {
  const Result plan = RunPlan({"--memory", "100M"});
  EXPECT_EQ(plan.status, 1);
  EXPECT_THAT(plan.out, HasSubstr("does not fit: "));
  const Result tables = RunPlan({"--memory", "100M", "--what-if"});
  EXPECT_EQ(tables.status, 1);
  EXPECT_THAT(tables.out, HasSubstr("block sizes: "));
  EXPECT_THAT(tables.err, HasSubstr("it does not fit: "));
  for (const bool what_if : {false, true}) {
    std::vector<std::string> arguments = {"--memory", "100M", "--json"};
    if (what_if) arguments.emplace_back("--what-if");
    const Result json = RunPlan(arguments);
    EXPECT_EQ(json.status, 1);
    EXPECT_EQ(json.err, "");
    const auto parsed = nlohmann::json::parse(json.out);
    EXPECT_EQ(parsed["fit"]["fits"], false);
    EXPECT_EQ(parsed.contains("what_if"), what_if);
  }
}

TEST(PlanCommand, TheStatusIsZeroWhereItFitsOrNoMemoryIsGiven) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {}, {"--what-if"}, {"--memory", "4G", "--what-if"}, {"--memory", "4G", "--json"}}) {
    const Result result = RunPlan(arguments);
    EXPECT_EQ(result.status, 0) << result.err;
    EXPECT_EQ(result.err, "");
  }
}

}  // namespace
}  // namespace fathom
