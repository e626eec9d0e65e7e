#include "ops/compressor/compressor.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cstring>

#include "ops/compressor/kernels.h"
#include "ops/compressor/scenario.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

// The instances of the model, in each storage format that may hold them.
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
    case RowFormat::kF32: return options.numerics == Numerics::kReference ? 3e-6 : 2e-3;
    case RowFormat::kBf16: return 2e-3;
    case RowFormat::kFp8Main:
    case RowFormat::kFp8Index: return 1e-2;
    case RowFormat::kFp4Index: return 8e-2;
  }
  return 0;
}

TEST(Compressor, CpuMatchesReferenceInEveryInstanceFormatAndStep) {
  ThreadPool pool(3);
  for (CompressorOptions options : Instances()) {
    SCOPED_TRACE(NameOf(options));
    options.sequences = 3;
    ForEachIsa([&](Isa) {
      CompressorScenario expected(options), got(options);
      const std::vector<std::vector<CompressorChunk>> steps = {
          {{0, 0, 1}, {2, 0, 3}},
          {{2, 3, 1}, {0, 1, 2}, {1, 0, 127}},
          {{0, 3, 1}, {1, 127, 1}, {2, 4, 129}},
          {{1, 128, 500}, {0, 4, 4}},
          {{0, 8, 120}, {1, 628, 7}, {2, 133, 128}},
      };
      for (const auto& step : steps) {
        expected.Step(step, nullptr);
        got.Step(step, &pool);
      }
      const int32_t tokens[] = {128, 635, 261};
      for (int s = 0; s < 3; ++s) {
        for (int32_t row = 0; row < tokens[s] / options.ratio; ++row) {
          ASSERT_LT(RelativeL2(got.Row(s, row), expected.Row(s, row)), Tolerance(options))
              << "sequence " << s << " row " << row;
        }
        if (options.ratio == 4) {
          EXPECT_EQ(0, std::memcmp(got.StateFloats(s).data(), expected.StateFloats(s).data(),
                                   got.StateFloats(s).size() * sizeof(float)));
        } else {
          EXPECT_LT(RelativeL2(got.StateFloats(s), expected.StateFloats(s)), 1e-6);
        }
      }
    });
  }
}

// Rows, state and everything not to be written are the same bytes for every split into steps.
RC_GTEST_PROP(CompressorProperty, BytesDependOnNoChunkBatchOrThreadCount, ()) {
  CompressorOptions options = *rc::gen::elementOf(Instances());
  options.sequences = 2;
  options.seed = *rc::gen::inRange<uint64_t>(1, 1000);
  options.origin = *rc::gen::element(0, 0, 1'048'576 - 1024);
  const Isa isa = *rc::gen::element(Isa::kScalar, Isa::kAvx2, Isa::kAvx512);
  if (!SetCpuIsa(isa)) return;
  ThreadPool one(1), four(4);
  const int32_t total[2] = {*rc::gen::inRange(1, 600), *rc::gen::inRange(1, 300)};
  const int32_t origin = options.origin;

  CompressorScenario whole(options), split(options), single(options);
  whole.Step({{0, origin, total[0]}, {1, origin, total[1]}}, &four);
  int32_t done[2] = {0, 0};
  while (done[0] < total[0] || done[1] < total[1]) {
    std::vector<CompressorChunk> step;
    for (int s : {1, 0}) {
      const int32_t left = total[s] - done[s];
      const int32_t most = *rc::gen::element(1, 5, 200);
      // inRange starts at its lower end while cases are small: 1, or the loop would not end.
      const int32_t count = std::min(left, *rc::gen::inRange(1, most + 1));
      if (count > 0) step.push_back({s, origin + done[s], count});
      done[s] += count;
    }
    if (!step.empty()) split.Step(step, *rc::gen::inRange(0, 2) == 0 ? &one : &four);
  }
  for (int s : {0, 1}) {
    for (int32_t t = 0; t < total[s]; ++t) single.Step({{s, origin + t, 1}}, &one);
  }
  SetCpuIsa(Isa::kAvx512) || SetCpuIsa(Isa::kAvx2);
  RC_ASSERT(split.pages() == whole.pages());
  RC_ASSERT(split.state() == whole.state());
  RC_ASSERT(single.pages() == whole.pages());
  RC_ASSERT(single.state() == whole.state());
}

