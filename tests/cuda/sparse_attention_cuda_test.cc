// SparseAttentionCuda against the reference, and its bits against every way to cut a step.
#include <initializer_list>
#include <tuple>

#include "device_memory.h"
#include "ops/sparse_attention/cuda.h"
#include "ops/sparse_attention/scenario.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

template <class T>
std::vector<T> CopyOf(const T* data, int64_t n) {
  return data == nullptr ? std::vector<T>() : std::vector<T>(data, data + n);
}

struct RunOptions {
  bool alias = false;        // out is q
  bool f32_queries = false;  // float32 activations whatever the numerics
  int blocks = 0;            // that share a token's ranges
};

constexpr int kBlocks[] = {0, 1, 2, 3, 5, 8, 9, 16, 20};

std::vector<float> AttendOnDevice(AttentionScenario& scenario, const RunOptions& options = {}) {
  SparseAttentionArgs args = scenario.args();
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
  const DeviceArray<std::byte> scratch(kSparseAttentionCudaScratchBytes);
  args.step = &step.view();
  if (args.selected != nullptr) {
    args.selected = selected.data();
    args.counts = counts.data();
  }
  args.sink = sink.data();
  args.q = q.view();
  args.out = options.alias ? q.view() : out.view();
  SparseAttentionCuda(args, scratch.data(), nullptr, options.blocks);
  return options.alias ? q.Download() : out.Download();
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
      ExpectMatchesReference({.sequences = {{1'048'570, 6}},
                              .compressed = Compressed::kHca,
                              .format = format,
                              .numerics = numerics});
    }
  }
}

