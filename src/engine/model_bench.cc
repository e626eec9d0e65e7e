// Prefill and decode of a whole model, beside the bound: the arithmetic of the tokens
// (model/cost.h) at the measured bf16 or float32 peak of the same threads in the same process, or
// at the dense bf16 peak of an H200.
//
//   model_bench [MODEL] [--quick] [--threads N] [--profile] [--cuda]
// --profile adds comment lines with each op's share of the time; on a GPU every op is then waited
// for, which lengthens a step.
// Prints CSV:
// case,context,streams,tokens_per_second,ms_per_step,gflops,bound_tokens_per_second,share
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "engine/replay.h"
#include "model/cost.h"
#include "ops/bench_util.h"
#include "ops/timed_backend.h"

#if FATHOM_CUDA
#include "engine/cuda_executor.h"
#include "model/cuda_weights.h"
#include "ops/cuda/cuda_backend.h"
#endif

namespace fathom {
namespace {

using Seconds = std::chrono::duration<double>;

struct Bench {
  ModelConfig config;
  Weights weights;
  ThreadPool& threads;
  ops::Backend& backend;
  ops::TimedBackend& timed;  // around `backend`; used with `profile`
  MemorySource memory;
  bench::Peaks peaks;
  bool profile = false;

  void Print(const char* name, int64_t context, int streams, double tokens, double seconds,
             double steps, double flops) const {
    const double peak = 1e9 * std::max(peaks.bf16_gflops, peaks.f32_gflops);
    const double bound = tokens / (flops / peak);
    std::printf("%s,%ld,%d,%.1f,%.3f,%.1f,%.0f,%.3f\n", name, context, streams, tokens / seconds,
                1e3 * seconds / steps, flops / seconds * 1e-9, bound, tokens / seconds / bound);
    if (profile) {
      std::vector<std::pair<double, std::string>> ops;
      for (const auto& [op, time] : timed.seconds()) ops.emplace_back(time, op);
      std::sort(ops.rbegin(), ops.rend());
      for (const auto& [time, op] : ops) {
        std::printf("#   %5.1f %%  %-24s %9.2f us a step\n", 100 * time / seconds, op.c_str(),
                    1e6 * time / steps);
      }
    }
    std::fflush(stdout);
  }

  std::vector<TokenId> RandomIds(int64_t n) const {
    std::mt19937 generator(7);
    std::vector<TokenId> ids(n);
    for (TokenId& id : ids) id = static_cast<TokenId>(generator() % config.vocab_size);
    return ids;
  }

  // Prefills one sequence to `context` in steps of 512, then decodes single tokens, alone and as
  // 16 copies of that sequence.
  void Run(int64_t context, bool decode) const {
    constexpr int kChunk = 512, kStreams = 16, kDecodeSteps = 64;
    ReplayOptions options;
    options.max_context = context + 4 * kDecodeSteps;
    options.max_step_tokens = kChunk;
    options.sequences = decode ? kStreams : 1;
    options.memory = memory;
    auto replay = Replay::Make(config, weights, profile ? timed : backend, options);
    if (!replay) {
      std::fprintf(stderr, "%s\n", replay.error().message.c_str());
      std::exit(1);
    }
    const std::vector<TokenId> ids = RandomIds(context);
    double flops = 0;
    timed.Reset();
    auto begin = Clock();
    for (int64_t at = 0; at < context; at += kChunk) {
      const int64_t count = std::min<int64_t>(kChunk, context - at);
      const Replay::Chunk chunk{0, std::span(ids).subspan(at, count)};
      Must((*replay)->Step({&chunk, 1},
                           at + count == context ? Replay::Logits::kLast : Replay::Logits::kNone));
    }
    double seconds = Seconds(Clock() - begin).count();
    for (int64_t t = 0; t < context; ++t) flops += CostOfToken(config, t, t + 1 == context).total();
    Print("prefill", context, 1, static_cast<double>(context), seconds,
          static_cast<double>((context + kChunk - 1) / kChunk), flops);
    if (!decode) return;
    for (int streams : {1, kStreams}) {
      if (streams > 1) {
        for (int s = 1; s < streams; ++s) (*replay)->CopySequence(0, s);
      }
      std::vector<Replay::Chunk> step;
      for (int s = 0; s < streams; ++s) step.push_back({s, std::span(ids).first(1)});
      for (int i = 0; i < 4; ++i) Must((*replay)->Step(step, Replay::Logits::kLast));
      flops = 0;
      for (int i = 0; i < kDecodeSteps; ++i) {
        flops += streams * CostOfToken(config, (*replay)->position(0) + i, true).total();
      }
      timed.Reset();
      begin = Clock();
      for (int i = 0; i < kDecodeSteps; ++i) Must((*replay)->Step(step, Replay::Logits::kLast));
      seconds = Seconds(Clock() - begin).count();
      Print("decode", context, streams, streams * kDecodeSteps, seconds, kDecodeSteps, flops);
    }
  }

