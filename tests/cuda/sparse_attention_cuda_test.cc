// SparseAttentionCuda against the reference, and its bits against every way to cut a step.
#include <tuple>

#include "device_memory.h"
#include "ops/norm_rope_insert/cuda.h"
#include "ops/norm_rope_insert/rope.h"
#include "ops/sparse_attention/cuda.h"
#include "ops/sparse_attention/scenario.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

template <class T>
std::vector<T> CopyOf(const T* data, int64_t n) {
  return data == nullptr ? std::vector<T>() : std::vector<T>(data, data + n);
}

// Who normalises and rotates the queries and rotates the output back.
enum class Rotary { kNobody, kOtherOps, kAttention };

struct RunOptions {
  bool alias = false;        // out is q
  bool f32_queries = false;  // float32 activations whatever the numerics
  Rotary rotary = Rotary::kNobody;
  AttentionTrial trial = {};
};

constexpr AttentionTrial kMeasured = {.candidate = false};
constexpr AttentionTrial kCandidate = {.candidate = true};
// With as many ranges as the measured kernel: then all bits are its.
constexpr AttentionTrial kCandidateOfEight = {.candidate = true, .max_ranges = 8};

// A step's rotary tables [T, 64].
std::vector<float> RotaryTables(const StepView& step) {
  std::vector<float> tables(int64_t{step.num_tokens} * kRopeDim);
  for (int32_t t = 0; t < step.num_tokens; ++t) {
    RopeTableRow(PlainRope(10'000), step.position[t], &tables[t * kRopeDim]);
  }
  return tables;
}

void NormAndRotateOnDevice(MatrixView q, int heads, const float* rope) {
  const int64_t tokens = q.rows;
  const DeviceMatrix kv(tokens, kHeadDim, q.dtype);
  const DeviceArray<float> norm(std::vector<float>(kHeadDim, 1.0f));
  const DeviceArray<std::byte> rows(tokens * RowDataBytes(RowFormat::kBf16, kHeadDim));
  NormRopeInsertArgs args;
  args.q = q;
  args.kv = kv.view();
  args.kv_norm = norm.data();
  args.rope = rope;
  args.step_rows.base = rows.data();
  args.step_rows.format = RowFormat::kBf16;
  args.step_rows.channels = kHeadDim;
  args.step_rows.rows_per_page = static_cast<int32_t>(tokens);
  args.heads = heads;
  NormRopeInsertCuda(args, nullptr);
  FATHOM_CUDA_CHECK(cudaDeviceSynchronize());
}

// As output_projection begins.
void RotateBack(const std::vector<float>& tables, int heads, std::vector<float>* out) {
  const auto rows = static_cast<int64_t>(out->size()) / kHeadDim;
  for (int64_t row = 0; row < rows; ++row) {
    float* rope = out->data() + row * kHeadDim + kNopeDim;
    RotateRow(rope, &tables[row / heads * kRopeDim], /*inverse=*/true);
    for (int i = 0; i < kRopeDim; ++i) rope[i] = RoundBf16(rope[i]);
  }
}

std::vector<float> AttendOnDevice(AttentionScenario& scenario, const RunOptions& options = {}) {
  SparseAttentionArgs args = scenario.args();
  const std::vector<float> tables = RotaryTables(*args.step);
  const DeviceArray<float> rope(tables);
  const DeviceStep step(*args.step);
  const int64_t tokens = args.step->num_tokens, width = int64_t{args.heads} * kHeadDim;
  const DType type = options.f32_queries ? DType::kF32 : DeviceActivationType(args.numerics);
  const auto memory = [&](PagedRows& rows, int64_t blocks) {
    DeviceArray<std::byte> array(
        CopyOf(rows.base, rows.base == nullptr ? 0 : blocks * rows.block_stride));
    if (rows.base != nullptr) rows.base = array.data();
    return array;
  };
  // As many blocks as the scenario allocates.
  const int64_t sequences = args.step->num_sequences;
  const DeviceArray<std::byte> step_rows = memory(args.step_rows, 1);
  const DeviceArray<std::byte> ring = memory(args.ring, sequences + 2);
  const DeviceArray<std::byte> compressed =
      memory(args.compressed, sequences * args.step->max_blocks + 3);
  const DeviceArray<int32_t> selected(CopyOf(args.selected, tokens * args.top_k));
  const DeviceArray<int32_t> counts(CopyOf(args.counts, tokens));
  const DeviceArray<float> sink(CopyOf(args.sink, args.heads));
  const DeviceMatrix q(scenario.q(), tokens, width, type);
  const DeviceMatrix out(tokens, width, type);
  const DeviceArray<std::byte> scratch(SparseAttentionCudaScratchBytes());
  args.step = &step.view();
  if (args.selected != nullptr) {
    args.selected = selected.data();
    args.counts = counts.data();
  }
  args.sink = sink.data();
  args.q = q.view();
  args.out = options.alias ? q.view() : out.view();
  if (options.rotary == Rotary::kOtherOps) NormAndRotateOnDevice(q.view(), args.heads, rope.data());
  if (options.rotary == Rotary::kAttention) {
    EXPECT_TRUE(SparseAttentionCudaFuses(args));
    args.rope = rope.data();
  }
  SparseAttentionCuda(args, scratch.data(), nullptr, options.trial);
  std::vector<float> result = options.alias ? q.Download() : out.Download();
  if (options.rotary == Rotary::kOtherOps) RotateBack(tables, args.heads, &result);
  return result;
}

std::vector<float> AttendReference(AttentionScenario& scenario) {
  SparseAttentionReference(scenario.args());
  return scenario.out();
}

// bf16 outputs differ by a unit in the last place where sums round apart; weights are rounded to
// bf16 under a local maximum.
double Tolerance(Numerics numerics) {
  return numerics == Numerics::kProduct ? 3e-3 : 5e-6;
}

void ExpectMatchesReference(const ScenarioOptions& options, const RunOptions& run = {}) {
  AttentionScenario scenario(options);
  const std::vector<float> expected = AttendReference(scenario);
  EXPECT_LT(RelativeL2(AttendOnDevice(scenario, run), expected), Tolerance(options.numerics));
}

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

class SparseAttentionCudaCases
    : public testing::TestWithParam<std::tuple<Compressed, RowFormat, Numerics>> {};

TEST_P(SparseAttentionCudaCases, MatchesReferenceForEveryStepAndHeadCount) {
  FATHOM_NEEDS_DEVICE();
  const auto [compressed, format, numerics] = GetParam();
  uint64_t seed = 10;
  for (const auto& sequences : Steps()) {
    for (int heads : {1, 4, 8, 17}) {
      SCOPED_TRACE(testing::Message() << "first " << sequences[0].first << " tokens "
                                      << sequences[0].tokens << " heads " << heads);
      if (heads != 4 && sequences[0].tokens > 100) continue;
      ExpectMatchesReference({.sequences = sequences,
                              .heads = heads,
                              .compressed = compressed,
                              .format = format,
                              .numerics = numerics,
                              .seed = ++seed});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, SparseAttentionCudaCases,
    testing::Combine(testing::Values(Compressed::kNone, Compressed::kCsa, Compressed::kHca),
                     testing::Values(RowFormat::kFp8Main, RowFormat::kBf16, RowFormat::kF32),
                     testing::Values(Numerics::kProduct, Numerics::kReference)));

TEST(SparseAttentionCuda, ManyHeadsAndLongSelectionsMatchReference) {
  FATHOM_NEEDS_DEVICE();
  ExpectMatchesReference(
      {.sequences = {{5000, 3}}, .heads = 64, .compressed = Compressed::kCsa, .top_k = 1024});
  ExpectMatchesReference({.sequences = {{1200, 1}}, .heads = 128, .compressed = Compressed::kHca});
  ExpectMatchesReference(
      {.sequences = {{4600, 40}}, .heads = 64, .compressed = Compressed::kCsa, .top_k = 512});
  for (const RowFormat format : {RowFormat::kFp8Main, RowFormat::kBf16}) {
    for (const int32_t tokens : {1, 3, 127, 129}) {
      ExpectMatchesReference({.sequences = {{3000, tokens}, {tokens, 1}},
                              .heads = tokens == 3 ? 128 : 64,
                              .compressed = Compressed::kCsa,
                              .top_k = 512,
                              .format = format});
    }
  }
  ExpectMatchesReference({.sequences = {{5000, 2}},
                          .heads = 128,
                          .compressed = Compressed::kCsa,
                          .top_k = 1024,
                          .numerics = Numerics::kReference});
}

TEST(SparseAttentionCuda, PagesOfAnyNumberOfRowsMatchReference) {
  FATHOM_NEEDS_DEVICE();
  for (const int32_t block_tokens : {128, 384, 640, 8'192}) {
    for (const Compressed compressed : {Compressed::kCsa, Compressed::kHca}) {
      ExpectMatchesReference({.sequences = {{9'000, 3}, {383, 2}},
                              .heads = 64,
                              .compressed = compressed,
                              .block_tokens = block_tokens});
    }
  }
}

TEST(SparseAttentionCuda, Float32QueriesOfTheProductMatchReference) {
  FATHOM_NEEDS_DEVICE();
  for (RowFormat format : {RowFormat::kFp8Main, RowFormat::kF32}) {
    ExpectMatchesReference({.sequences = {{900, 5}, {30, 3}},
                            .heads = 8,
                            .compressed = Compressed::kCsa,
                            .format = format},
                           {.f32_queries = true});
  }
}

TEST(SparseAttentionCuda, PositionsNearTheLastOfAMillionMatchReference) {
  FATHOM_NEEDS_DEVICE();
  for (RowFormat format : {RowFormat::kFp8Main, RowFormat::kBf16}) {
    for (Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
      for (const AttentionTrial& trial : {kMeasured, kCandidate}) {
        ExpectMatchesReference({.sequences = {{1'048'570, 6}},
                                .compressed = Compressed::kHca,
                                .format = format,
                                .numerics = numerics},
                               {.trial = trial});
      }
    }
  }
}

// More ranges than a portable cluster has blocks, of equal and of different lengths, and blocks of
// padding heads alone.
TEST(SparseAttentionCuda, MoreThanEightRangesMatchReference) {
  FATHOM_NEEDS_DEVICE();
  // Tiles: 43, 53, 64, 80, 98.
  for (const int32_t position : {330'000, 413'000, 507'700, 639'000, 786'431}) {
    for (const int heads : {4, 8, 16, 17, 64, 128}) {
      for (const RowFormat format : {RowFormat::kFp8Main, RowFormat::kBf16}) {
        if (format == RowFormat::kBf16 && heads != 17) continue;
        if (heads == 128 && position != 413'000) continue;
        SCOPED_TRACE(testing::Message() << "position " << position << " heads " << heads
                                        << " format " << static_cast<int>(format));
        AttentionScenario scenario({.sequences = {{position, 2}, {40, 1}},
                                    .heads = heads,
                                    .compressed = Compressed::kHca,
                                    .format = format});
        const std::vector<float> expected = AttendReference(scenario);
        for (const int ranges : {0, 9, 11, 16}) {
          if (ranges > 8 && SparseAttentionCudaClusters(ranges) == 0) continue;
          const AttentionTrial trial = {.candidate = true, .max_ranges = ranges};
          EXPECT_LT(RelativeL2(AttendOnDevice(scenario, {.trial = trial}), expected),
                    Tolerance(Numerics::kProduct))
              << "at most " << ranges << " ranges";
        }
      }
    }
  }
}

// With the same ranges the candidate's bits are the measured kernel's.
TEST(SparseAttentionCuda, TheCandidateHasTheBitsOfTheMeasuredKernel) {
  FATHOM_NEEDS_DEVICE();
  const auto expect_same_bits = [](const ScenarioOptions& options) {
    AttentionScenario scenario(options);
    for (const Rotary rotary : {Rotary::kNobody, Rotary::kAttention}) {
      SCOPED_TRACE(testing::Message()
                   << "first " << options.sequences[0].first << " tokens "
                   << options.sequences[0].tokens << " heads " << options.heads << " compressed "
                   << static_cast<int>(options.compressed) << " format "
                   << static_cast<int>(options.format) << " rotary " << static_cast<int>(rotary));
      const std::vector<float> expected =
          AttendOnDevice(scenario, {.rotary = rotary, .trial = kMeasured});
      EXPECT_EQ(AttendOnDevice(scenario, {.rotary = rotary, .trial = kCandidateOfEight}), expected);
    }
  };
  uint64_t seed = 300;
  for (const Compressed compressed : {Compressed::kNone, Compressed::kCsa, Compressed::kHca}) {
    for (const RowFormat format : {RowFormat::kFp8Main, RowFormat::kBf16}) {
      for (const auto& sequences : Steps()) {
        for (const int heads : {1, 17, 64, 128}) {
          if (heads != 17 && sequences[0].tokens > 100) continue;
          expect_same_bits({.sequences = sequences,
                            .heads = heads,
                            .compressed = compressed,
                            .format = format,
                            .seed = ++seed});
        }
      }
      for (const int heads : {4, 64, 128}) {
        expect_same_bits({.sequences = {{5'000, 1}, {70'000, 3}, {131'000, 1}, {9, 1}},
                          .heads = heads,
                          .compressed = compressed,
                          .top_k = 1024,
                          .format = format,
                          .seed = ++seed});
      }
    }
  }
  expect_same_bits({.sequences = {{1'048'570, 6}}, .heads = 64, .compressed = Compressed::kHca});
  // A ring of another length, and one as long as the window.
  for (const int32_t ring_rows : {kWindow, 517}) {
    expect_same_bits({.sequences = {{1'000'003, 2}, {130, 1}},
                      .heads = 16,
                      .compressed = Compressed::kHca,
                      .ring_rows = ring_rows});
  }
}

// A step with enough tokens to fill the device runs each token's segments in one block, a single
// token shares them out: the bits are the same, beside any neighbour.
TEST(SparseAttentionCuda, BitsDependOnNoChunkOrBatch) {
  FATHOM_NEEDS_DEVICE();
  for (Compressed compressed : {Compressed::kNone, Compressed::kCsa, Compressed::kHca}) {
    for (Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
      SCOPED_TRACE(testing::Message()
                   << static_cast<int>(compressed) << " numerics " << static_cast<int>(numerics));
      const int32_t first = compressed == Compressed::kHca ? 65'500 : 2700;
      const int32_t tokens = 150;
      ScenarioOptions options{.sequences = {{first, tokens}},
                              .heads = 20,  // two groups, the second one short
                              .compressed = compressed,
                              .top_k = 600,
                              .numerics = numerics};
      AttentionScenario whole(options);
      const std::vector<float> expected = AttendOnDevice(whole);
      const int64_t width = int64_t{options.heads} * kHeadDim;
      const int32_t counts[] = {1, 1, 3, 40, 5, 100};
      int32_t begin = 0;
      for (const int32_t count : counts) {
        options.sequences = {{first + begin, count}, {300, 2}};
        AttentionScenario chunk(options);
        const std::vector<float> got = AttendOnDevice(chunk);
        EXPECT_TRUE(
            std::equal(got.begin(), got.begin() + count * width, expected.begin() + begin * width))
            << "tokens " << begin << " to " << begin + count;
        begin += count;
      }
      ASSERT_EQ(begin, tokens);
    }
  }
}

TEST(SparseAttentionCuda, BitsOfManyRangesDependOnNoChunkOrBatch) {
  FATHOM_NEEDS_DEVICE();
  for (const RowFormat format : {RowFormat::kFp8Main, RowFormat::kBf16}) {
    for (const int ranges : {-1, 0, 16}) {  // -1: the measured kernel
      if (ranges > 8 && SparseAttentionCudaClusters(ranges) == 0) continue;
      const AttentionTrial trial = {.candidate = ranges >= 0, .max_ranges = std::max(ranges, 0)};
      // The second one passes from 15 to 16 ranges of five tiles.
      for (const int32_t first : {419'900, 598'000, 1'048'000}) {
        SCOPED_TRACE(testing::Message() << "first " << first << " ranges " << ranges << " format "
                                        << static_cast<int>(format));
        const int32_t tokens = 300;
        ScenarioOptions options{.sequences = {{first, tokens}},
                                .heads = 20,
                                .compressed = Compressed::kHca,
                                .format = format};
        AttentionScenario whole(options);
        const std::vector<float> expected = AttendOnDevice(whole, {.trial = trial});
        const int64_t width = int64_t{options.heads} * kHeadDim;
        int32_t begin = 0;
        for (const int32_t count : {1, 2, 130, 40, 7, 120}) {
          options.sequences = {{first + begin, count}, {300, 2}};
          AttentionScenario chunk(options);
          const std::vector<float> got = AttendOnDevice(chunk, {.trial = trial});
          EXPECT_TRUE(std::equal(got.begin(), got.begin() + count * width,
                                 expected.begin() + begin * width))
              << "tokens " << begin << " to " << begin + count;
          begin += count;
        }
        ASSERT_EQ(begin, tokens);
      }
    }
  }
}

TEST(SparseAttentionCuda, OutputMayAliasTheQuery) {
  FATHOM_NEEDS_DEVICE();
  for (int32_t tokens : {2, 300}) {
    for (Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
      AttentionScenario scenario({.sequences = {{400, tokens}},
                                  .heads = 24,
                                  .compressed = Compressed::kHca,
                                  .numerics = numerics});
      const std::vector<float> expected = AttendOnDevice(scenario);
      EXPECT_EQ(AttendOnDevice(scenario, {.alias = true}), expected);
    }
  }
}

// The queries' norm and rotation and the output's rotation within the kernel: the same bits as by
// the other ops, also where the output takes the queries' place while other ranges of the token may
// still be at work.
TEST(SparseAttentionCuda, FusedRotationsHaveTheBitsOfTheOtherOps) {
  FATHOM_NEEDS_DEVICE();
  const auto expect_same_bits = [](const ScenarioOptions& options) {
    AttentionScenario scenario(options);
    for (const AttentionTrial& trial : {kMeasured, kCandidate}) {
      SCOPED_TRACE(testing::Message()
                   << "heads " << options.heads << " compressed "
                   << static_cast<int>(options.compressed) << " format "
                   << static_cast<int>(options.format) << " first " << options.sequences[0].first
                   << " tokens " << options.sequences[0].tokens << " candidate "
                   << trial.candidate);
      const std::vector<float> expected =
          AttendOnDevice(scenario, {.rotary = Rotary::kOtherOps, .trial = trial});
      for (const bool alias : {false, true}) {
        const RunOptions run = {.alias = alias, .rotary = Rotary::kAttention, .trial = trial};
        EXPECT_EQ(AttendOnDevice(scenario, run), expected) << "alias " << alias;
      }
    }
  };
  for (const Compressed compressed : {Compressed::kNone, Compressed::kCsa, Compressed::kHca}) {
    // Several ranges where there are compressed rows.
    const int32_t first = compressed == Compressed::kHca ? 40'000 : 3000;
    for (const RowFormat format : {RowFormat::kFp8Main, RowFormat::kBf16}) {
      for (const int heads : {4, 8, 16, 64, 128}) {
        for (const int32_t tokens : {1, 3, 8}) {
          if (tokens > 1 && heads < 64) continue;
          expect_same_bits({.sequences = {{first, tokens}},
                            .heads = heads,
                            .compressed = compressed,
                            .top_k = 512,
                            .format = format});
        }
        // A token of each sequence, as in decode, of one range and of several.
        expect_same_bits({.sequences = {{first, 1}, {100, 1}, {first + 9'000, 1}, {0, 1}},
                          .heads = heads,
                          .compressed = compressed,
                          .top_k = 512,
                          .format = format});
      }
      expect_same_bits({.sequences = {{60, 40}, {0, 1}, {5000, 2}},
                        .heads = 16,
                        .compressed = compressed,
                        .top_k = 512,
                        .format = format});
    }
  }
  for (const int32_t tokens : {1, 3, 8}) {
    expect_same_bits(
        {.sequences = {{900'000, tokens}, {700, 1}}, .heads = 64, .compressed = Compressed::kHca});
  }
}

// Scales and codes that the quick way to expand rows does not cover.
TEST(SparseAttentionCuda, LargeScalesMatchReference) {
  FATHOM_NEEDS_DEVICE();
  AttentionScenario scenario({.sequences = {{900, 3}}, .heads = 8});
  const PagedRows& rows = scenario.args().step_rows;
  for (int32_t row = 0; row < 2; ++row) {
    for (int block = 0; block < 7; ++block) {
      rows.scale(0, row)[block] = static_cast<std::byte>(133 + 3 * row + block % 2);
    }
  }
  const std::vector<float> expected = AttendReference(scenario);
  for (const AttentionTrial& trial : {kMeasured, kCandidate}) {
    EXPECT_LT(RelativeL2(AttendOnDevice(scenario, {.trial = trial}), expected),
              Tolerance(Numerics::kProduct));
  }
}

TEST(SparseAttentionCuda, AStoredNanIsNotHidden) {
  FATHOM_NEEDS_DEVICE();
  for (Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
    AttentionScenario scenario({.sequences = {{300, 2}}, .numerics = numerics});
    *scenario.args().step_rows.data(0, 1) = std::byte{0x7f};
    for (const AttentionTrial& trial : {kMeasured, kCandidate}) {
      const std::vector<float> out = AttendOnDevice(scenario, {.trial = trial});
      EXPECT_FALSE(std::isnan(out[0]));  // sees the first token only
      EXPECT_TRUE(std::isnan(out[out.size() / 2]));
    }
  }
}

// Tokens that only fill up a captured batch have position -1: nothing of them is read or written.
TEST(SparseAttentionCuda, PaddingIsLeftAlone) {
  FATHOM_NEEDS_DEVICE();
  AttentionScenario scenario(
      {.sequences = {{900, 2}, {40, 1}}, .heads = 16, .compressed = Compressed::kCsa});
  const std::vector<int32_t> whole = CopyOf(scenario.step().position, 3);
  std::vector<int32_t> position = whole;
  position[2] = -1;
  for (const AttentionTrial& trial : {kMeasured, kCandidate}) {
    scenario.step().position = whole.data();
    const std::vector<float> expected = AttendOnDevice(scenario, {.trial = trial});
    scenario.step().position = position.data();
    const std::vector<float> got = AttendOnDevice(scenario, {.trial = trial});
    const int64_t width = 16 * kHeadDim;
    EXPECT_TRUE(std::equal(got.begin(), got.begin() + 2 * width, expected.begin()));
    for (int64_t i = 2 * width; i < 3 * width; ++i) ASSERT_TRUE(std::isnan(got[i]));
  }
}

}  // namespace
}  // namespace fathom::ops
