#include "ops/sparse_attention/sparse_attention.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <tuple>

#include "ops/sparse_attention/entries.h"
#include "ops/sparse_attention/kernels.h"
#include "ops/sparse_attention/scenario.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

// The ways to compute on this machine: the reference, and every set of kernels it can run.
struct Way {
  const char* name;
  const AttentionKernels* kernels;
};

const std::vector<Way>& Ways() {
  static const std::vector<Way> ways = [] {
    std::vector<Way> all;
    ForEachIsa([&](Isa isa) {
      if (isa == Isa::kAvx2) all.push_back({"avx2", &kAttentionAvx2});
      if (isa == Isa::kAvx512) {
        all.push_back({"avx512", &kAttentionAvx512});
        all.push_back({"avx512 bf16", &kAttentionAvx512Bf16});
      }
    });
    return all;
  }();
  return ways;
}

// pool == nullptr: the reference. kernels == nullptr: whatever SparseAttentionCpu chooses.
std::vector<float> Attend(AttentionScenario& scenario, ThreadPool* pool,
                          const AttentionKernels* kernels = nullptr) {
  std::fill(scenario.out().begin(), scenario.out().end(), NAN);
  if (pool == nullptr) {
    SparseAttentionReference(scenario.args());
  } else if (kernels == nullptr) {
    SparseAttentionCpu(scenario.args(), *pool);
  } else {
    SparseAttentionWith(scenario.args(), *kernels, *pool);
  }
  return scenario.out();
}

void ExpectCpuMatchesReference(const ScenarioOptions& options, ThreadPool& pool) {
  AttentionScenario scenario(options);
  const std::vector<float> expected = Attend(scenario, nullptr);
  for (const Way& way : Ways()) {
    SCOPED_TRACE(way.name);
    const std::vector<float> got = Attend(scenario, &pool, way.kernels);
    // bf16 outputs differ by a unit in the last place where sums round apart.
    EXPECT_LT(RelativeL2(got, expected), options.numerics == Numerics::kProduct ? 3e-3 : 2e-6);
  }
}

// Steps that cover the edges: one token, a group, around a window, more than a window; from the
// start, around 128, 4 * top_k, 64K + segment edges; several sequences at different positions.
const std::vector<std::vector<ScenarioSequence>>& Steps() {
  static const std::vector<std::vector<ScenarioSequence>> steps = {
      {{0, 1}},
      {{0, 3}},
      {{0, 4}},
      {{1, 1}},
      {{126, 1}},
      {{127, 1}},
      {{128, 1}},
      {{0, 127}},
      {{0, 128}},
      {{0, 129}},
      {{511, 4}},
      {{300, 129}},
      {{2047, 1}, {0, 1}, {130, 2}},
      {{700, 5}, {0, 9}, {2100, 70}, {127, 1}},
  };
  return steps;
}

class SparseAttentionCases
    : public testing::TestWithParam<std::tuple<Compressed, RowFormat, Numerics>> {};