 private:
  static std::chrono::steady_clock::time_point Clock() { return std::chrono::steady_clock::now(); }
  static void Must(const Expected<std::span<const float>>& result) {
    if (result) return;
    std::fprintf(stderr, "%s\n", result.error().message.c_str());
    std::exit(1);
  }
};

int Main(int argc, char** argv) {
  std::string model = std::string(FATHOM_SOURCE_DIR) + "/models/demo";
  bool quick = false;
  bool profile = false;
  [[maybe_unused]] bool cuda = false;
  int thread_count = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) {
      quick = true;
    } else if (std::strcmp(argv[i], "--profile") == 0) {
      profile = true;
#if FATHOM_CUDA
    } else if (std::strcmp(argv[i], "--cuda") == 0) {
      cuda = true;
#endif
    } else if (std::strcmp(argv[i], "--threads") == 0 && i + 1 < argc) {
      thread_count = std::atoi(argv[++i]);
    } else {
      model = argv[i];
    }
  }
  ThreadPool threads(thread_count);
  auto config = LoadModelConfig(model);
  if (!config) {
    std::fprintf(stderr, "%s\n", config.error().message.c_str());
    return 1;
  }
  auto weights = LoadWeights(model, *config, {});
  if (!weights) {
    std::fprintf(stderr, "%s\n", weights.error().message.c_str());
    return 1;
  }
  std::unique_ptr<ops::Backend> backend;
  MemorySource memory = Reservation::Make;
  bench::Peaks peaks;
#if FATHOM_CUDA
  if (cuda) {
    auto gpu = ops::CudaBackend::Make();
    const Status uploaded =
        gpu ? UploadForCuda(*weights, *config, **gpu) : Status(tl::unexpected(gpu.error()));
    if (!uploaded) {
      std::fprintf(stderr, "%s\n", uploaded.error().message.c_str());
      return 1;
    }
    backend = std::move(*gpu);
    memory = ReserveCuda;
    peaks.bf16_gflops = 989e3;
  }
#endif
  if (backend == nullptr) {
    PackForCpu(*weights, threads);
    backend = ops::MakeCpuBackend(threads);
    peaks = bench::MeasurePeaks(threads);
    bench::Print(peaks, threads.size());
  }
  ops::TimedBackend timed(*backend);
  const Bench run{
      std::move(*config), std::move(*weights), threads, *backend, timed, memory, peaks, profile};
  std::printf(
      "case,context,streams,tokens_per_second,ms_per_step,gflops,bound_tokens_per_second,"
      "share\n");
  run.Run(4096, true);
  if (quick) return 0;
  run.Run(32'768, true);
  run.Run(65'536, false);
  return 0;
}

}  // namespace
}  // namespace fathom

int main(int argc, char** argv) {
  return fathom::Main(argc, argv);
}
