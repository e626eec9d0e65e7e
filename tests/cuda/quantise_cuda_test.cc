// The row functions of ops/quantise/cuda.cuh give the bytes of quantise.h.
#include <cmath>
#include <cstring>

#include "cuda/device_memory.h"
#include "cuda/quantise_kernels.h"
#include "ops/quantise/quantise.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

// Rows of every magnitude: zeros, subnormal codes, ties and saturation included.
std::vector<float> Rows(int rows, int channels) {
  std::vector<float> x = RandomFloats(int64_t{rows} * channels, 7 + channels);
  for (int r = 0; r < rows; ++r) {
    float* row = x.data() + int64_t{r} * channels;
    const float scale = std::ldexp(1.0f, (r * 5) % 60 - 40);
    for (int i = 0; i < channels; ++i) row[i] *= scale;
    if (r % 7 == 3) std::fill(row, row + channels, 0.0f);
    if (r % 7 == 5) {  // multiples of a sixteenth: exact ties of both formats
      for (int i = 0; i < channels; ++i) row[i] = static_cast<float>((i * 37 + r) % 193 - 96) / 16;
    }
    if (r % 7 == 6) row[r % channels] = 3e4f;  // one outlier
  }
  return x;
}

void Round(RowRounding rounding, float* row) {
  switch (rounding) {
    case RowRounding::kNone: return;
    case RowRounding::kKv: RoundKvRow(row); return;
    case RowRounding::kHadamard: HadamardRow(row, true); return;
    case RowRounding::kHadamardUnrounded: HadamardRow(row, false); return;
    case RowRounding::kFp4: RoundFp4Row(row); return;
    case RowRounding::kFp8Block: RoundFp8IndexRow(row); return;
  }
}

void Check(RowFormat format, int channels, RowRounding rounding, int count = 257) {
  const int64_t bytes = count * (RowDataBytes(format, channels) + RowScaleBytes(format));
  std::vector<float> x = Rows(count, channels);
  const DeviceArray<float> in(x);
  DeviceArray<std::byte> page(bytes);
  DeviceArray<float> decoded(int64_t{count} * channels), single(int64_t{count} * channels);
  RoundEncodeDecode(rounding, {page.data(), bytes, count, channels, format}, count, in.data(),
                    decoded.data(), single.data(), nullptr);

  std::vector<std::byte> want(bytes, std::byte{0xff});
  std::vector<float> values(x.size());
  const PagedRows rows{want.data(), bytes, count, channels, format};
  for (int r = 0; r < count; ++r) {
    float* row = x.data() + int64_t{r} * channels;
    Round(rounding, row);
    EncodeRow(format, channels, row, rows.data(0, r), rows.scale(0, r));
    DecodeRow(format, channels, rows.data(0, r), rows.scale(0, r),
              values.data() + int64_t{r} * channels);
  }
  EXPECT_TRUE(page.Download() == want) << "encoded bytes";
  EXPECT_EQ(decoded.Download(), values);
  EXPECT_EQ(single.Download(), values);
}

TEST(QuantiseCuda, EveryRowFormatIsByteEqualWithTheReference) {
  FATHOM_NEEDS_DEVICE();
  for (RowFormat format : {RowFormat::kF32, RowFormat::kBf16, RowFormat::kFp8Main}) {
    SCOPED_TRACE(static_cast<int>(format));
    Check(format, kHeadDim, RowRounding::kNone);
  }
  for (RowFormat format :
       {RowFormat::kF32, RowFormat::kBf16, RowFormat::kFp8Index, RowFormat::kFp4Index}) {
    SCOPED_TRACE(static_cast<int>(format));
    Check(format, kIndexDim, RowRounding::kNone);
  }
}

TEST(QuantiseCuda, EveryRoundingIsBitEqualWithTheReference) {
  FATHOM_NEEDS_DEVICE();
  Check(RowFormat::kF32, kHeadDim, RowRounding::kKv);
  for (RowRounding rounding : {RowRounding::kHadamard, RowRounding::kHadamardUnrounded,
                               RowRounding::kFp4, RowRounding::kFp8Block}) {
    SCOPED_TRACE(static_cast<int>(rounding));
    Check(RowFormat::kF32, kIndexDim, rounding);
  }
}

TEST(QuantiseCuda, SmallRows) {
  FATHOM_NEEDS_DEVICE();
  Check(RowFormat::kFp8Main, kHeadDim, RowRounding::kKv, 5);
  Check(RowFormat::kFp4Index, kIndexDim, RowRounding::kHadamard, 5);
  Check(RowFormat::kFp8Index, kIndexDim, RowRounding::kFp8Block, 5);
}

}  // namespace
}  // namespace fathom::ops