TEST_P(SparseAttentionCases, CpuMatchesReferenceForEveryStepAndHeadCount) {
  ThreadPool pool(2);
  const auto [compressed, format, numerics] = GetParam();
  uint64_t seed = 10;
  for (const auto& sequences : Steps()) {
    for (int heads : {1, 2, 4, 8}) {
      SCOPED_TRACE(testing::Message() << "first " << sequences[0].first << " tokens "
                                      << sequences[0].tokens << " heads " << heads);
      if (heads != 4 && sequences[0].tokens > 100) continue;
      ExpectCpuMatchesReference({.sequences = sequences,
                                 .heads = heads,
                                 .compressed = compressed,
                                 .format = format,
                                 .numerics = numerics,
                                 .seed = ++seed},
                                pool);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, SparseAttentionCases,
    testing::Combine(testing::Values(Compressed::kNone, Compressed::kCsa, Compressed::kHca),
                     testing::Values(RowFormat::kFp8Main, RowFormat::kBf16, RowFormat::kF32),
                     testing::Values(Numerics::kProduct, Numerics::kReference)));

TEST(SparseAttention, ManyHeadsAndLongSelectionsMatchReference) {
  ThreadPool pool(3);
  // 64 and 128 heads as in the published models; selections longer than a segment.
  ExpectCpuMatchesReference(
      {.sequences = {{5000, 3}}, .heads = 64, .compressed = Compressed::kCsa, .top_k = 1024}, pool);
  ExpectCpuMatchesReference(
      {.sequences = {{1200, 1}}, .heads = 128, .compressed = Compressed::kHca}, pool);
  ExpectCpuMatchesReference(
      {.sequences = {{4600, 40}}, .heads = 64, .compressed = Compressed::kCsa, .top_k = 512}, pool);
}

TEST(SparseAttention, PositionsNearTheLastOfAMillionMatchReference) {
  ThreadPool pool(2);
  for (RowFormat format : {RowFormat::kFp8Main, RowFormat::kBf16}) {
    ExpectCpuMatchesReference(
        {.sequences = {{1'048'570, 6}}, .compressed = Compressed::kHca, .format = format}, pool);
  }
}

TEST(SparseAttention, VectorWidthDoesNotChangeTheBits) {
  ThreadPool pool(2);
  for (RowFormat format : {RowFormat::kFp8Main, RowFormat::kF32}) {
    AttentionScenario scenario(
        {.sequences = {{900, 33}, {66'000, 2}}, .compressed = Compressed::kHca, .format = format});
    if (!SetCpuIsa(Isa::kAvx512)) GTEST_SKIP() << "this CPU has no AVX-512";
    EXPECT_EQ(Attend(scenario, &pool, &kAttentionAvx512), Attend(scenario, &pool, &kAttentionAvx2));
  }
}

TEST(SparseAttention, WithoutVectorsTheReferenceRuns) {
  ThreadPool pool(2);
  const Isa before = CpuIsa();
  SetCpuIsa(Isa::kScalar);
  AttentionScenario scenario({.sequences = {{200, 3}}, .compressed = Compressed::kCsa});
  const std::vector<float> got = Attend(scenario, &pool);
  SetCpuIsa(before);
  EXPECT_EQ(got, Attend(scenario, nullptr));
}

// The same tokens cut into steps and threads in any way give the same bits.
RC_GTEST_PROP(SparseAttentionProperty, BitsDependOnNoChunkBatchOrThreadCount, ()) {
  const auto compressed = *rc::gen::element(Compressed::kNone, Compressed::kCsa, Compressed::kHca);
  ScenarioOptions options;
  options.compressed = compressed;
  options.top_k = *rc::gen::element(16, 128, 600);
  options.format = *rc::gen::element(RowFormat::kFp8Main, RowFormat::kBf16, RowFormat::kF32);
  options.numerics = *rc::gen::element(Numerics::kProduct, Numerics::kReference);
  options.heads = *rc::gen::element(1, 4, 12);
  options.seed = *rc::gen::inRange<uint64_t>(1, 1000);
  // HCA needs 64K tokens of context before it has a second segment.
  const int32_t first = compressed == Compressed::kHca && *rc::gen::inRange(0, 3) == 0
                            ? *rc::gen::inRange(65'400, 66'000)
                            : *rc::gen::inRange(0, 3000);
  const int32_t tokens = *rc::gen::inRange(1, 80);
  const AttentionKernels* kernels = (*rc::gen::elementOf(Ways())).kernels;

  options.sequences = {{first, tokens}};
  AttentionScenario whole(options);
  ThreadPool one(1);
  Attend(whole, &one, kernels);
  ThreadPool three(3);
  const std::vector<float> single = whole.out();
  RC_ASSERT(Attend(whole, &three, kernels) == single);

  for (int32_t begin = 0; begin < tokens;) {
    const int32_t count = *rc::gen::inRange(1, std::min(tokens - begin, 40) + 1);
    // Beside a neighbour in the batch, whose rows and slot must not matter.
    options.sequences = {{first + begin, count}, {*rc::gen::inRange(0, 500), 2}};
    AttentionScenario chunk(options);
    Attend(chunk, *rc::gen::element(&one, &three), kernels);
    for (int32_t i = 0; i < count; ++i) RC_ASSERT(chunk.Row(i) == whole.Row(begin + i));
    begin += count;
  }
}

TEST(SparseAttention, OutputMayAliasTheQuery) {
  for (int threads : {1, 4}) {
    ThreadPool pool(threads);
    for (int32_t tokens : {2, 60}) {
      AttentionScenario scenario(
          {.sequences = {{400, tokens}}, .heads = 8, .compressed = Compressed::kHca});
      const std::vector<float> expected = Attend(scenario, &pool);
      scenario.args().out = scenario.args().q;
      SparseAttentionCpu(scenario.args(), pool);
      EXPECT_EQ(scenario.q(), expected);
    }
  }
}

// With equal scores everything is a plain average, and the sink is one more weight in Z only.
TEST(SparseAttention, SinkEntersTheDenominatorOnly) {
  ThreadPool pool(1);
  AttentionScenario scenario(
      {.sequences = {{0, 1}}, .format = RowFormat::kF32, .numerics = Numerics::kReference});
  std::fill(scenario.q().begin(), scenario.q().end(), 0.0f);
  float value[kHeadDim];
  const PagedRows& rows = scenario.args().step_rows;
  DecodeRow(rows.format, kHeadDim, rows.data(0, 0), rows.scale(0, 0), value);
  // Score 0: Z = 1 + exp(sink). A sink far above the scores takes everything.
  const std::vector<float> sink = {0.0f, 1.0f, -200.0f, 200.0f};
  scenario.args().sink = sink.data();
  for (bool reference : {true, false}) {
    Attend(scenario, reference ? nullptr : &pool);
    for (int h = 0; h < 4; ++h) {
      const double share = 1 / (1 + std::exp(double{sink[h]}));
      for (int ch = 0; ch < kHeadDim; ++ch) {
        EXPECT_NEAR(scenario.out()[h * kHeadDim + ch], value[ch] * share, 1e-6);
      }
    }
  }
}

TEST(SparseAttention, AStoredNanIsNotHidden) {
  ThreadPool pool(1);
  for (const Way& way : Ways()) {
    SCOPED_TRACE(way.name);
    AttentionScenario scenario({.sequences = {{300, 2}}});
    *scenario.args().step_rows.data(0, 1) = std::byte{0x7f};
    Attend(scenario, &pool, way.kernels);
    EXPECT_FALSE(std::isnan(scenario.Row(0)[0]));  // sees the first token only
    EXPECT_TRUE(std::isnan(scenario.Row(1)[0]));
  }
}

}  // namespace
}  // namespace fathom::ops
