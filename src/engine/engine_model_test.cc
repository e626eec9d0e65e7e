// The engine over the real forward pass and the demo checkpoint: the reference continuation, and
// the same text whatever the batch, the chunks, the memory and the neighbours.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "engine/test_util.h"

namespace fathom {
namespace {

std::string DemoFolder() {
  const char* folder = std::getenv("FATHOM_SHARED");
  return (folder != nullptr ? std::string(folder) : FATHOM_SOURCE_DIR "/../shared") +
         "/models/demo";
}

struct Golden {
  std::string name;
  std::vector<TokenId> prompt, greedy;
};

// The checkpoint, loaded once for all tests of this file.
class EngineModel : public ::testing::Test {
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
      if (golden.prompt.size() <= 2'000) loaded->golden.push_back(std::move(golden));
    }
    ASSERT_GE(loaded->golden.size(), 2u);
    model_ = loaded.release();
  }
  static void TearDownTestSuite() {
    delete model_;
    model_ = nullptr;
  }

  static std::unique_ptr<Engine> StartModel(EngineOptions options, ExecutorLimits limits,
                                            CacheOptions cache = {}) {
    options.eos_token = model_->config.eos_token;
    const Geometry geometry = *MakeGeometry(model_->config, cache);
    auto engine = Engine::Start(
        options, geometry,
        [&](BlockPool& blocks, SlotPool& slots) -> Expected<std::unique_ptr<Executor>> {
          return MakeCpuExecutor(model_->config, model_->weights, geometry, blocks, slots,
                                 model_->threads, {}, limits);
        });
    EXPECT_TRUE(engine.has_value()) << engine.error().message;
    return std::move(*engine);
  }

  static Model* model_;
};
EngineModel::Model* EngineModel::model_ = nullptr;

TEST_F(EngineModel, GreedyTextIsTheReferences) {
  auto engine = StartModel({.max_model_len = 4'096, .max_num_seqs = 8}, {});
  auto queue = std::make_shared<Collector>();
  std::vector<RequestId> ids;
  for (const Golden& golden : model_->golden) {
    ids.push_back(
        *engine->Submit(Ask(queue, golden.prompt, static_cast<int64_t>(golden.greedy.size()))));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto answer = queue->Wait(ids[i]);
    std::vector<TokenId> right = model_->golden[i].greedy;
    if (right.back() == model_->config.eos_token) {
      right.pop_back();
      EXPECT_EQ(answer.finish, FinishReason::kStop);
    }
    EXPECT_EQ(answer.tokens, right) << model_->golden[i].name;
  }
}

// Token and log-probability pairs, of the prompt and then of the text; equal only to the last bit.
std::vector<std::pair<TokenId, float>> Trace(const Collector::Answer& answer) {
  std::vector<std::pair<TokenId, float>> trace;
  for (const auto* part : {&answer.prompt_logprobs, &answer.logprobs}) {
    for (const auto& entry : *part) trace.emplace_back(entry[0].token, entry[0].logprob);
  }
  return trace;
}

TEST_F(EngineModel, LogprobsDependOnNoChunkBatchOrPreemption) {
  struct Setting {
    EngineOptions options;
    ExecutorLimits limits;
    bool together = true;
  };
  const std::vector<Setting> settings = {
      {{.max_model_len = 2'048, .max_num_seqs = 1}, {}, false},
      {{.max_model_len = 2'048, .max_num_seqs = 8}, {}},
      {{.max_model_len = 2'048, .max_num_seqs = 8, .max_num_batched_tokens = 37}, {}},
      {{.max_model_len = 2'048, .max_num_seqs = 4, .max_prefill_with_decode = 5}, {}},
      {{.max_model_len = 2'048, .max_num_seqs = 8}, {.max_step_tokens = 130, .max_logit_rows = 3}},
      // The first two are admitted with two of four blocks each, and the first comes to need three.
      {{.max_model_len = 512, .max_num_seqs = 8, .num_blocks = 4}, {}},
  };
  std::vector<std::vector<std::pair<TokenId, float>>> first;
  for (const Setting& setting : settings) {
    auto engine = StartModel(setting.options, setting.limits, {.block_tokens = 128});
    auto queue = std::make_shared<Collector>();
    std::vector<RequestId> ids;
    for (int i = 0; i < 8; ++i) {
      const std::vector<TokenId>& source = model_->golden.back().prompt;
      const auto length = static_cast<std::ptrdiff_t>(20 + 11 * i);
      Request request = Ask(queue, {source.begin(), source.begin() + length}, i < 2 ? 300 : 30 + i);
      request.ignore_eos = true;
      request.logprobs = 0;
      request.prompt_logprobs = i % 3 == 0 ? 0 : -1;
      request.sampling.temperature = 1;
      request.sampling.seed = static_cast<uint64_t>(i);
      ids.push_back(*engine->Submit(std::move(request)));
      if (!setting.together) queue->Wait(ids.back());
    }
    std::vector<std::vector<std::pair<TokenId, float>>> traces;
    for (const RequestId id : ids) traces.push_back(Trace(queue->Wait(id)));
    if (first.empty()) first = traces;
    EXPECT_TRUE(traces == first) << "setting " << &setting - settings.data();
    if (setting.options.num_blocks == 4) {
      EXPECT_GT(engine->stats().preemptions, 0u);
    }
    ASSERT_TRUE(engine->WaitIdle(std::chrono::seconds(60)));
    ExpectAllReturned(*engine);
  }
}

}  // namespace
}  // namespace fathom
