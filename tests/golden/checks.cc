#include "golden/checks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <numeric>

namespace fathom::golden {
namespace {

using ops::Numerics;

constexpr CacheOptions kReferenceCache = {KvDType::kF32, IndexDType::kF32};

double RelativeL2(const float* a, const float* b, int64_t n) {
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(a[i])) return INFINITY;
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / std::max(norm, 1e-30));
}

std::vector<TokenId> Joined(const Prompt& prompt) {
  std::vector<TokenId> ids = prompt.prompt;
  ids.insert(ids.end(), prompt.greedy.begin(), prompt.greedy.end());
  return ids;
}

class StreamTap final : public Tap {
 public:
  explicit StreamTap(ops::Backend& backend) : backend_(backend) {}
  bool Wants(std::string_view name) override { return name.ends_with(".streams"); }
  void Put(std::string_view name, const MatrixView& value) override {
    const int layer = std::atoi(name.data() + 7);
    const std::vector<float> values = ops::ToHostFloats(backend_, value);
    for (int64_t t = 0; t < value.rows; ++t) {
      const auto begin = values.begin() + t * value.cols;
      rows_[layer].emplace_back(begin, begin + value.cols);
    }
  }
  const std::vector<float>& at(int layer, int64_t position) { return rows_[layer][position]; }

 private:
  ops::Backend& backend_;
  std::map<int, std::vector<std::vector<float>>> rows_;
};

// All logits of `ids` in chunks of `chunk` tokens (0: whole).
struct Run {
  std::vector<float> logits;
  std::unique_ptr<StreamTap> streams;
};

Run RunAlone(Model& model, const std::vector<TokenId>& ids, int64_t chunk, Numerics numerics,
             const CacheOptions& cache, int64_t logits_from, bool streams) {
  const auto n = static_cast<int64_t>(ids.size());
  if (chunk == 0) chunk = n;
  ReplayOptions options;
  options.numerics = numerics;
  options.cache = cache;
  options.max_context = n;
  options.max_step_tokens = static_cast<int>(std::min(chunk, n));
  options.memory = model.memory;
  auto replay = Replay::Make(model.config, model.weights, *model.backend, options);
  EXPECT_TRUE(replay.has_value());
  Run run;
  if (streams) run.streams = std::make_unique<StreamTap>(*model.backend);
  for (int64_t begin = 0; begin < n; begin += chunk) {
    const int64_t end = std::min(begin + chunk, n);
    const Replay::Chunk step{0, std::span(ids).subspan(begin, end - begin)};
    const bool wanted = end > logits_from;
    auto out = (*replay)->Step({&step, 1}, wanted ? Replay::Logits::kAll : Replay::Logits::kNone,
                               run.streams.get());
    EXPECT_TRUE(out.has_value());
    if (!wanted) continue;
    const int64_t skip = std::max<int64_t>(0, logits_from - begin) * model.config.vocab_size;
    run.logits.insert(run.logits.end(), out->begin() + skip, out->end());
  }
  return run;
}

struct Difference {
  double worst = 0;    // relative L2 of the worst row
  double overall = 0;  // of all rows together
  int64_t rows = 0, over = 0, wrong_argmax = 0;
};

// Rows of `got` (from position logits_from) against the reference.
Difference CompareLogits(const Prompt& prompt, const std::vector<float>& got, int64_t logits_from,
                         int64_t vocab, double bound) {
  Difference d;
  double squares = 0, norm = 0;
  for (size_t r = 0; r < prompt.logits_rows.size(); ++r) {
    const float* want = prompt.logits.data() + static_cast<int64_t>(r) * vocab;
    const float* have = got.data() + (prompt.logits_rows[r] - logits_from) * vocab;
    const double error = RelativeL2(have, want, vocab);
    d.worst = std::max(d.worst, error);
    d.over += error > bound;
    ++d.rows;
    for (int64_t i = 0; i < vocab; ++i) {
      squares += (double{have[i]} - want[i]) * (double{have[i]} - want[i]);
      norm += double{want[i]} * want[i];
    }
    const auto top = std::max_element(want, want + vocab) - want;
    float second = -INFINITY;
    for (int64_t i = 0; i < vocab; ++i) {
      if (i != top) second = std::max(second, want[i]);
    }
    const auto chosen = std::max_element(have, have + vocab) - have;
    d.wrong_argmax += want[top] - second > 0.05f && chosen != top;
  }
  d.overall = std::sqrt(squares / norm);
  return d;
}

double CompareStreams(const Prompt& prompt, StreamTap& got, int layers) {
  double worst = 0;
  const auto rows = static_cast<int64_t>(prompt.stream_rows.size());
  const int64_t width = static_cast<int64_t>(prompt.streams.size()) / (layers * rows);
  for (int layer = 0; layer < layers; ++layer) {
    double difference = 0, norm = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const float* want = prompt.streams.data() + (layer * rows + r) * width;
      const std::vector<float>& have = got.at(layer, prompt.stream_rows[r]);
      for (int64_t i = 0; i < width; ++i) {
        difference += (double{have[i]} - want[i]) * (double{have[i]} - want[i]);
        norm += double{want[i]} * want[i];
      }
    }
    worst = std::max(worst, std::sqrt(difference / norm));
  }
  return worst;
}

