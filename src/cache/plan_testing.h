// Shared by the tests of the memory plan: the released models' configurations.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "cache/planner.h"
#include "model/testing.h"

namespace fathom::testing {

inline constexpr int64_t kMillion = 1'048'576;

inline ModelConfig ReleasedConfig(const std::string& name) {
  const std::string path = SharedPath("models/configs/" + name + ".json");
  auto config = ParseModelConfig(ReadAll(path), path);
  EXPECT_TRUE(config) << config.error().message;
  return config.value_or(ModelConfig{});
}

// Skips without the shared fixtures; fails without them in CI.
class PlanTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::filesystem::exists(SharedPath("models/configs/v4-flash.json"))) return;
    if (std::getenv("CI") != nullptr) FAIL() << SharedPath("models/configs") << " is missing";
    GTEST_SKIP() << SharedPath("models/configs") << " is missing";
  }

  static ModelConfig Config(const std::string& name) { return ReleasedConfig(name); }
  static MemoryPlan Plan(const std::string& name, const PlanRequest& request) {
    auto plan = PlanMemory(Config(name), request);
    EXPECT_TRUE(plan) << plan.error().message;
    return plan.value_or(MemoryPlan{});
  }
};

}  // namespace fathom::testing
