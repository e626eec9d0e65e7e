// Steps of a model of real shapes with generated weights on a GPU: prefill, then decoding at
// several contexts and batches with and without captured graphs and streams.
//
//   step_cuda_bench CONFIG.json [--layers N] [--experts N] [--chunk T] [--prefill T] [--quick]
//   ncu --profile-from-start off ... step_cuda_bench CONFIG.json ... --profile CONTEXT STREAMS
//
// A prefix is prefilled once. Longer contexts and further sequences hold copies of its blocks, each
// in memory of its own, so that every step reads what it would read. Times are from the call of a
// step to its greedy tokens in host memory, median of the steps. Prints CSV and, as comments, each
// op's share of a step when every op is waited for. --profile runs one decoding step, kernel by
// kernel, for a profiler (of 0 streams: one prefill step that ends at CONTEXT).
#include <cuda_profiler_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cache/block_pool.h"
#include "cache/geometry.h"
#include "cache/planner.h"
#include "engine/cuda_executor.h"
#include "engine/step_arrays.h"
#include "model/cuda_weights.h"
#include "ops/cuda/cuda_graph.h"
#include "ops/timed_backend.h"

namespace fathom {
namespace {

using Clock = std::chrono::steady_clock;

double Since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

template <class T>
T Must(Expected<T> value) {
  if (value) return std::move(*value);
  std::fprintf(stderr, "%s\n", value.error().message.c_str());
  std::exit(1);
}

void Check(const Status& status) {
  if (status) return;
  std::fprintf(stderr, "%s\n", status.error().message.c_str());
  std::exit(1);
}

double Gib(int64_t bytes) {
  return static_cast<double>(bytes) / (int64_t{1} << 30);
}

struct Case {
  int64_t context;
  int streams;
};

struct Options {
  std::string config;
  int layers = 0, experts = 0;
  int chunk = 4096;
  int64_t prefill = 32'768;
  bool quick = false;
  std::optional<Case> profile;
};

class Bench {
 public:
  Bench(const Options& options, ModelConfig config, Weights weights, ops::CudaBackend& backend)
      : options_(options),
        config_(std::move(config)),
        weights_(std::move(weights)),
        backend_(backend),
        geometry_(Must(MakeGeometry(config_, {}))),
        prefix_(geometry_.blocks_for(options.prefill)) {
    cases_ = {{4'096, 1}, {4'096, 8}, {4'096, 32}, {32'768, 32}, {1'048'000, 1}};
    if (!options.quick) {
      cases_.insert(cases_.end(), {{32'768, 1}, {131'072, 1}, {131'072, 8}, {1'048'000, 8}});
    }
    if (options.profile) cases_ = {*options.profile};
    int64_t blocks = prefix_;
    for (const Case& c : cases_) {
      blocks = std::max(blocks, std::max(c.streams, 1) * geometry_.blocks_for(c.context + kSteps));
    }
    block_memory_ = Must(ReserveCuda(blocks * geometry_.block_bytes, "blocks"));
    slot_memory_ = Must(ReserveCuda(kStreams * geometry_.slot_bytes, "slots"));
    blocks_.emplace(block_memory_->data(), geometry_.block_bytes, static_cast<int32_t>(blocks));
    slots_.emplace(slot_memory_->data(), geometry_.slot_bytes, kStreams);
    std::printf("# %ld blocks of %ld bytes, slots of %ld\n", blocks, geometry_.block_bytes,
                geometry_.slot_bytes);
  }

  void ProfileStep(const Case& c) {
    auto executor = Make({.max_graph_sequences = 0, .branch_tokens = 0}, "kernel by kernel");
    Prefill(*executor);
    CopyPrefix();
    StepPlan plan;
    for (const bool counted : {false, true}) {
      if (c.streams > 0) {
        PlanDecode(c, c.context, &plan);
      } else {
        PlanPrefill(c.context - options_.chunk, options_.chunk, &plan);
      }
      if (counted) cudaProfilerStart();
      Check(executor->Execute(plan));
      backend_.Wait();
      if (counted) cudaProfilerStop();
    }
  }

  void Run() {
    if (options_.profile) return ProfileStep(*options_.profile);
    auto plain = Make({.max_graph_sequences = 0, .branch_tokens = 0}, "kernel by kernel");
    Prefill(*plain);
    CopyPrefix();
    auto streams = Make({.max_graph_sequences = 0}, "streams");
    auto graphs = Make({.max_graph_sequences = 32, .branch_tokens = 0}, "graphs");
    auto both = Make({.max_graph_sequences = 32}, "graphs and streams");
    ComparePlan();
    std::printf("decode,context,streams,ms_plain,ms_streams,ms_graphs,ms_both\n");
    for (const Case& c : cases_) {
      std::printf("decode,%ld,%d", c.context, c.streams);
      for (Executor* executor : {plain.get(), streams.get(), graphs.get(), both.get()}) {
        std::printf(",%.3f", 1e3 * Decode(*executor, c));
        std::fflush(stdout);
      }
      std::printf("\n");
    }
    Profile();
    const Case profiled[] = {{4'096, 1}, {4'096, 8}, {1'048'000, 1}};
    for (const Case& c : profiled) Fusions(c);
    for (const Case& c : profiled) Parts(c);
  }

 private:
  static constexpr int kStreams = 32, kSteps = 40;

  std::unique_ptr<Executor> Make(const CudaExecutorOptions& cuda, const char* name) {
    const int64_t before = ops::CudaBackend::Memory().free;
    const auto begin = Clock::now();
    auto executor = Must(MakeCudaExecutor(config_, weights_, geometry_, *blocks_, *slots_, backend_,
                                          {}, {options_.chunk, kStreams}, cuda));
    std::printf("# executor, %s: %.2f s, %.3f GiB\n", name, Since(begin),
                Gib(before - ops::CudaBackend::Memory().free));
    std::fflush(stdout);
    return executor;
  }

  // One executor more, as a server makes it, beside what the plan says of it.
  void ComparePlan() {
    const int64_t scratch = backend_.scratch_bytes();
    const int64_t before = ops::CudaBackend::Memory().free;
    const auto executor = Make({}, "as served");
    const int64_t used = before - ops::CudaBackend::Memory().free + scratch;
    PlanRequest request{.slots = kStreams, .step_tokens = options_.chunk, .gpus = 1};
    const Workspaces planned = PlanWorkspaces(config_, geometry_, request);
    std::printf("# plan: workspaces %.3f GiB (graphs %.3f); used, scratch included: %.3f\n",
                Gib(planned.bytes()), Gib(planned.graphs), Gib(used));
  }

  TokenId RandomToken() { return static_cast<TokenId>(random_() % config_.vocab_size); }

  // One token for each of so many sequences at `position`; sequence s owns the blocks from s * n.
  void PlanDecode(const Case& c, int64_t position, StepPlan* plan) {
    const int64_t n = geometry_.blocks_for(c.context + kSteps);
    plan->Clear();
    std::vector<BlockId> table(static_cast<size_t>(n));
    for (int s = 0; s < c.streams; ++s) {
      for (int64_t i = 0; i < n; ++i) table[i] = BlockId{static_cast<int32_t>(s * n + i)};
      plan->AddSequence(RequestId{static_cast<uint64_t>(s)}, SlotId{s}, table);
      plan->AddToken(RandomToken(), position, true);
    }
    plan->Finish();
  }

  void PlanPrefill(int64_t at, int64_t count, StepPlan* plan) {
    std::vector<BlockId> table;
    for (int64_t i = 0; i < geometry_.blocks_for(at + count); ++i) {
      table.push_back(BlockId{static_cast<int32_t>(i)});
    }
    plan->Clear();
    plan->AddSequence(RequestId{0}, SlotId{0}, table);
    for (int64_t i = 0; i < count; ++i) {
      plan->AddToken(RandomToken(), at + i, at + i + 1 == options_.prefill);
    }
    plan->Finish();
  }

  void Prefill(Executor& executor) {
    std::printf("prefill,begin,tokens,seconds,tokens_per_second\n");
    StepPlan plan;
    double total = 0;
    for (int64_t at = 0; at < options_.prefill; at += options_.chunk) {
      const int64_t count = std::min<int64_t>(options_.chunk, options_.prefill - at);
      PlanPrefill(at, count, &plan);
      const auto begin = Clock::now();
      Check(executor.Execute(plan));
      backend_.Wait();
      const double seconds = Since(begin);
      total += seconds;
      std::printf("prefill,%ld,%ld,%.3f,%.0f\n", at, count, seconds,
                  static_cast<double>(count) / seconds);
      std::fflush(stdout);
    }
    std::printf("prefill,0,%ld,%.3f,%.0f\n", options_.prefill, total,
                static_cast<double>(options_.prefill) / total);
  }

  void CopyPrefix() {
    for (int32_t b = static_cast<int32_t>(prefix_); b < blocks_->capacity(); ++b) {
      backend_.Copy(blocks_->address(BlockId{b}),
                    blocks_->address(BlockId{static_cast<int32_t>(b % prefix_)}),
                    geometry_.block_bytes);
    }
    for (int s = 1; s < kStreams; ++s) {
      backend_.Copy(slots_->address(SlotId{s}), slots_->address(SlotId{0}), geometry_.slot_bytes);
    }
    backend_.Wait();
  }

  double Decode(Executor& executor, const Case& c) {
    std::vector<double> seconds;
    StepPlan plan;
    const ops::SamplingParams greedy = {.temperature = 0};
    std::vector<ops::SamplingRow> rows;
    for (int32_t s = 0; s < c.streams; ++s) rows.push_back({.row = s, .params = &greedy});
    std::vector<ops::SampledToken> tokens(rows.size());
    for (int i = 0; i < kSteps; ++i) {
      PlanDecode(c, c.context + i, &plan);
      const auto begin = Clock::now();
      Check(executor.Execute(plan));
      executor.Sample(rows, tokens);
      if (i >= 4) seconds.push_back(Since(begin));
    }
    const auto middle = seconds.begin() + std::ssize(seconds) / 2;
    std::nth_element(seconds.begin(), middle, seconds.end());
    return *middle;
  }

  // A forward pass on a backend around the bench's own, with what a step of it needs.
  struct Pass {
    Pass(Bench& bench, ops::Backend& backend, int tokens, int branch_tokens)
        : vocab_size(bench.config_.vocab_size),
          forward(
              bench.config_, bench.weights_, backend,
              {.max_tokens = tokens, .max_logit_rows = kStreams, .branch_tokens = branch_tokens}),
          arrays(bench.backend_, {.tokens = tokens,
                                  .sequences = kStreams,
                                  .blocks_per_sequence = bench.geometry_.blocks_for(1 << 20),
                                  .logit_rows = kStreams}),
          kv(MakeKvView(bench.geometry_, bench.config_.num_layers, bench.blocks_->base(),
                        bench.slots_->base())),
          logits(reinterpret_cast<float*>(bench.backend_.Allocate(kStreams * vocab_size * 4))) {}

    void Run(const StepArrays::Uploaded& step) {
      forward.Run(step.view, kv, step.logit_rows,
                  F32Matrix(logits, std::ssize(step.logit_rows), vocab_size));
    }

    int64_t vocab_size;
    Forward forward;
    StepArrays arrays;
    KvView kv;
    float* logits;
  };

  void Profile() {
    ops::TimedBackend timed(backend_);
    Pass pass(*this, timed, options_.chunk, 0);
    StepPlan plan;
    const auto run = [&](const char* what, int steps) {
      const StepArrays::Uploaded step = pass.arrays.Upload(plan);
      for (int i = 0; i <= steps; ++i) {
        if (i == 1) timed.Reset();  // the first one warms up
        pass.Run(step);
        backend_.Wait();
      }
      std::vector<std::pair<double, std::string>> ops;
      double total = 0;
      for (const auto& [op, time] : timed.seconds()) {
        ops.emplace_back(time, op);
        total += time;
      }
      std::sort(ops.rbegin(), ops.rend());
      std::printf("# %s: %.3f ms, every op waited for\n", what, 1e3 * total / steps);
      for (const auto& [time, op] : ops) {
        std::printf("#   %5.1f %%  %-24s %10.1f us\n", 100 * time / total, op.c_str(),
                    1e6 * time / steps);
      }
      std::fflush(stdout);
    };
    PlanDecode({4'096, 1}, 4'096, &plan);
    run("decode, 4K, one stream", 4);
    PlanDecode({32'768, 32}, 32'768, &plan);
    run("decode, 32K, 32 streams", 4);
    PlanDecode({1'048'000, 1}, 1'048'000, &plan);
    run("decode, 1M, one stream", 4);
    PlanPrefill(options_.prefill - options_.chunk, options_.chunk, &plan);
    run("prefill, the last chunk", 1);
  }

  // Seconds of a captured step, median.
  double Captured(Pass& pass, const StepArrays::Uploaded& step) {
    const auto graph = ops::CudaGraph::Capture(backend_, [&] { pass.Run(step); });
    std::vector<double> seconds;
    for (int i = 0; i < 24; ++i) {
      const auto begin = Clock::now();
      graph.Launch();
      backend_.Wait();
      if (i >= 4) seconds.push_back(Since(begin));
    }
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
  }

  // A captured step of decoding with each fusion and without it, the others as the backend has
  // them.
  void Fusions(const Case& c) {
    Pass pass(*this, backend_, kStreams, kGpuBranchTokens);
    StepPlan plan;
    PlanDecode(c, c.context, &plan);
    const StepArrays::Uploaded step = pass.arrays.Upload(plan);
    std::printf("fusion,context,streams,ms_with,ms_without,gain_us\n");
    const std::pair<const char*, bool ops::CudaFusions::*> fusions[] = {
        {"gate", &ops::CudaFusions::gate},
        {"one_token", &ops::CudaFusions::one_token},
        {"commit", &ops::CudaFusions::commit},
        {"products", &ops::CudaFusions::products},
        {"one_split", &ops::CudaFusions::one_split}};
    for (const auto& [name, member] : fusions) {
      double ms[2];
      for (const bool on : {true, false}) {
        ops::CudaFusions some;
        some.*member = on;
        backend_.Fuse(some);
        pass.Run(step);  // what grows on demand has grown before the capture
        backend_.Wait();
        ms[on ? 0 : 1] = 1e3 * Captured(pass, step);
      }
      std::printf("%s,%ld,%d,%.3f,%.3f,%.1f\n", name, c.context, c.streams, ms[0], ms[1],
                  1e3 * (ms[1] - ms[0]));
      std::fflush(stdout);
    }
    backend_.Fuse({});
  }

  // What a captured step of decoding takes less without the ops of a name. Their results of an
  // earlier step stay where they are.
  void Parts(const Case& c) {
    ops::PartialBackend partial(backend_);
    Pass pass(*this, partial, kStreams, kGpuBranchTokens);
    StepPlan plan;
    PlanDecode(c, c.context, &plan);
    const StepArrays::Uploaded step = pass.arrays.Upload(plan);
    const auto seconds_without = [&](const std::string& name) {
      partial.LeaveOut(name);
      return Captured(pass, step);
    };
    const double whole = seconds_without("");
    std::printf("# captured step, context %ld, %d streams: %.3f ms; less without\n", c.context,
                c.streams, 1e3 * whole);
    for (const std::string& name : std::set<std::string>(partial.names())) {
      std::printf("#   %-24s %8.1f us\n", name.c_str(), 1e6 * (whole - seconds_without(name)));
      std::fflush(stdout);
    }
  }

  const Options& options_;
  ModelConfig config_;
  Weights weights_;
  ops::CudaBackend& backend_;
  Geometry geometry_;
  int64_t prefix_;  // blocks
  std::vector<Case> cases_;
  std::optional<Reservation> block_memory_, slot_memory_;
  std::optional<BlockPool> blocks_;
  std::optional<SlotPool> slots_;
  std::mt19937 random_{7};
};

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto number = [&] { return i + 1 < argc ? std::atoi(argv[++i]) : 0; };
    if (name == "--layers") options.layers = number();
    else if (name == "--experts") options.experts = number();
    else if (name == "--chunk") options.chunk = number();
    else if (name == "--prefill") options.prefill = number();
    else if (name == "--quick") options.quick = true;
    else if (name == "--profile") options.profile = {.context = number(), .streams = number()};
    else options.config = name;
  }
  std::ifstream file(options.config);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  ModelConfig config = Must(ParseModelConfig(text, options.config));
  if (options.experts > 0) config.num_experts = options.experts;
  if (options.layers > 0) config.num_layers = std::min(options.layers, config.num_layers);

  auto backend = Must(ops::CudaBackend::Make());
  auto begin = Clock::now();
  Weights weights = Must(LoadWeights("", config, {LoadFormat::kDummy, 0, false}));
  std::printf("# %d layers, %d experts: %.2f GiB of weights made in %.1f s\n", config.num_layers,
              config.num_experts, Gib(weights.total_bytes), Since(begin));
  std::fflush(stdout);
  begin = Clock::now();
  if (const Status status = UploadForCuda(weights, config, *backend); !status) {
    std::fprintf(stderr, "%s\n", status.error().message.c_str());
    return 1;
  }
  std::printf("# uploaded in %.1f s, %.2f GiB are free\n", Since(begin),
              Gib(ops::CudaBackend::Memory().free));
  std::fflush(stdout);
  Bench(options, std::move(config), std::move(weights), *backend).Run();
  return 0;
}

}  // namespace
}  // namespace fathom

int main(int argc, char** argv) {
  return fathom::Main(argc, argv);
}