std::vector<int64_t> ChunkSizes(int64_t n) {
  const bool all = n < 3000 || std::getenv("FATHOM_LONG") != nullptr;
  std::vector<int64_t> sizes = {127, 129, 1000, 0};
  if (all) sizes = {1, 3, 7, 127, 128, 129, 1000, 0};
  std::erase_if(sizes, [&](int64_t size) { return size >= n; });
  return sizes;
}

// Greedy continuation of `prompt` in product mode; prefill in chunks.
std::vector<TokenId> Greedy(Model& model, const Prompt& prompt, const CacheOptions& cache,
                            int64_t chunk) {
  ReplayOptions options;
  options.cache = cache;
  options.max_context = static_cast<int64_t>(prompt.prompt.size() + prompt.greedy.size()) + 8;
  options.max_step_tokens = static_cast<int>(chunk);
  options.memory = model.memory;
  auto replay = Replay::Make(model.config, model.weights, *model.backend, options);
  std::vector<TokenId> out;
  TokenId next = -1;
  const auto n = static_cast<int64_t>(prompt.prompt.size());
  for (int64_t begin = 0; begin < n; begin += chunk) {
    const Replay::Chunk step{0,
                             std::span(prompt.prompt).subspan(begin, std::min(chunk, n - begin))};
    auto logits = (*replay)->Step({&step, 1}, Replay::Logits::kLast);
    next = static_cast<TokenId>(std::max_element(logits->begin(), logits->end()) - logits->begin());
  }
  while (out.size() < prompt.greedy.size() + 4) {
    out.push_back(next);
    if (next == model.config.eos_token) break;
    const Replay::Chunk step{0, {&out.back(), 1}};
    auto logits = (*replay)->Step({&step, 1}, Replay::Logits::kLast);
    next = static_cast<TokenId>(std::max_element(logits->begin(), logits->end()) - logits->begin());
  }
  return out;
}

// The bytes a sequence leaves behind and its last logits.
struct Trace {
  std::vector<std::byte> slot, blocks;
  std::vector<float> logits;
  bool operator==(const Trace&) const = default;
};

Trace TraceOf(const Replay& replay, int sequence, std::span<const float> logits) {
  Trace trace;
  const auto slot = replay.slot_bytes(sequence);
  trace.slot.assign(slot.begin(), slot.end());
  const int64_t blocks = replay.geometry().blocks_for(replay.position(sequence));
  for (int64_t b = 0; b < blocks; ++b) {
    const auto bytes = replay.block_bytes(sequence, b);
    trace.blocks.insert(trace.blocks.end(), bytes.begin(), bytes.end());
  }
  trace.logits.assign(logits.begin(), logits.end());
  return trace;
}

void CheckChunkIndependence(Model& model, const std::vector<TokenId>& ids, Numerics numerics,
                            const CacheOptions& cache) {
  const auto n = static_cast<int64_t>(ids.size());
  const int64_t vocab = model.config.vocab_size;
  ReplayOptions options;
  options.numerics = numerics;
  options.cache = cache;
  options.max_context = n;
  options.memory = model.memory;
  options.max_step_tokens = static_cast<int>(n);
  const auto alone = [&](int64_t chunk) {
    auto replay = Replay::Make(model.config, model.weights, *model.backend, options);
    std::span<const float> logits;
    for (int64_t begin = 0; begin < n; begin += chunk) {
      const Replay::Chunk step{0, std::span(ids).subspan(begin, std::min(chunk, n - begin))};
      logits = *(*replay)->Step({&step, 1}, Replay::Logits::kLast);
    }
    return TraceOf(**replay, 0, logits);
  };
  const Trace whole = alone(n);
  for (int64_t chunk : {1, 3, 7, 127, 128, 129, 1000}) {
    if (chunk >= n) continue;
    const Trace trace = alone(chunk);
    EXPECT_TRUE(trace.slot == whole.slot) << "window or state bytes, chunk " << chunk;
    EXPECT_TRUE(trace.blocks == whole.blocks) << "rows, chunk " << chunk;
    EXPECT_TRUE(trace.logits == whole.logits) << "logits, chunk " << chunk;
  }
  // Batched with two other sequences at other positions, in uneven chunks.
  options.sequences = 3;
  options.max_step_tokens = 700;
  auto replay = Replay::Make(model.config, model.weights, *model.backend, options);
  std::vector<TokenId> other(ids.rbegin(), ids.rend());
  int64_t begin = 0;
  std::span<const float> logits;
  for (int turn = 0; begin < n; ++turn) {
    const int64_t sizes[] = {1, 130, 5, 64, 200, 3};
    const int64_t count = std::min(sizes[turn % 6], n - begin);
    std::vector<Replay::Chunk> step;
    for (int s : {1, 0, 2}) {
      const int64_t at = (*replay)->position(s);
      const int64_t take = s == 0 ? count : std::min<int64_t>(s == 1 ? 1 : 17, n - at);
      if (take > 0) step.push_back({s, std::span(s == 0 ? ids : other).subspan(at, take)});
    }
    const bool second = step.size() > 1 && step[0].sequence == 1;
    logits = *(*replay)->Step(step, Replay::Logits::kLast);
    logits = logits.subspan(second ? vocab : 0, vocab);
    begin += count;
  }
  const Trace batched = TraceOf(**replay, 0, logits);
  EXPECT_TRUE(batched.slot == whole.slot) << "window or state bytes, batched";
  EXPECT_TRUE(batched.blocks == whole.blocks) << "rows, batched";
  EXPECT_TRUE(batched.logits == whole.logits) << "logits, batched";
}

}  // namespace

