// CompressorCuda against the reference, and against itself for every way to cut a prompt.
#include <array>
#include <cstring>
#include <random>

#include "device_memory.h"
#include "ops/compressor/cuda.h"
#include "ops/compressor/scenario.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

using Chunks = std::vector<CompressorChunk>;

template <class T>
std::vector<T> CopyOf(const T* data, int64_t n) {
  return std::vector<T>(data, data + n);
}

// Runs one step on the device; state and pages come back into the scenario.
void StepOnDevice(CompressorScenario& scenario, const Chunks& chunks) {
  scenario.Prepare(chunks);
  CompressorArgs args = scenario.Args();
  const DeviceStep step(*args.step);
  const DeviceArray<float> c(CopyOf(args.c.f32(), args.c.rows * args.c.cols));
  const DeviceArray<float> g(CopyOf(args.g.f32(), args.g.rows * args.g.cols));
  const DeviceArray<float> ape(CopyOf(args.ape, args.ratio * args.c.cols));
  const DeviceArray<float> norm(CopyOf(args.norm, args.channels));
  const DeviceArray<uint8_t> state(scenario.state());
  const DeviceArray<std::byte> pages(scenario.pages());
  args.step = &step.view();
  args.c.data = c.data();
  args.g.data = g.data();
  args.ape = ape.data();
  args.norm = norm.data();
  args.state = reinterpret_cast<float*>(state.data());
  args.rows.base = pages.data();
  CompressorCuda(args, nullptr);
  scenario.Adopt(state.Download(), pages.Download());
}

std::vector<CompressorOptions> Instances() {
  std::vector<CompressorOptions> all;
  for (Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
    for (int ratio : {4, 128}) {
      for (RowFormat format : {RowFormat::kFp8Main, RowFormat::kBf16, RowFormat::kF32}) {
        all.push_back({.ratio = ratio, .format = format, .numerics = numerics});
      }
    }
    for (RowFormat format :
         {RowFormat::kFp4Index, RowFormat::kFp8Index, RowFormat::kBf16, RowFormat::kF32}) {
      all.push_back({.channels = kIndexDim, .format = format, .numerics = numerics});
    }
  }
  return all;
}

std::string NameOf(const CompressorOptions& o) {
  return "ratio " + std::to_string(o.ratio) + " channels " + std::to_string(o.channels) +
         " format " + std::to_string(static_cast<int>(o.format)) + " numerics " +
         std::to_string(static_cast<int>(o.numerics));
}

// How far two roundings of nearly the same number may lie apart, as a share of the row's norm.
double Tolerance(const CompressorOptions& options) {
  switch (options.format) {
    case RowFormat::kF32: return options.numerics == Numerics::kReference ? 4e-6 : 2e-3;
    case RowFormat::kBf16: return 2e-3;
    case RowFormat::kFp8Main:
    case RowFormat::kFp8Index: return 1e-2;
    case RowFormat::kFp4Index: return 8e-2;
  }
  return 0;
}

// Three sequences go through the steps; `tokens` are theirs in the end.
void ExpectMatchesReference(CompressorOptions options, const std::vector<Chunks>& steps,
                            std::array<int32_t, 3> tokens) {
  SCOPED_TRACE(NameOf(options));
  options.sequences = 3;
  CompressorScenario expected(options), got(options);
  for (const Chunks& step : steps) {
    expected.Step(step, nullptr);
    StepOnDevice(got, step);
  }
  for (int s = 0; s < 3; ++s) {
    for (int32_t row = 0; row < tokens[s] / options.ratio; ++row) {
      ASSERT_LT(RelativeL2(got.Row(s, row), expected.Row(s, row)), Tolerance(options))
          << "sequence " << s << " row " << row;
    }
    const std::vector<float> state = got.StateFloats(s), wanted = expected.StateFloats(s);
    if (options.ratio == 4) {
      EXPECT_EQ(0, std::memcmp(state.data(), wanted.data(), state.size() * sizeof(float)));
    } else {
      EXPECT_LT(RelativeL2(state, wanted), 3e-6);
    }
  }
  // What the reference left alone, which 64 bytes of 0xff show, is left alone.
  const std::vector<std::byte> untouched(64, std::byte{0xff});
  for (size_t i = 0; i + 64 <= got.pages().size(); i += 64) {
    const auto same = [&](const std::vector<std::byte>& pages) {
      return std::equal(untouched.begin(), untouched.end(), pages.begin() + i);
    };
    ASSERT_EQ(same(got.pages()), same(expected.pages())) << "byte " << i;
  }
}

