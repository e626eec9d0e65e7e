// What these prove: every instruction set computes W x of every weight format within the rounding
// of f32 sums, quantises activations to the same bytes as the scalar form, and gives a row the same
// bits whatever batch, block or thread it is computed in.
#include "ops/linear/linear.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/cpu_features.h"
#include "ops/linear/linear_testing.h"
#include "ops/linear/packed_weight.h"
#include "ops/quantise/quantise.h"

namespace fathom::ops {
namespace {

using testing::AvailableIsas;
using testing::ExpectClose;
using testing::IsaScope;
using testing::OwnedWeight;
using testing::PaddedMatrix;

constexpr WeightFormat kFormats[] = {WeightFormat::kF32, WeightFormat::kBF16,
                                     WeightFormat::kFp8Block128, WeightFormat::kFp4Block32};

LinearArgs Args(PaddedMatrix& x, const OwnedWeight& w, PaddedMatrix& y, Numerics numerics,
                bool round) {
  return {.x = x.view(),
          .weight = &w.weight,
          .y = y.view(),
          .numerics = numerics,
          .round_output = round};
}

TEST(Linear, EveryIsaFormatAndShapeMatchesTheReference) {
  struct Shape {
    int64_t out, in;
  };
  constexpr Shape kShapes[] = {{24, 320}, {777, 160}, {8, 256},   {32, 96},   {1, 128},
                               {64, 416}, {130, 64},  {97, 1056}, {256, 128}, {33, 32}};
  ThreadPool pool(2);
  for (const auto format : kFormats) {
    for (const auto& shape : kShapes) {
      const OwnedWeight w(format, shape.out, shape.in, 11);
      for (const int64_t rows : {1, 2, 3, 5, 7, 16, 127, 129}) {
        if (rows > 16 && shape.out > 200) continue;  // the reference is slow
        for (const auto numerics : {Numerics::kProduct, Numerics::kReference}) {
          PaddedMatrix x(rows, shape.in, 5);
          x.Randomise(rows, numerics == Numerics::kProduct);
          PaddedMatrix expected(rows, shape.out, 0);
          const bool round = rows % 2 == 1;
          LinearReference(Args(x, w, expected, numerics, round));
          for (const Isa isa : AvailableIsas()) {
            const IsaScope scope(isa);
            PaddedMatrix y(rows, shape.out, 3);
            LinearCpu(Args(x, w, y, numerics, round), pool);
            SCOPED_TRACE(std::string(IsaName(isa)) + " format " +
                         std::to_string(static_cast<int>(format)) + " " + std::to_string(rows) +
                         "x" + std::to_string(shape.out) + "x" + std::to_string(shape.in));
            ASSERT_TRUE(y.PaddingUntouched());
            ExpectClose(w.weight, x.view(), expected.view(), y.view(),
                        round && numerics == Numerics::kProduct);
          }
        }
      }
    }
  }
}

TEST(Linear, InputsThatAreNoMultipleOfFourAreLegalExceptForFp4) {
  ThreadPool pool(1);
  for (const auto format : {WeightFormat::kF32, WeightFormat::kBF16, WeightFormat::kFp8Block128}) {
    for (const int64_t in : {1, 2, 3, 5, 63, 127, 129, 257, 259}) {
      const OwnedWeight w(format, 40, in, 3);
      for (const int64_t rows : {1, 6, 17}) {
        PaddedMatrix x(rows, in, 1);
        x.Randomise(in, true);
        PaddedMatrix expected(rows, 40, 0);
        LinearReference(Args(x, w, expected, Numerics::kProduct, false));
        for (const Isa isa : AvailableIsas()) {
          const IsaScope scope(isa);
          PaddedMatrix y(rows, 40, 0);
          LinearCpu(Args(x, w, y, Numerics::kProduct, false), pool);
          ExpectClose(w.weight, x.view(), expected.view(), y.view(), false);
        }
      }
    }
  }
}

TEST(Linear, EveryStoredCodeIsExpandedExactly) {
  // One-hot inputs read the weights back one by one: all 256 e4m3 codes (subnormals, NaN), all 16
  // e2m1 codes, scales from 2^-127 up, denormal and huge bf16.
  ThreadPool pool(1);
  for (const auto format : kFormats) {
    OwnedWeight w(format, 48, 256, 5);
    if (format == WeightFormat::kFp8Block128) {
      for (size_t i = 0; i < w.data.size(); ++i) w.data[i] = static_cast<uint8_t>(i * 7);
      w.scale = {100, 140};
    }
    if (format == WeightFormat::kFp4Block32) {
      for (size_t i = 0; i < w.data.size(); ++i) w.data[i] = static_cast<uint8_t>(i * 7);
      for (size_t i = 0; i < w.scale.size(); ++i) w.scale[i] = static_cast<uint8_t>(i % 250);
    }
    w.Pack();
    for (const int64_t rows : {1, 4, 256}) {
      for (const Isa isa : AvailableIsas()) {
        const IsaScope scope(isa);
        for (int64_t base = 0; base < 256; base += rows) {
          PaddedMatrix x(rows, 256, 0);
          x.Fill(0.0f);
          for (int64_t t = 0; t < rows; ++t) x.view().f32_row(t)[base + t] = 1.0f;
          PaddedMatrix y(rows, 48, 0);
          LinearCpu(Args(x, w, y, Numerics::kReference, false), pool);
          for (int64_t t = 0; t < rows; ++t) {
            for (int64_t o = 0; o < 48; ++o) {
              const float expected = WeightAt(w.weight, o, base + t);
              const float got = y.view().f32_row(t)[o];
              bool sum_is_nan = false;  // 0 * NaN elsewhere in the row spoils the sum
              for (int64_t i = 0; i < 256; ++i) {
                sum_is_nan |= std::isnan(WeightAt(w.weight, o, i));
              }
              if (sum_is_nan) {
                ASSERT_TRUE(std::isnan(got));
              } else {
                ASSERT_EQ(got, expected) << IsaName(isa) << " row " << t << " output " << o;
              }
            }
          }
        }
      }
    }
  }
}

// Bits of y for the rows of x, computed in one call.
std::vector<float> Compute(const OwnedWeight& w, const std::vector<float>& x, int64_t rows,
                           Numerics numerics, ThreadPool& pool) {
  std::vector<float> y(rows * w.weight.out, std::numeric_limits<float>::quiet_NaN());
  LinearCpu({.x = F32Matrix(const_cast<float*>(x.data()), rows, w.weight.in),
             .weight = &w.weight,
             .y = F32Matrix(y.data(), rows, w.weight.out),
             .numerics = numerics,
             .round_output = false},
            pool);
  return y;
}

RC_GTEST_PROP(Linear, ARowHasTheSameBitsInEveryBatchAndThreadCount, ()) {
  const auto format = kFormats[*rc::gen::inRange(0, 4)];
  const int64_t in = 32 * *rc::gen::inRange<int64_t>(1, 24);
  const int64_t out = *rc::gen::inRange<int64_t>(1, 200);
  const int64_t rows = *rc::gen::inRange<int64_t>(1, 150);
  const int64_t first = *rc::gen::inRange<int64_t>(0, rows);
  const int64_t part = *rc::gen::inRange<int64_t>(1, rows - first + 1);
  const auto numerics = *rc::gen::arbitrary<bool>() ? Numerics::kProduct : Numerics::kReference;
  const int threads = *rc::gen::inRange(1, 4);
  const OwnedWeight w(format, out, in, static_cast<uint32_t>(out));
  PaddedMatrix x(rows, in, 0);
  x.Randomise(static_cast<uint32_t>(rows), numerics == Numerics::kProduct);
  ThreadPool one(1);
  ThreadPool many(threads);
  for (const Isa isa : AvailableIsas()) {
    const IsaScope scope(isa);
    const std::vector<float> whole = Compute(w, x.data, rows, numerics, many);
    const std::vector<float> slice(x.data.begin() + first * in,
                                   x.data.begin() + (first + part) * in);
    const std::vector<float> alone = Compute(w, slice, part, numerics, one);
    for (size_t i = 0; i < alone.size(); ++i) {
      RC_ASSERT(std::bit_cast<uint32_t>(alone[i]) ==
                std::bit_cast<uint32_t>(whole[first * out + i]));
    }
  }
}

RC_GTEST_PROP(Linear, TheTwoVectorSetsAgreeToTheBit, ()) {
  const auto format = kFormats[*rc::gen::inRange(0, 4)];
  const int64_t in = 32 * *rc::gen::inRange<int64_t>(1, 24);
  const int64_t out = *rc::gen::inRange<int64_t>(1, 100);
  const int64_t rows = *rc::gen::inRange<int64_t>(1, 40);
  const OwnedWeight w(format, out, in, static_cast<uint32_t>(in));
  PaddedMatrix x(rows, in, 0);
  x.Randomise(static_cast<uint32_t>(rows), true);
  ThreadPool pool(1);
  std::vector<std::vector<float>> results;
  for (const Isa isa : AvailableIsas()) {
    if (isa == Isa::kScalar) continue;
    const IsaScope scope(isa);
    results.push_back(Compute(w, x.data, rows, Numerics::kProduct, pool));
  }
  for (const auto& result : results) RC_ASSERT(result == results.front());
}

RC_GTEST_PROP(Linear, RowsAreQuantisedAsQuantiseActivationRowDoes, ()) {
  const int64_t channels = *rc::gen::inRange<int64_t>(1, 600);
  const int exponent = *rc::gen::inRange(-140, 120);
  const uint32_t seed = *rc::gen::arbitrary<uint32_t>();
  std::mt19937 rng(seed);
  std::vector<float> x(channels);
  for (float& v : x) {
    // Spread over many binades, so that normal, subnormal and zero codes all occur.
    const int spread = static_cast<int>(rng() % 24);
    v = std::ldexp(static_cast<float>(static_cast<int32_t>(rng())) * 0x1p-31f, exponent - spread);
    if (rng() % 16 == 0) v = 0;
    if (rng() % 16 == 0) v = std::ldexp(static_cast<float>(rng() % 64), exponent - 9);  // ties
  }
  std::vector<float> expected = x;
  QuantiseActivationRow(expected.data(), channels);
  const int64_t padded = (channels + 3) / 4 * 4;
  for (const Isa isa : AvailableIsas()) {
    const IsaScope scope(isa);
    std::vector<float> got(padded, std::numeric_limits<float>::quiet_NaN());
    CurrentLinearKernels().quantise(x.data(), channels, padded, got.data());
    for (int64_t i = 0; i < padded; ++i) {
      const float want = i < channels ? expected[i] : 0.0f;
      RC_ASSERT(std::bit_cast<uint32_t>(got[i]) == std::bit_cast<uint32_t>(want));
    }
  }
}

RC_GTEST_PROP(Linear, RowsAreRoundedToBf16AsTheScalarFormDoes, (uint32_t seed)) {
  std::mt19937 rng(seed);
  const int64_t channels = 1 + rng() % 100;
  const int64_t padded = (channels + 3) / 4 * 4;
  std::vector<float> x(channels);
  for (float& v : x) v = std::bit_cast<float>(static_cast<uint32_t>(rng()));
  for (const Isa isa : AvailableIsas()) {
    const IsaScope scope(isa);
    std::vector<float> got(padded, 1.0f);
    CurrentLinearKernels().round(x.data(), channels, padded, got.data());
    for (int64_t i = 0; i < padded; ++i) {
      const float want = i < channels ? RoundBf16(x[i]) : 0.0f;
      if (std::isnan(want)) {
        RC_ASSERT(std::isnan(got[i]));
      } else {
        RC_ASSERT(std::bit_cast<uint32_t>(got[i]) == std::bit_cast<uint32_t>(want));
      }
    }
  }
}

TEST(Linear, ZeroRowsGiveZeroAndHugeRowsStayFinite) {
  ThreadPool pool(1);
  for (const auto format : {WeightFormat::kFp8Block128, WeightFormat::kFp4Block32}) {
    const OwnedWeight w(format, 40, 256, 9);
    PaddedMatrix x(2, 256, 0);
    x.Fill(0.0f);
    for (int64_t i = 0; i < 256; ++i) x.view().f32_row(1)[i] = (i % 3 - 1) * 1e30f;
    PaddedMatrix expected(2, 40, 0);
    LinearReference(Args(x, w, expected, Numerics::kProduct, true));
    for (const Isa isa : AvailableIsas()) {
      const IsaScope scope(isa);
      PaddedMatrix y(2, 40, 0);
      LinearCpu(Args(x, w, y, Numerics::kProduct, true), pool);
      for (int64_t o = 0; o < 40; ++o) {
        EXPECT_EQ(y.view().f32_row(0)[o], 0.0f);
        EXPECT_TRUE(std::isfinite(y.view().f32_row(1)[o]));
      }
      ExpectClose(w.weight, x.view(), expected.view(), y.view(), true);
    }
  }
}

TEST(Linear, PackingKeepsStoredPrecision) {
  const OwnedWeight fp4(WeightFormat::kFp4Block32, 256, 256, 1);
  const auto& packed = Packed(fp4.weight);
  EXPECT_EQ(packed.panels * packed.panel_bytes, 256 * 256 / 2);
  EXPECT_EQ(packed.panels * packed.panel_scales, 256 * 256 / 32);
  const OwnedWeight fp8(WeightFormat::kFp8Block128, 256, 256, 1);
  EXPECT_EQ(Packed(fp8.weight).panels * Packed(fp8.weight).panel_bytes, 256 * 256);
}

}  // namespace
}  // namespace fathom::ops
