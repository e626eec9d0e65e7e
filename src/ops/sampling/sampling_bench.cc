// One token from a row of 129,280 logits, by setting. Bound: one read of the row at the measured
// streaming rate (rows stay in the caches, so a share above 1 is possible).
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ops/bench_util.h"
#include "ops/sampling/sampling.h"

namespace fathom::ops {
namespace {

constexpr int kVocabulary = 129280;

void Measure(const std::string& name, const SamplingParams& params, float spread,
             const bench::Peaks& peaks) {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> logits(kVocabulary);
  for (float& l : logits) l = normal(random);
  SamplingArgs args;
  args.logits = logits;
  args.params = &params;
  const double us = bench::TimeUs([&] {
    ++args.step;
    Sample(args);
  });
  const double bytes = kVocabulary * 4.0;
  bench::Print({.op = "sampling",
                .shape = name + " spread=" + std::to_string(static_cast<int>(spread)),
                .threads = 1,
                .us = us,
                .bytes = bytes,
                .bound_us = bytes / peaks.read_gbs * 1e-3});
}

void MeasureLogprobs(int top, const bench::Peaks& peaks) {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(kVocabulary);
  for (float& l : logits) l = normal(random);
  const double us = bench::TimeUs([&] { Logprobs(logits, 4711, top); });
  const double bytes = kVocabulary * 4.0;
  bench::Print({.op = "logprobs",
                .shape = "top=" + std::to_string(top),
                .threads = 1,
                .us = us,
                .bytes = bytes,
                .bound_us = bytes / peaks.read_gbs * 1e-3});
}

}  // namespace
}  // namespace fathom::ops

int main() {
  using namespace fathom;
  ThreadPool pool(1);
  const bench::Peaks peaks = bench::MeasurePeaks(pool);
  bench::PrintHeader();
  for (const float spread : {1.0f, 4.0f}) {
    ops::SamplingParams params;
    params.temperature = 0;
    ops::Measure("greedy", params, spread, peaks);
    params.temperature = 1;
    ops::Measure("temperature 1", params, spread, peaks);
    params.top_p = 0.95f;
    ops::Measure("top_p 0.95", params, spread, peaks);
    params.top_k = 50;
    ops::Measure("top_p 0.95 top_k 50", params, spread, peaks);
    params.top_k = 0;
    params.top_p = 1;
    params.min_p = 0.05f;
    ops::Measure("min_p 0.05", params, spread, peaks);
  }
  ops::MeasureLogprobs(0, peaks);
  ops::MeasureLogprobs(20, peaks);
  return 0;
}
