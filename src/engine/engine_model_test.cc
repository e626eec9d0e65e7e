// The engine over the real forward pass and the demo checkpoint: the reference continuation, and
// the same text whatever the batch, the chunks, the memory and the neighbours.
#include <gmock/gmock.h>

#include "engine/testing_model.h"

namespace fathom {
namespace {

class EngineModel : public DemoModelTest {
 protected:
  // The prompts that a debug build can afford.
  static std::vector<Golden> Short() {
    std::vector<Golden> all;
    for (const Golden& golden : model_->golden) {
      if (golden.prompt.size() <= 2'000) all.push_back(golden);
    }
    return all;
  }
};

TEST_F(EngineModel, GreedyTextIsTheReferences) {
  auto engine = StartModel({.max_model_len = 4'096, .max_num_seqs = 8}, {});
  auto queue = std::make_shared<Collector>();
  std::vector<RequestId> ids;
  for (const Golden& golden : Short()) {
    ids.push_back(
        *engine->Submit(Ask(queue, golden.prompt, static_cast<int64_t>(golden.greedy.size()))));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto answer = queue->Wait(ids[i]);
    std::vector<TokenId> right = Short()[i].greedy;
    if (right.back() == model_->config.eos_token) {
      right.pop_back();
      EXPECT_EQ(answer.finish, FinishReason::kStop);
    }
    EXPECT_EQ(answer.tokens, right) << Short()[i].name;
  }
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
    std::vector<Request> requests;  // enter the queue as one: the first does not get ahead
    for (int i = 0; i < 8; ++i) {
      const std::vector<TokenId> source = Short().back().prompt;
      const auto length = static_cast<std::ptrdiff_t>(20 + 11 * i);
      Request request = Ask(queue, {source.begin(), source.begin() + length}, i < 2 ? 300 : 30 + i);
      request.ignore_eos = true;
      request.logprobs = 0;
      request.prompt_logprobs = i % 3 == 0 ? 0 : -1;
      request.sampling.temperature = 1;
      request.sampling.seed = static_cast<uint64_t>(i);
      if (setting.together) {
        requests.push_back(std::move(request));
      } else {
        ids.push_back(*engine->Submit(std::move(request)));
        queue->Wait(ids.back());
      }
    }
    if (setting.together) ids = *engine->SubmitAll(std::move(requests));
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