TEST(Compressor, EveryInstructionSetGivesTheSameBytes) {
  ThreadPool pool(2);
  for (const CompressorOptions& options : Instances()) {
    SCOPED_TRACE(NameOf(options));
    CompressorScenario wide(options), narrow(options);
    if (!SetCpuIsa(Isa::kAvx512)) GTEST_SKIP() << "this CPU has no AVX-512";
    wide.Step({{0, 0, 401}}, &pool);
    SetCpuIsa(Isa::kAvx2);
    narrow.Step({{0, 0, 401}}, &pool);
    SetCpuIsa(Isa::kAvx512);
    EXPECT_EQ(wide.pages(), narrow.pages());
    EXPECT_EQ(wide.state(), narrow.state());
  }
}

// kv-cache.md 5: changing token t changes exactly rows t/4 and t/4 + 1 of ratio 4, and row t/128 of
// ratio 128.
TEST(Compressor, ATokenChangesExactlyTheRowsThatPoolIt) {
  ThreadPool pool(2);
  constexpr int32_t kTokens = 512;
  for (int ratio : {4, 128}) {
    const CompressorOptions options{.ratio = ratio};
    CompressorScenario base(options);
    base.Step({{0, 0, kTokens}}, &pool);
    for (int32_t t : {0, 1, 3, 4, 7, 126, 127, 128, 255, 256, 402, 507, 511}) {
      CompressorScenario changed(options);
      changed.Perturb(0, t);
      changed.Step({{0, 0, 200}}, &pool);
      changed.Step({{0, 200, kTokens - 200}}, &pool);
      for (int32_t row = 0; row < kTokens / ratio; ++row) {
        const bool pools = row == t / ratio || (ratio == 4 && row == t / 4 + 1);
        EXPECT_EQ(base.RowBytes(0, row) != changed.RowBytes(0, row), pools)
            << "ratio " << ratio << " token " << t << " row " << row;
      }
    }
  }
}

// model.md and kv-cache.md 4: a 13-token prompt completes c4 rows at tokens 3, 7 and 11 only.
TEST(Compressor, ThirteenTokensCompleteThreeRowsAndNoneAtRatio128) {
  ThreadPool pool(1);
  CompressorScenario csa({.ratio = 4}), hca({.ratio = 128});
  const std::vector<std::byte> untouched = csa.RowBytes(0, 3);
  int32_t rows = 0;
  for (int32_t t = 0; t < 13; ++t) {
    csa.Step({{0, t, 1}}, &pool);
    if (t == 3 || t == 7 || t == 11) ++rows;
    for (int32_t row = 0; row < 5; ++row) {
      EXPECT_EQ(csa.RowBytes(0, row) != untouched, row < rows) << "token " << t << " row " << row;
    }
  }
  const std::vector<std::byte> empty = hca.pages();
  hca.Step({{0, 0, 13}}, &pool);
  EXPECT_EQ(hca.pages(), empty);
}

// A slot that another sequence used holds finite numbers, not NaN: the rows must not notice.
TEST(Compressor, AReusedSlotLeaksNothing) {
  ThreadPool pool(1);
  for (int ratio : {4, 128}) {
    for (int32_t before : {1, 2, 3, 5, 130}) {
      CompressorScenario fresh({.ratio = ratio}), reused({.ratio = ratio});
      reused.Step({{0, 0, before}}, &pool);
      for (CompressorScenario* scenario : {&fresh, &reused}) {
        scenario->Step({{0, 0, 2}}, &pool);
        scenario->Step({{0, 2, 400}}, &pool);
      }
      for (int32_t row = 0; row < 402 / ratio; ++row) {
        EXPECT_EQ(reused.RowBytes(0, row), fresh.RowBytes(0, row));
      }
    }
  }
}

