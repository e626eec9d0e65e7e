#include "cli/runtime_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache/plan_text.h"
#include "engine/step_arrays.h"
#include "model/forward.h"
#include "ops/backend.h"

namespace fathom {
namespace {

using ::testing::HasSubstr;

const std::string kDemo = FATHOM_SOURCE_DIR "/models/demo";

// A backend that only counts what is allocated from it.
class CountingBackend final : public ops::HostBackend {
 public:
  int64_t allocated = 0;
  std::byte* Allocate(int64_t bytes) override {
    allocated += bytes;
    return HostBackend::Allocate(bytes);
  }
  void RopeTables(const ops::StepView&, const ops::RopeFrequencies&, float*) override {}
  void Embed(const ops::EmbedArgs&) override {}
  void Linear(const ops::LinearArgs&) override {}
  void RmsNorm(const ops::RmsNormArgs&) override {}
  void NormRopeInsert(const ops::NormRopeInsertArgs&) override {}
  void WindowCommit(const ops::WindowCommitArgs&) override {}
  void Compressor(const ops::CompressorArgs&) override {}
  void Indexer(const ops::IndexerArgs&) override {}
  void SparseAttention(const ops::SparseAttentionArgs&) override {}
  void OutputProjection(const ops::OutputProjectionArgs&) override {}
  void HyperConnection(const ops::HyperConnectionArgs&) override {}
  void Router(const ops::RouterArgs&) override {}
  void Experts(const ops::ExpertsArgs&) override {}
  void Head(const ops::HeadArgs&) override {}
  void Sample(const ops::SampleBatchArgs&) override {}
};

struct PlannedAndLoaded {
  MemoryPlan plan;  // from config.json alone
  std::unique_ptr<Runtime> runtime;
};

PlannedAndLoaded Load(RuntimeOptions options) {
  options.model = kDemo;
  options.device = "cpu";
  options.threads = 1;
  PlannedAndLoaded out;
  const ModelConfig config = *LoadModelConfig(kDemo);
  const PlanRequest request = *MakePlanRequest(options, MemoryOf(nullptr));
  out.plan = *PlanMemory(config, request);
  auto runtime = LoadRuntime(options);
  EXPECT_TRUE(runtime) << runtime.error().message;
  if (runtime) out.runtime = std::move(*runtime);
  return out;
}

TEST(RuntimePlan, WhatIsPlannedIsReservedToTheByte) {
  for (const RuntimeOptions& options :
       {RuntimeOptions{.max_model_len = 16'384},
        RuntimeOptions{.kv_cache_dtype = "bf16",
        .indexer_kv_dtype = "fp8",
        .block_size = 512,
        .max_model_len = 100'000,
        .max_num_seqs = 3,
        .max_num_batched_tokens = 100,
        .kv_cache_memory = 256 << 20},
        RuntimeOptions{.numerics = ops::Numerics::kReference, .max_model_len = 5'000},
        RuntimeOptions{.max_model_len = 65'536, .gpu_memory_utilization = 0.02}}) {
    const auto [plan, runtime] = Load(options);
    ASSERT_NE(runtime, nullptr);
    EXPECT_EQ(plan.weight_bytes, runtime->weights.total_bytes);
    EXPECT_EQ(plan.weights.tensors, runtime->weights.tensor_count);

    const EngineStats stats = runtime->engine->stats();
    const Geometry& geometry = runtime->engine->geometry();
    EXPECT_EQ(plan.pools.blocks, stats.blocks_total);
    EXPECT_EQ(plan.pools.slots, stats.slots_total);
    EXPECT_EQ(plan.pools.bundles, stats.bundles_total);
    EXPECT_EQ(plan.pool_bytes(), stats.blocks_total * geometry.block_bytes +
                                     stats.slots_total * geometry.slot_bytes +
                                     stats.bundles_total * BundleUnitBytes(geometry));
    EXPECT_THAT(DescribeRuntime(*runtime), HasSubstr(PlanTables(plan)));
  }
}

TEST(RuntimePlan, WorkspacesAreWhatTheForwardPassAndTheStepAllocate) {
  const RuntimeOptions options{
      .max_model_len = 4'096, .max_num_seqs = 100, .max_num_batched_tokens = 130};
  const auto [plan, runtime] = Load(options);
  ASSERT_NE(runtime, nullptr);
  CountingBackend backend;
  const Forward forward(
      runtime->config, runtime->weights, backend,
      {.max_tokens = 130, .max_logit_rows = PlannedLogitRows(options.max_num_seqs)});
  EXPECT_EQ(backend.allocated, plan.workspaces.activations);
  EXPECT_EQ(forward.workspace_bytes(), plan.workspaces.activations);

  CountingBackend steps;
  const StepArrays arrays(
      steps, {.tokens = 130,
              .sequences = 100,
              .blocks_per_sequence = plan.geometry.blocks_for(plan.geometry.max_positions),
              .logit_rows = PlannedLogitRows(options.max_num_seqs)});
  EXPECT_EQ(steps.allocated, plan.workspaces.step_arrays);
}

TEST(RuntimePlan, WithoutPrefixCachingThereAreNoBundles) {
  RuntimeOptions options{.max_model_len = 16'384};
  options.reuse.prefix_caching = false;
  const auto [plan, runtime] = Load(options);
  ASSERT_NE(runtime, nullptr);
  EXPECT_EQ(plan.pools.bundles, 0);
  EXPECT_EQ(plan.pools.blocks, runtime->engine->stats().blocks_total);
  EXPECT_EQ(runtime->engine->stats().bundles_total, 0);
}

TEST(RuntimePlan, WhatDoesNotFitIsRefusedBeforeWeightsWithWhatWouldFit) {
  const auto refused = LoadRuntime({.model = kDemo, .device = "cpu", .kv_cache_memory = 100 << 20});
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kResourceExhausted);
  EXPECT_EQ(refused.error().param, "--kv-cache-memory");
  EXPECT_THAT(refused.error().message,
              HasSubstr("more are needed; would fit with --max-model-len"));
  const auto share = LoadRuntime({.model = kDemo, .device = "cpu", .gpu_memory_utilization = 1e-6});
  ASSERT_FALSE(share);
  EXPECT_EQ(share.error().param, "--gpu-memory-utilization");
}

TEST(RuntimePlan, FreeMemoryOfTheDeviceCounts) {
  const ModelConfig config = *LoadModelConfig(kDemo);
  const WeightBudget weights = BudgetWeights(config);
  const RuntimeOptions options{.max_model_len = 65'536};
  const MemoryPlan plan = *PlanRuntime(options, config, weights, {true, int64_t{8} << 30, -1});
  const DeviceMemory enough{true, int64_t{8} << 30, plan.total_bytes()};
  EXPECT_EQ(PlanRuntime(options, config, weights, enough)->pools, plan.pools);
  // Less than the defaults: the pools become smaller, down to what one sequence needs.
  const DeviceMemory less{true, int64_t{8} << 30, plan.total_bytes() - 1};
  const MemoryPlan smaller = *PlanRuntime(options, config, weights, less);
  EXPECT_LT(smaller.pool_bytes(), plan.pool_bytes());
  EXPECT_LE(smaller.total_bytes(), less.free);
  const DeviceMemory little{true, int64_t{8} << 30, int64_t{64} << 20};
  const auto refused = PlanRuntime(options, config, weights, little);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("free device memory leaves"));
}

// Each of these is little enough by itself.
TEST(RuntimePlan, CacheAndTiersMustFitIntoTheMachineTogether) {
  const ModelConfig config = *LoadModelConfig(kDemo);
  const WeightBudget weights = BudgetWeights(config);
  const auto on_cpu = [](int64_t bytes) { return DeviceMemory{false, bytes, -1, bytes}; };
  const DeviceMemory machine = on_cpu(int64_t{24} << 30);
  RuntimeOptions options{.max_model_len = 1024, .kv_cache_memory = int64_t{21} << 30};
  options.threads = 1;
  const MemoryPlan plan = *PlanRuntime(options, config, weights, machine);
  options.reuse.kv_host_size = int64_t{22} << 30;
  const auto refused = PlanRuntime(options, config, weights, machine);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kResourceExhausted);
  EXPECT_EQ(refused.error().param, "--kv-host-size");
  const int64_t sum = plan.total_bytes() + options.reuse.kv_host_size;
  EXPECT_THAT(refused.error().message, HasSubstr(std::to_string(sum) + " bytes"));
  EXPECT_THAT(refused.error().message, HasSubstr("this machine has 25769803776"));
  EXPECT_THAT(refused.error().message, HasSubstr("lower --kv-host-size or --kv-cache-memory"));

  // To the byte, the disk tier's buffers included; a tier that is off takes nothing.
  EXPECT_TRUE(PlanRuntime(options, config, weights, on_cpu(sum)));
  EXPECT_FALSE(PlanRuntime(options, config, weights, on_cpu(sum - 1)));
  options.reuse.kv_disk_path = "/cache";
  const int64_t disk = int64_t{128} << 20;
  EXPECT_TRUE(PlanRuntime(options, config, weights, on_cpu(sum + disk)));
  EXPECT_FALSE(PlanRuntime(options, config, weights, on_cpu(sum + disk - 1)));
  options.reuse.kv_host_size = 0;
  EXPECT_TRUE(PlanRuntime(options, config, weights, machine));
  // The cache alone: nothing but its own flags can be lowered.
  const auto cache = PlanRuntime({.max_model_len = 65'536}, config, weights, on_cpu(1 << 20));
  ASSERT_FALSE(cache);
  EXPECT_EQ(cache.error().param, "--max-model-len");
  EXPECT_THAT(cache.error().message, HasSubstr("lower --max-model-len or --max-num-seqs"));

  // The machine's own memory is what counts at start.
  RuntimeOptions here{.model = kDemo, .device = "cpu", .max_model_len = 1024};
  here.kv_cache_memory = here.reuse.kv_host_size = MachineMemoryBytes() / 8 * 7;
  const auto runtime = LoadRuntime(here);
  ASSERT_FALSE(runtime);
  EXPECT_EQ(runtime.error().param, "--kv-host-size");
}

TEST(RuntimePlan, OnAGpuTheTiersAloneLieInHostMemory) {
  const ModelConfig config = *LoadModelConfig(kDemo);
  const WeightBudget weights = BudgetWeights(config);
  const DeviceMemory gpu{true, int64_t{80} << 30, -1, int64_t{24} << 30};
  RuntimeOptions options{.max_model_len = 1024, .kv_cache_memory = int64_t{30} << 30};
  options.reuse.kv_host_size = int64_t{24} << 30;
  EXPECT_TRUE(PlanRuntime(options, config, weights, gpu));
  options.reuse.kv_disk_path = "/cache";
  const auto refused = PlanRuntime(options, config, weights, gpu);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message,
              HasSubstr("(host tier 24.000 GiB, disk buffers 128.000 MiB)"));
  EXPECT_THAT(refused.error().message, HasSubstr("; lower --kv-host-size"));
  // Another machine's memory is not known.
  const DeviceMemory elsewhere{true, int64_t{80} << 30};
  EXPECT_TRUE(PlanRuntime(options, config, weights, elsewhere));
}

}  // namespace
}  // namespace fathom