// As many ranges as there can be, of equal and of different lengths, and blocks of padding heads
// alone.
TEST(SparseAttentionCuda, ManyRangesMatchReference) {
  FATHOM_NEEDS_DEVICE();
  // Tiles: 18, 25, 43, 53, 64, 80, 98.
  for (const int32_t position : {131'000, 190'000, 330'000, 413'000, 507'700, 639'000, 786'431}) {
    for (const int heads : {4, 8, 16, 17, 64, 128}) {
      for (const RowFormat format : {RowFormat::kFp8Main, RowFormat::kBf16}) {
        if (format == RowFormat::kBf16 && heads != 17) continue;
        if (heads == 128 && position != 413'000) continue;
        SCOPED_TRACE(testing::Message() << "position " << position << " heads " << heads
                                        << " format " << static_cast<int>(format));
        ExpectMatchesReference({.sequences = {{position, 2}, {40, 1}},
                                .heads = heads,
                                .compressed = Compressed::kHca,
                                .format = format});
      }
    }
  }
}

// However many blocks share a token's ranges, its bits are the same.
TEST(SparseAttentionCuda, BitsDependOnNoSharing) {
  FATHOM_NEEDS_DEVICE();
  const auto expect_same_bits = [](const ScenarioOptions& options) {
    AttentionScenario scenario(options);
    const std::vector<float> expected = AttendOnDevice(scenario, {.blocks = 1});
    for (const int blocks : kBlocks) {
      EXPECT_EQ(AttendOnDevice(scenario, {.blocks = blocks}), expected)
          << blocks << " blocks, first " << options.sequences[0].first << " tokens "
          << options.sequences[0].tokens << " heads " << options.heads << " compressed "
          << static_cast<int>(options.compressed) << " format " << static_cast<int>(options.format);
    }
  };
  uint64_t seed = 300;
  for (const Compressed compressed : {Compressed::kNone, Compressed::kCsa, Compressed::kHca}) {
    for (const RowFormat format : {RowFormat::kFp8Main, RowFormat::kBf16}) {
      for (const int heads : {4, 64, 128}) {
        expect_same_bits({.sequences = {{5'000, 1}, {70'000, 3}, {131'000, 1}, {9, 1}},
                          .heads = heads,
                          .compressed = compressed,
                          .top_k = 1024,
                          .format = format,
                          .seed = ++seed});
      }
      expect_same_bits({.sequences = {{700, 5}, {0, 9}, {2100, 40}, {127, 1}},
                        .heads = 17,
                        .compressed = compressed,
                        .format = format,
                        .seed = ++seed});
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

// All tokens of options.sequences[0] in one step, and cut into steps of `counts` tokens, each
// beside another sequence.
void ExpectSameBitsInChunks(ScenarioOptions options, std::initializer_list<int32_t> counts) {
  const ScenarioSequence all = options.sequences[0];
  AttentionScenario whole(options);
  const std::vector<float> expected = AttendOnDevice(whole);
  const int64_t width = int64_t{options.heads} * kHeadDim;
  int32_t begin = 0;
  for (const int32_t count : counts) {
    options.sequences = {{all.first + begin, count}, {300, 2}};
    AttentionScenario chunk(options);
    const std::vector<float> got = AttendOnDevice(chunk);
    EXPECT_TRUE(
        std::equal(got.begin(), got.begin() + count * width, expected.begin() + begin * width))
        << "tokens " << begin << " to " << begin + count;
    begin += count;
  }
  ASSERT_EQ(begin, all.tokens);
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
      ExpectSameBitsInChunks({.sequences = {{first, 150}},
                              .heads = 20,  // two groups, the second one short
                              .compressed = compressed,
                              .top_k = 600,
                              .numerics = numerics},
                             {1, 1, 3, 40, 5, 100});
    }
  }
}

TEST(SparseAttentionCuda, BitsOfManyRangesDependOnNoChunkOrBatch) {
  FATHOM_NEEDS_DEVICE();
  for (const RowFormat format : {RowFormat::kFp8Main, RowFormat::kBf16}) {
    // The second one passes from 15 to 16 ranges.
    for (const int32_t first : {20'300, 229'300, 1'048'000}) {
      SCOPED_TRACE(testing::Message()
                   << "first " << first << " format " << static_cast<int>(format));
      ExpectSameBitsInChunks({.sequences = {{first, 300}},
                              .heads = 20,
                              .compressed = Compressed::kHca,
                              .format = format},
                             {1, 2, 130, 40, 7, 120});
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
  EXPECT_LT(RelativeL2(AttendOnDevice(scenario), expected), Tolerance(Numerics::kProduct));
}

TEST(SparseAttentionCuda, AStoredNanIsNotHidden) {
  FATHOM_NEEDS_DEVICE();
  for (Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
    AttentionScenario scenario({.sequences = {{300, 2}}, .numerics = numerics});
    *scenario.args().step_rows.data(0, 1) = std::byte{0x7f};
    const std::vector<float> out = AttendOnDevice(scenario);
    EXPECT_FALSE(std::isnan(out[0]));  // sees the first token only
    EXPECT_TRUE(std::isnan(out[out.size() / 2]));
  }
}

// Every way through the kernels in little work: one range, several of one block, of two, one each;
// one group of heads and two.
TEST(SparseAttentionCuda, Small) {
  FATHOM_NEEDS_DEVICE();
  for (const RowFormat format : {RowFormat::kFp8Main, RowFormat::kBf16}) {
    for (const int heads : {4, 66}) {
      for (const int32_t first : {40, 20'000}) {
        const ScenarioOptions options = {.sequences = {{first, 2}},
                                         .heads = heads,
                                         .compressed = Compressed::kHca,
                                         .format = format};
        AttentionScenario scenario(options);
        const std::vector<float> expected = AttendReference(scenario);
        const std::vector<float> of_one = AttendOnDevice(scenario, {.blocks = 1});
        EXPECT_LT(RelativeL2(of_one, expected), Tolerance(options.numerics));
        for (const int blocks : {2, 3}) {
          EXPECT_EQ(AttendOnDevice(scenario, {.blocks = blocks}), of_one) << blocks;
        }
      }
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
  for (const int blocks : kBlocks) {
    scenario.step().position = whole.data();
    const std::vector<float> expected = AttendOnDevice(scenario, {.blocks = blocks});
    scenario.step().position = position.data();
    const std::vector<float> got = AttendOnDevice(scenario, {.blocks = blocks});
    const int64_t width = 16 * kHeadDim;
    EXPECT_TRUE(std::equal(got.begin(), got.begin() + 2 * width, expected.begin()));
    for (int64_t i = 2 * width; i < 3 * width; ++i) ASSERT_TRUE(std::isnan(got[i]));
  }
}

}  // namespace
}  // namespace fathom::ops