TEST(Compressor, RowsAreEncodedAsEncodeRowDoes) {
  ForEachIsa([&](Isa isa) {
    if (isa == Isa::kScalar) return;
    const CompressorKernels& kernels = isa == Isa::kAvx2 ? kCompressorAvx2 : kCompressorAvx512;
    std::vector<std::vector<float>> cases = {std::vector<float>(kIndexDim, 0.0f)};
    for (float scale : {1e-38f, 1e-6f, 0.3f, 1.0f, 1e5f, 1e30f}) {
      cases.push_back(RandomFloats(kIndexDim, 5, scale));
    }
    // Every tie and its neighbours, at a block scale of one.
    std::vector<float> ties(kIndexDim, 6.0f);
    int i = 0;
    for (float tie : {0.25f, 0.5f, 0.75f, 1.0f, 1.25f, 1.5f, 1.75f, 2.0f, 2.5f, 3.0f, 3.5f, 5.0f}) {
      for (float x : {std::nextafter(tie, 0.0f), tie, std::nextafter(tie, 9.0f)}) {
        ties[i++] = x, ties[i++] = -x;
        if (i % 32 == 30) i += 2;
      }
    }
    cases.push_back(ties);
    for (const std::vector<float>& x : cases) {
      std::byte data[64], scale[4], expected_data[64], expected_scale[4];
      EncodeRow(RowFormat::kFp4Index, kIndexDim, x.data(), expected_data, expected_scale);
      kernels.encode_fp4(x.data(), reinterpret_cast<uint8_t*>(data),
                         reinterpret_cast<uint8_t*>(scale));
      EXPECT_EQ(0, std::memcmp(data, expected_data, 64));
      EXPECT_EQ(0, std::memcmp(scale, expected_scale, 4));
    }
  });
}

// The angle is rounded to f32 before cos and sin (model.md 4.1); at the last positions of a million
// a vector reduction has to give what the scalar library gives.
TEST(Compressor, RotationAgreesWithTheTableUpToTheLastPosition) {
  ForEachIsa([&](Isa isa) {
    if (isa == Isa::kScalar) return;
    const CompressorKernels& kernels = isa == Isa::kAvx2 ? kCompressorAvx2 : kCompressorAvx512;
    const std::vector<float> ones(kHeadDim, 1.0f);
    for (const RopeFrequencies& rope : {PlainRope(10000), YarnRope(160000, {})}) {
      for (int32_t position :
           {0, 4, 128, 1000, 4096, 65'532, 262'144, 524'284, 999'936, 1'048'448, 1'048'572}) {
        std::vector<float> row = RandomFloats(kHeadDim, position + 1);
        std::vector<float> expected = row;
        double squares = 0;
        for (float x : expected) squares += double{x} * x;
        const double inverse = 1 / std::sqrt(squares / kHeadDim + kNormEps);
        for (float& x : expected) x = static_cast<float>(x * inverse);
        float table[kRopeDim];
        RopeTableRow(rope, position, table);
        RotateRow(&expected[kNopeDim], table, false);
        kernels.norm_rope(row.data(), kHeadDim, ones.data(), kNormEps, rope.f.data(),
                          static_cast<float>(position), false);
        for (int ch = 0; ch < kHeadDim; ++ch) {
          EXPECT_NEAR(row[ch], expected[ch], 2e-6) << "position " << position << " channel " << ch;
        }
      }
    }
  });
}

// A sequence that rebuilds its windows runs tokens whose rows are there: those rows stay what they
// are, those from emit_from on are written, and the state is as if it had written them all.
TEST(Compressor, RowsBelowEmitFromAreNotWritten) {
  ThreadPool pool(2);
  for (CompressorOptions options : Instances()) {
    SCOPED_TRACE(NameOf(options));
    options.sequences = 2;
    for (ThreadPool* threads : {static_cast<ThreadPool*>(nullptr), &pool}) {
      CompressorScenario all(options), some(options);
      all.Step({{0, 0, 700}, {1, 0, 300}}, threads);
      some.Step({{0, 0, 300, 512}, {1, 0, 100}}, threads);
      some.Step({{1, 100, 200}, {0, 300, 400, 512}}, threads);
      for (int32_t row = 0; row < 700 / options.ratio; ++row) {
        const bool written = (row + 1) * options.ratio > 512;
        const std::vector<std::byte> bytes = some.RowBytes(0, row);
        const std::vector<std::byte> untouched(bytes.size(), std::byte{0xff});
        EXPECT_EQ(bytes, written ? all.RowBytes(0, row) : untouched) << row;
      }
      for (int32_t row = 0; row < 300 / options.ratio; ++row) {
        EXPECT_EQ(some.RowBytes(1, row), all.RowBytes(1, row)) << row;
      }
      EXPECT_EQ(some.StateFloats(0), all.StateFloats(0));
    }
  }
}

}  // namespace
}  // namespace fathom::ops