TEST(CompressorCuda, MatchesReferenceInEveryInstanceFormatAndStep) {
  FATHOM_NEEDS_DEVICE();
  for (const CompressorOptions& options : Instances()) {
    ExpectMatchesReference(options,
                           {{{0, 0, 1}, {2, 0, 3}},
                            {{2, 3, 1}, {0, 1, 2}, {1, 0, 127}},
                            {{0, 3, 1}, {1, 127, 1}, {2, 4, 129}},
                            {{1, 128, 500}, {0, 4, 4}},
                            {{0, 8, 120}, {1, 628, 7}, {2, 133, 128}}},
                           {128, 635, 261});
    if (HasFatalFailure()) return;
  }
}

TEST(CompressorCuda, SmallStepsOfEveryKernel) {
  FATHOM_NEEDS_DEVICE();
  for (const CompressorOptions& options :
       {CompressorOptions{.ratio = 4, .format = RowFormat::kFp8Main},
        CompressorOptions{.channels = kIndexDim, .format = RowFormat::kFp4Index},
        CompressorOptions{.ratio = 128, .format = RowFormat::kBf16}}) {
    const int32_t first = options.ratio == 4 ? 7 : 127;
    ExpectMatchesReference(options,
                           {{{0, 0, first}, {1, 0, 1}, {2, 0, 3}}, {{0, first, 2}, {2, 3, 1}}},
                           {first + 2, 1, 4});
    if (HasFatalFailure()) return;
  }
}

// Rows, state and everything not to be written are the same bytes for every split into steps.
TEST(CompressorCuda, BytesDependOnNoChunkOrBatch) {
  FATHOM_NEEDS_DEVICE();
  std::mt19937 random(7);
  for (CompressorOptions options : Instances()) {
    for (int32_t origin : {0, 1'048'576 - 1024}) {
      SCOPED_TRACE(NameOf(options) + " origin " + std::to_string(origin));
      options.sequences = 2;
      options.origin = origin;
      const int32_t total[2] = {421, 133};
      CompressorScenario whole(options), split(options);
      StepOnDevice(whole, {{0, origin, total[0]}, {1, origin, total[1]}});
      int32_t done[2] = {0, 0};
      while (done[0] < total[0] || done[1] < total[1]) {
        Chunks step;
        for (int s : {1, 0}) {
          const int32_t most = done[s] < 24 ? 1 + static_cast<int32_t>(random() % 3) : 90;
          const int32_t count =
              std::min(total[s] - done[s], 1 + static_cast<int32_t>(random() % most));
          if (count > 0) step.push_back({s, origin + done[s], count});
          done[s] += count;
        }
        StepOnDevice(split, step);
      }
      EXPECT_EQ(split.pages(), whole.pages());
      EXPECT_EQ(split.state(), whole.state());
    }
  }
}

TEST(CompressorCuda, TokensOneByOneGiveTheBytesOfOneStep) {
  FATHOM_NEEDS_DEVICE();
  for (int ratio : {4, 128}) {
    CompressorScenario whole({.ratio = ratio}), single({.ratio = ratio});
    StepOnDevice(whole, {{0, 0, 259}});
    for (int32_t t = 0; t < 259; ++t) StepOnDevice(single, {{0, t, 1}});
    EXPECT_EQ(single.pages(), whole.pages());
    EXPECT_EQ(single.state(), whole.state());
  }
}

// The angle is rounded to float32 before cos and sin, also where it is large.
TEST(CompressorCuda, LastPositionsOfAMillionMatchReference) {
  FATHOM_NEEDS_DEVICE();
  const int32_t origin = 1'048'576 - 512;
  for (CompressorOptions options : Instances()) {
    SCOPED_TRACE(NameOf(options));
    options.origin = origin;
    options.max_tokens = 512;
    CompressorScenario expected(options), got(options);
    expected.Step({{0, origin, 512}}, nullptr);
    StepOnDevice(got, {{0, origin, 512}});
    // Row 0 of the first group reads the previous group from a state that never was.
    const int32_t first = origin / options.ratio + (options.ratio == 4 ? 1 : 0);
    for (int32_t row = first; row < 1'048'576 / options.ratio; ++row) {
      ASSERT_LT(RelativeL2(got.Row(0, row), expected.Row(0, row)), Tolerance(options)) << row;
    }
  }
}

// A slot that another sequence used holds finite numbers, not NaN: the rows must not notice.
TEST(CompressorCuda, AReusedSlotLeaksNothing) {
  FATHOM_NEEDS_DEVICE();
  for (int ratio : {4, 128}) {
    for (int32_t before : {1, 3, 130}) {
      CompressorScenario fresh({.ratio = ratio}), reused({.ratio = ratio});
      StepOnDevice(reused, {{0, 0, before}});
      for (CompressorScenario* scenario : {&fresh, &reused}) {
        StepOnDevice(*scenario, {{0, 0, 2}});
        StepOnDevice(*scenario, {{0, 2, 400}});
      }
      for (int32_t row = 0; row < 402 / ratio; ++row) {
        EXPECT_EQ(reused.RowBytes(0, row), fresh.RowBytes(0, row));
      }
    }
  }
}

}  // namespace
}  // namespace fathom::ops
