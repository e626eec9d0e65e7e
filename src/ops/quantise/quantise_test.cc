#include "ops/quantise/quantise.h"

#include <cstring>

#include "ops/numerics.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

struct Row {
  std::vector<std::byte> data, scale;
  Row(RowFormat format, int channels)
      : data(RowDataBytes(format, channels)), scale(RowScaleBytes(format)) {}
};

TEST(Quantise, ActivationErrorIsBoundedByHalfAStepOfItsBlock) {
  for (int64_t channels : {128, 320, 96}) {
    auto x = RandomFloats(channels, channels, 3.0f);
    auto y = x;
    QuantiseActivationRow(y.data(), channels);
    for (int64_t i = 0; i < channels; ++i) {
      EXPECT_LE(std::fabs(y[i] - x[i]), std::fabs(x[i]) / 16 + 12.0f / 448 / 1024);
      EXPECT_EQ(y[i], RoundBf16(y[i])) << "quantised values are bf16 values";
    }
    auto again = y;
    QuantiseActivationRow(again.data(), channels);
    EXPECT_EQ(again, y) << "quantising twice changes nothing";
  }
}

TEST(Quantise, DecodingAnEncodedRowIsTheNamedRounding) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const float scale = std::pow(10.0f, static_cast<float>(seed % 7) - 4);
    const auto main = RandomFloats(kHeadDim, seed, scale, true);
    const auto index = RandomFloats(kIndexDim, seed + 99, scale, true);
    const auto check = [&](RowFormat format, const std::vector<float>& x, auto&& round) {
      Row row(format, static_cast<int>(x.size()));
      EncodeRow(format, static_cast<int>(x.size()), x.data(), row.data.data(), row.scale.data());
      std::vector<float> decoded(x.size());
      DecodeRow(format, static_cast<int>(x.size()), row.data.data(), row.scale.data(),
                decoded.data());
      auto want = x;
      round(want.data());
      EXPECT_EQ(decoded, want) << "format " << static_cast<int>(format) << " seed " << seed;
    };
    check(RowFormat::kF32, main, [](float*) {});
    check(RowFormat::kBf16, main, [](float*) {});
    check(RowFormat::kFp8Main, main, [](float* x) { RoundKvRow(x); });
    check(RowFormat::kFp8Index, index, [](float* x) { RoundFp8IndexRow(x); });
    check(RowFormat::kFp4Index, index, [](float* x) { RoundFp4Row(x); });
  }
}

TEST(Quantise, VectorEncodersWriteTheSameBytes) {
  ForEachIsa([](Isa) {
    for (uint64_t seed = 0; seed < 200; ++seed) {
      auto x = RandomFloats(kHeadDim, seed, std::pow(4.0f, static_cast<float>(seed % 13) - 8));
      if (seed % 5 == 0) std::fill_n(x.begin() + 64, 64, 0.0f);
      for (RowFormat format : {RowFormat::kFp8Main, RowFormat::kBf16, RowFormat::kF32}) {
        Row want(format, kHeadDim), got(format, kHeadDim);
        EncodeRow(format, kHeadDim, x.data(), want.data.data(), want.scale.data());
        EncodeRowCpu(format, kHeadDim, x.data(), got.data.data(), got.scale.data());
        EXPECT_EQ(got.data, want.data);
        EXPECT_EQ(got.scale, want.scale);
      }
    }
  });
}

TEST(Quantise, HadamardIsOrthogonalAndSylvesterOrdered) {
  const auto x = RandomFloats(kIndexDim, 5);
  auto y = x;
  HadamardRow(y.data(), false);
  for (int row = 0; row < kIndexDim; ++row) {
    double sum = 0;
    for (int column = 0; column < kIndexDim; ++column) {
      sum += (__builtin_popcount(row & column) & 1) ? -x[column] : x[column];
    }
    EXPECT_NEAR(y[row], sum / std::sqrt(128.0), 1e-5);
  }
  HadamardRow(y.data(), false);
  for (int i = 0; i < kIndexDim; ++i) EXPECT_NEAR(y[i], x[i], 1e-5);
}

TEST(Quantise, Fp4BlockOfZerosStaysZero) {
  std::vector<float> x(kIndexDim, 0.0f);
  RoundFp4Row(x.data());
  for (float v : x) EXPECT_EQ(v, 0.0f);
}

}  // namespace
}  // namespace fathom::ops
