#include "model/config_overrides.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "model/config.h"
#include "model/testing.h"

namespace fathom {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string DemoText() {
  return testing::ReadAll(testing::DemoDirectory() + "/config.json");
}

Expected<ModelConfig> Overridden(const std::string& text, const std::string& overrides) {
  FATHOM_ASSIGN(const std::string config, OverrideConfig(text, "config.json", overrides));
  return ParseModelConfig(config, "config.json");
}

std::string Refused(const std::string& overrides) {
  const auto config = OverrideConfig(DemoText(), "config.json", overrides);
  EXPECT_FALSE(config) << overrides;
  if (config) return "";
  EXPECT_EQ(config.error().code, Code::kInvalidArgument);
  EXPECT_EQ(config.error().param, "--hf-overrides");
  return config.error().message;
}

TEST(ConfigOverrides, EmptyOnesChangeNoByte) {
  EXPECT_EQ(*OverrideConfig(DemoText(), "config.json", ""), DemoText());
  EXPECT_EQ(json::parse(*OverrideConfig(DemoText(), "config.json", "{}")), json::parse(DemoText()));
}

TEST(ConfigOverrides, ReplaceValuesAndReachIntoObjects) {
  const auto config = Overridden(
      DemoText(), R"({"n_routed_experts": 64, "rope_scaling": {"factor": 8}, "index_topk": 256})");
  ASSERT_TRUE(config) << config.error().message;
  const auto before = ParseModelConfig(DemoText(), "config.json");
  EXPECT_EQ(config->num_experts, 64);
  EXPECT_EQ(config->index_top_k, 256);
  EXPECT_EQ(config->yarn.factor, 8);
  EXPECT_EQ(config->yarn.beta_fast, before->yarn.beta_fast);
  EXPECT_EQ(config->num_layers, before->num_layers);
}

TEST(ConfigOverrides, FewerLayersTakeTheScheduleAlong) {
  json flash = json::parse(DemoText());
  flash["num_hidden_layers"] = 5;
  flash["num_hash_layers"] = 3;
  flash["compress_ratios"] = {0, 0, 4, 128, 4, 0};  // the last one is the drafter's
  const auto two = Overridden(flash.dump(), R"({"num_hidden_layers": 2})");
  ASSERT_TRUE(two) << two.error().message;
  EXPECT_THAT(two->compress_ratios, ElementsAre(0, 0, 0));
  EXPECT_EQ(two->num_hash_layers, 2);
  const auto four = Overridden(flash.dump(), R"({"num_hidden_layers": 4})");
  EXPECT_THAT(four->compress_ratios, ElementsAre(0, 0, 4, 128, 0));
  EXPECT_EQ(four->num_hash_layers, 3);
  // What is given is taken as it is, and more layers need their own ratios.
  const auto own =
      Overridden(flash.dump(),
                 R"({"num_hidden_layers": 2, "compress_ratios": [4, 128], "num_hash_layers": 0})");
  EXPECT_THAT(own->compress_ratios, ElementsAre(4, 128));
  EXPECT_EQ(own->num_hash_layers, 0);
  const auto more = Overridden(flash.dump(), R"({"num_hidden_layers": 7})");
  ASSERT_FALSE(more);
  EXPECT_EQ(more.error().param, "compress_ratios");
}

TEST(ConfigOverrides, NullRemovesAKey) {
  json config = json::parse(DemoText());
  config["expert_dtype"] = "fp8";
  EXPECT_EQ(Overridden(config.dump(), R"({"expert_dtype": null})")->expert_format,
            ExpertFormat::kUnknown);
  const auto needed = Overridden(DemoText(), R"({"hidden_size": null})");
  ASSERT_FALSE(needed);
  EXPECT_EQ(needed.error().param, "hidden_size");
}

TEST(ConfigOverrides, MistakesNameTheFlagAndTheKey) {
  EXPECT_THAT(Refused("[1]"), HasSubstr("--hf-overrides: is [1], must be an object"));
  EXPECT_THAT(Refused("{"), HasSubstr("--hf-overrides: not valid JSON"));
  EXPECT_THAT(Refused(R"({"num_layers": 2})"), HasSubstr("config.json has no key num_layers"));
  EXPECT_THAT(Refused(R"({"rope_scaling": {"fator": 2}})"), HasSubstr("no key rope_scaling.fator"));
  EXPECT_THAT(Refused(R"({"index_topk": 1, "index_topk": 2})"), HasSubstr("duplicate key"));
  // Values are the parser's: it names the key.
  const auto absurd = Overridden(DemoText(), R"({"n_routed_experts": -1})");
  ASSERT_FALSE(absurd);
  EXPECT_EQ(absurd.error().param, "n_routed_experts");
}

}  // namespace
}  // namespace fathom