void CheckReference(Model& model, double flips_allowed) {
  constexpr double kBound = 2e-3;
  for (const Prompt& prompt : model.prompts) {
    const std::vector<TokenId> ids = Joined(prompt);
    for (int64_t chunk : ChunkSizes(static_cast<int64_t>(ids.size()))) {
      SCOPED_TRACE(prompt.name + " chunk " + std::to_string(chunk));
      const int64_t from = prompt.logits_rows.front();
      const Run run = RunAlone(model, ids, chunk, Numerics::kReference, kReferenceCache, from,
                               !prompt.streams.empty());
      const Difference d = CompareLogits(prompt, run.logits, from, model.config.vocab_size, kBound);
      double streams = 0;
      if (!prompt.streams.empty()) {
        streams = CompareStreams(prompt, *run.streams, model.config.num_layers);
      }
      std::printf(
          "%-10s %-14s chunk %5ld: logits %.2e (worst row %.2e, %ld of %ld rows over), "
          "streams %.2e\n",
          model.name.c_str(), prompt.name.c_str(), chunk, d.overall, d.worst, d.over, d.rows,
          streams);
      EXPECT_LE(static_cast<double>(d.over), flips_allowed * static_cast<double>(d.rows));
      if (d.over == 0) {
        EXPECT_LT(d.overall, kBound);
      }
      EXPECT_LE(static_cast<double>(d.wrong_argmax), flips_allowed * static_cast<double>(d.rows));
      EXPECT_LT(streams, d.over == 0 ? 4e-3 : 5e-2);  // streams are stored as bf16: 2e-3 of noise
    }
  }
}

void CheckGreedyText(Model& model) {
  const std::pair<const char*, CacheOptions> caches[] = {
      {"bf16 + bf16", {KvDType::kBf16, IndexDType::kBf16}},
      {"fp8 + fp8", {KvDType::kFp8, IndexDType::kFp8}},
      {"fp8 + mxfp4", {KvDType::kFp8, IndexDType::kMxfp4}},
  };
  for (const auto& [name, cache] : caches) {
    for (const Prompt& prompt : model.prompts) {
      SCOPED_TRACE(prompt.name + " " + name);
      std::vector<TokenId> want = prompt.greedy;
      if (want.empty() || want.back() != model.config.eos_token) {
        want.push_back(model.config.eos_token);
      }
      EXPECT_EQ(Greedy(model, prompt, cache, 500), want);
    }
  }
}

void CheckChunkIndependence(Model& model, const std::vector<TokenId>& ids) {
  const std::tuple<const char*, Numerics, CacheOptions> modes[] = {
      {"reference", Numerics::kReference, kReferenceCache},
      {"bf16 + bf16", Numerics::kProduct, {KvDType::kBf16, IndexDType::kBf16}},
      {"fp8 + fp8", Numerics::kProduct, {KvDType::kFp8, IndexDType::kFp8}},
      {"fp8 + mxfp4", Numerics::kProduct, {KvDType::kFp8, IndexDType::kMxfp4}},
  };
  for (const auto& [name, numerics, cache] : modes) {
    SCOPED_TRACE(name);
    CheckChunkIndependence(model, ids, numerics, cache);
  }
}

void CheckStaleMemory(Model& model) {
  ReplayOptions options;
  options.max_context = 600;
  options.max_step_tokens = 600;
  options.memory = model.memory;
  auto replay = Replay::Make(model.config, model.weights, *model.backend, options);
  const std::vector<TokenId>& ids = model.prompts[1].prompt;
  const std::vector<TokenId>& noise = model.prompts[2].prompt;
  const auto run = [&](std::span<const TokenId> tokens) {
    std::vector<float> all;
    for (size_t begin = 0; begin < tokens.size(); begin += 50) {
      const Replay::Chunk step{0,
                               tokens.subspan(begin, std::min<size_t>(50, tokens.size() - begin))};
      const auto logits = *(*replay)->Step({&step, 1}, Replay::Logits::kLast);
      all.assign(logits.begin(), logits.end());
    }
    return all;
  };
  for (size_t length : {3UL, 130UL, ids.size()}) {
    (*replay)->Restart(0);
    const auto fresh = run(std::span(ids).first(length));
    (*replay)->Restart(0);
    run(std::span(noise).first(555));
    (*replay)->Restart(0);
    EXPECT_EQ(run(std::span(ids).first(length)), fresh) << length;
    for (float x : fresh) ASSERT_FALSE(std::isnan(x));
  }
}

}  // namespace fathom::golden
