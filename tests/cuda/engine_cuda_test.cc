// The engine on the device: prefix reuse through device memory, host memory, preemption and rebuilt
// windows gives the tokens of a cold run.
#include <algorithm>
#include <iterator>

#include "cuda/device_memory.h"
#include "engine/cuda_executor.h"
#include "engine/engine.h"
#include "engine/test_util.h"
#include "golden/checks.h"
#include "ops/cuda/cuda_backend.h"

namespace fathom::golden {
namespace {

std::unique_ptr<Engine> StartCuda(Model& model, EngineOptions options,
                                  const CudaExecutorOptions& cuda = {}) {
  options.eos_token = model.config.eos_token;
  const Geometry geometry = *MakeGeometry(model.config, {});
  auto engine = Engine::Start(
      options, geometry,
      [&](BlockPool& blocks, SlotPool& slots) {
        return MakeCudaExecutor(model.config, model.weights, geometry, blocks, slots,
                                static_cast<ops::CudaBackend&>(*model.backend), {}, {}, cuda);
      },
      ReserveCuda);
  EXPECT_TRUE(engine.has_value()) << engine.error().message;
  return std::move(*engine);
}

Collector::Answer Answer(Engine& engine, std::vector<TokenId> prompt, int64_t tokens = 8) {
  auto queue = std::make_shared<Collector>();
  Request request = Ask(queue, std::move(prompt), tokens);
  request.ignore_eos = true;
  const Collector::Answer answer = queue->Wait(*engine.Submit(std::move(request)));
  EXPECT_EQ(answer.finish, FinishReason::kLength) << answer.error.message;
  return answer;
}

std::vector<TokenId> Text(const Model& model, int64_t length, int64_t skip) {
  const std::vector<TokenId>& ids = model.prompts.back().prompt;
  return {ids.begin() + skip, ids.begin() + skip + length};
}

TEST(EngineCuda, ARepeatedPromptIsFoundAndAnsweredTheSame) {
  FATHOM_NEEDS_DEVICE();
  Model& model = Demo(Device::kCuda);
  auto cold =
      StartCuda(model, {.max_model_len = 8'192, .max_num_seqs = 2, .prefix_caching = false});
  auto warm = StartCuda(model, {.max_model_len = 8'192, .max_num_seqs = 4});
  auto rows = StartCuda(model, {.max_model_len = 8'192, .max_num_seqs = 4, .num_bundles = 0});
  for (const int64_t length : {66, 127, 128, 129, 257, 514, 1'283, 2'049, 5'000}) {
    const std::vector<TokenId> prompt = Text(model, length, length);
    const std::vector<TokenId> right = Answer(*cold, prompt).tokens;
    EXPECT_EQ(Answer(*warm, prompt).tokens, right) << length;
    const Collector::Answer second = Answer(*warm, prompt);
    EXPECT_EQ(second.tokens, right) << length;
    EXPECT_EQ(second.report->prefix.boundary, length - 1);
    Answer(*rows, prompt);
    EXPECT_EQ(Answer(*rows, prompt).tokens, right) << length;
  }
}

TEST(EngineCuda, HostTierAndPreemptionGiveTheSameText) {
  FATHOM_NEEDS_DEVICE();
  Model& model = Demo(Device::kCuda);
  auto cold =
      StartCuda(model, {.max_model_len = 4'096, .max_num_seqs = 2, .prefix_caching = false});
  auto warm = StartCuda(model, {.max_model_len = 1'536,
                                .max_num_seqs = 3,
                                .num_blocks = 8,
                                .num_bundles = 6,
                                .host_blocks = 40,
                                .host_bundles = 20});
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 3; ++i) {
      const std::vector<TokenId> prompt = Text(model, 1'200 + i, 2'000 * i);
      const Collector::Answer answer = Answer(*warm, prompt);
      EXPECT_EQ(answer.tokens, Answer(*cold, prompt).tokens);
      if (round == 1) {
        EXPECT_EQ(answer.report->prefix.boundary, 1'199 + i);
      }
    }
  }
  // Three prompts of one block each, and one of head room, are admitted together; their answers
  // then need four blocks each of the eight.
  auto queue = std::make_shared<Collector>();
  std::vector<RequestId> ids;
  for (int i = 0; i < 3; ++i) {
    Request request = Ask(queue, Text(model, 200 + i, 3'000 * i), 600);
    request.ignore_eos = true;
    ids.push_back(*warm->Submit(std::move(request)));
  }
  // Both engines use one backend, whose kernels share a scratch: only one of them may be at work.
  std::vector<std::vector<TokenId>> answers;
  for (const RequestId id : ids) answers.push_back(queue->Wait(id).tokens);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(answers[static_cast<size_t>(i)],
              Answer(*cold, Text(model, 200 + i, 3'000 * i), 600).tokens)
        << i;
  }
  EXPECT_GT(warm->stats().preemptions, 0u);
  EXPECT_GT(warm->stats().prefix.blocks_from_host, 0u);
}

// The answers to so many prompts, all running together. Up to 12 blocks each: tables of two widths,
// which change while a sequence grows.
std::vector<std::vector<TokenId>> Answers(const Model& model, Engine& engine, int count) {
  auto queue = std::make_shared<Collector>();
  std::vector<RequestId> ids;
  for (int i = 0; i < count; ++i) {
    Request request = Ask(queue, Text(model, count > 16 ? 40 + i : 100 + 190 * i, 3 * i), 24);
    request.ignore_eos = true;
    ids.push_back(*engine.Submit(std::move(request)));
  }
  std::vector<std::vector<TokenId>> tokens;
  for (const RequestId id : ids) tokens.push_back(queue->Wait(id).tokens);
  return tokens;
}

constexpr int kMostSequences = 64;
const EngineOptions kManySequences{.max_model_len = 4'096,
                                   .max_num_seqs = kMostSequences,
                                   .num_blocks = 400,
                                   .prefix_caching = false};

// Kernel by kernel on one stream is the order the others must not differ from.
TEST(EngineCuda, GraphsAndStreamsChangeNoToken) {
  FATHOM_NEEDS_DEVICE();
  Model& model = Demo(Device::kCuda);
  const std::vector<int> counts = {1, 2, 3, 7, 16, 33, kMostSequences};
  std::vector<std::vector<std::vector<TokenId>>> right;
  {
    auto plain = StartCuda(model, kManySequences, {.max_graph_sequences = 0, .branch_tokens = 0});
    for (const int count : counts) right.push_back(Answers(model, *plain, count));
  }
  for (const CudaExecutorOptions& cuda :
       {CudaExecutorOptions{.max_graph_sequences = 0, .branch_tokens = 64},
        CudaExecutorOptions{.max_graph_sequences = kMostSequences, .branch_tokens = 0},
        CudaExecutorOptions{.max_graph_sequences = kMostSequences, .branch_tokens = 64},
        CudaExecutorOptions{.max_graph_sequences = 5, .branch_tokens = 20}}) {
    auto engine = StartCuda(model, kManySequences, cuda);
    for (size_t i = 0; i < counts.size(); ++i) {
      EXPECT_EQ(Answers(model, *engine, counts[i]), right[i])
          << counts[i] << " sequences, graphs up to " << cuda.max_graph_sequences
          << ", streams up to " << cuda.branch_tokens;
    }
  }
}

// Nor does what is computed together.
TEST(EngineCuda, FusionsChangeNoToken) {
  FATHOM_NEEDS_DEVICE();
  Model& model = Demo(Device::kCuda);
  auto& backend = static_cast<ops::CudaBackend&>(*model.backend);
  const std::vector<int> counts = {1, 3, 8, 9, 33};
  const auto answers = [&](const ops::CudaFusions& fusions) {
    backend.Fuse(fusions);
    auto engine = StartCuda(model, kManySequences);
    std::vector<std::vector<std::vector<TokenId>>> all;
    for (const int count : counts) all.push_back(Answers(model, *engine, count));
    return all;
  };
  using Fusions = ops::CudaFusions;
  constexpr bool Fusions::*kAll[] = {&Fusions::gate, &Fusions::one_token, &Fusions::commit,
                                     &Fusions::products, &Fusions::one_split};
  Fusions none, all;
  for (bool Fusions::*const fusion : kAll) none.*fusion = false, all.*fusion = true;
  const auto right = answers(none);
  for (size_t i = 0; i < std::size(kAll); ++i) {
    Fusions one = none;
    one.*kAll[i] = true;
    EXPECT_EQ(answers(one), right) << "fusion " << i;
  }
  EXPECT_EQ(answers(all), right);
  backend.Fuse({});
}

}  // namespace
}  // namespace fathom::golden
