// The demo checkpoint for the engine's tests, loaded once for all tests of a file.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "engine/test_util.h"

namespace fathom {

inline std::string DemoFolder() {
  const char* folder = std::getenv("FATHOM_SHARED");
  return (folder != nullptr ? std::string(folder) : FATHOM_SOURCE_DIR "/../shared") +
         "/models/demo";
}

// Sanitizers look at memory and threads; every value of a long list is the release tests' business.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

struct Golden {
  std::string name;
  std::vector<TokenId> prompt, greedy;
};

class DemoModelTest : public ::testing::Test {
 protected:
  struct Model {
    ModelConfig config;
    Weights weights;
    ThreadPool threads{2};
    std::vector<Golden> golden;
  };

  static void SetUpTestSuite() {
    auto loaded = std::make_unique<Model>();
    auto config = LoadModelConfig(DemoFolder());
    ASSERT_TRUE(config.has_value()) << config.error().message;
    loaded->config = std::move(*config);
    auto weights = LoadWeights(DemoFolder(), loaded->config, {});
    ASSERT_TRUE(weights.has_value()) << weights.error().message;
    loaded->weights = std::move(*weights);
    PackForCpu(loaded->weights, loaded->threads);
    std::ifstream file(DemoFolder() + "/golden.json");
    for (const auto& json : nlohmann::json::parse(file)) {
      Golden golden{json.at("name"), json.at("prompt_ids"), json.at("greedy_ids")};
      loaded->golden.push_back(std::move(golden));
    }
    ASSERT_GE(loaded->golden.size(), 2u);
    model_ = loaded.release();
  }
  static void TearDownTestSuite() {
    delete model_;
    model_ = nullptr;
  }

  static std::unique_ptr<Engine> StartModel(EngineOptions options, ExecutorLimits limits = {},
                                            CacheOptions cache = {},
                                            ops::Numerics numerics = ops::Numerics::kProduct) {
    options.eos_token = model_->config.eos_token;
    const Geometry geometry = *MakeGeometry(model_->config, cache);
    auto engine = Engine::Start(
        options, geometry,
        [&](BlockPool& blocks, SlotPool& slots) -> Expected<std::unique_ptr<Executor>> {
          return MakeCpuExecutor(model_->config, model_->weights, geometry, blocks, slots,
                                 model_->threads, {.numerics = numerics}, limits);
        });
    EXPECT_TRUE(engine.has_value()) << engine.error().message;
    return std::move(*engine);
  }

  inline static Model* model_ = nullptr;
};

// Token and log-probability pairs, of the prompt and then of the text; equal only to the last bit.
inline std::vector<std::pair<TokenId, float>> Trace(const Collector::Answer& answer) {
  std::vector<std::pair<TokenId, float>> trace;
  for (const auto* part : {&answer.prompt_logprobs, &answer.logprobs}) {
    for (const auto& entry : *part) trace.emplace_back(entry[0].token, entry[0].logprob);
  }
  return trace;
}

}  // namespace fathom
