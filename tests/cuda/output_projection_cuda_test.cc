// What these prove: the inverse rotation equals RotateRow to the bit, each group multiplies its own
// heads, and a row's bits do not depend on its batch.
#include <cmath>
#include <initializer_list>
#include <string>

#include "cuda/linear_device.h"
#include "ops/norm_rope_insert/rope.h"
#include "ops/output_projection/cuda.h"
#include "ops/output_projection/output_projection.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

using testing::OwnedWeight;
using testing::PaddedMatrix;

std::vector<float> Table(int64_t first, int64_t rows) {
  const RopeFrequencies frequencies = PlainRope(10000);
  std::vector<float> table(rows * kRopeDim);
  for (int64_t t = 0; t < rows; ++t) {
    RopeTableRow(frequencies, 1000 + 37 * (first + t), table.data() + t * kRopeDim);
  }
  return table;
}

struct Shape {
  int heads, groups;
  int64_t rank;
};

struct Result {
  PaddedMatrix o, y;
};

Result RunCuda(const Shape& shape, const LinearWeight& weight, const PaddedMatrix& input,
               const std::vector<float>& table, Numerics numerics, int64_t padding, CudaWay way) {
  const DType type = DeviceActivationType(numerics);
  const GuardedMatrix o(input, input.cols + padding, type);
  const GuardedMatrix y(input.rows, weight.out, weight.out + padding, type);
  const DeviceArray<float> rope(table);
  const OutputProjectionArgs args{.o = o.view(),
                                  .rope = rope.data(),
                                  .heads = shape.heads,
                                  .groups = shape.groups,
                                  .wo_a = &weight,
                                  .y = y.view(),
                                  .numerics = numerics};
  DeviceArray<uint8_t> scratch(OutputProjectionCudaScratchBytes(args, input.rows));
  OutputProjectionCuda(args, scratch.data(), nullptr, way);
  return {o.Download(), y.Download()};
}

void ExpectMatchesReference(const Shape& shape, const OwnedWeight& owned,
                            const LinearWeight& device, int64_t rows, Numerics numerics,
                            std::initializer_list<int64_t> paddings) {
  const int64_t out = shape.groups * shape.rank;
  const int64_t depth = int64_t{kHeadDim} * shape.heads / shape.groups;
  const std::vector<float> table = Table(0, rows);
  PaddedMatrix input(rows, int64_t{kHeadDim} * shape.heads, 0);
  input.Randomise(3, numerics == Numerics::kProduct);
  PaddedMatrix rotated = input;
  PaddedMatrix expected(rows, out, 0);
  ForRowSlices(rows, [&](int64_t first, int64_t count) {
    OutputProjectionReference({.o = RowsOf(rotated.view(), first, count),
                               .rope = table.data() + first * kRopeDim,
                               .heads = shape.heads,
                               .groups = shape.groups,
                               .wo_a = &owned.weight,
                               .y = RowsOf(expected.view(), first, count),
                               .numerics = numerics});
  });
  for (const int64_t padding : paddings) {
    SCOPED_TRACE("rows " + std::to_string(rows) + " rank " + std::to_string(shape.rank) +
                 " padding " + std::to_string(padding) +
                 (numerics == Numerics::kProduct ? " product" : ""));
    // Both ways of many rows.
    const CudaWay way = padding == 3 ? CudaWay::kStream : CudaWay::kTiles;
    const Result got = RunCuda(shape, device, input, table, numerics, padding, way);
    ASSERT_TRUE(SameBits(got.o, rotated));
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t j = 0; j < out; ++j) {
        double magnitude = 0;
        const float* x = rotated.view().f32_row(t) + j / shape.rank * depth;
        for (int64_t i = 0; i < depth; ++i) {
          magnitude += std::fabs(double{WeightAt(owned.weight, j, i)} * x[i]);
        }
        const double want = expected.view().f32_row(t)[j];
        double bound = magnitude * 0x1p-24 * (64 + depth / 64.0);
        if (numerics == Numerics::kProduct) bound += std::fabs(want) * 0x1p-7;
        ASSERT_LE(std::fabs(got.y.data[t * out + j] - want), bound) << t << " " << j;
      }
    }
    EXPECT_LE(RelativeL2(got.y.data, expected.data), numerics == Numerics::kProduct ? 3e-3 : 1e-5);
  }
}

struct Case {
  Shape shape;
  WeightFormat format;

  OwnedWeight Weight() const {
    return {format, shape.groups * shape.rank, int64_t{kHeadDim} * shape.heads / shape.groups, 4};
  }
};

TEST(OutputProjectionCuda, MatchesTheReference) {
  FATHOM_NEEDS_DEVICE();
  constexpr Case kCases[] = {
      {{4, 2, 64}, WeightFormat::kFp8Block128}, {{2, 2, 24}, WeightFormat::kFp8Block128},
      {{6, 3, 40}, WeightFormat::kFp8Block128}, {{8, 4, 96}, WeightFormat::kFp8Block128},
      {{4, 1, 33}, WeightFormat::kBF16},        {{4, 4, 5}, WeightFormat::kFp8Block128}};
  for (const Case& c : kCases) {
    const OwnedWeight owned = c.Weight();
    const LinearWeight device = OnDevice(owned.weight);
    for (const int64_t rows : {1, 2, 3, 7, 8, 9, 16, 127, 129}) {
      for (const auto numerics : {Numerics::kProduct, Numerics::kReference}) {
        ExpectMatchesReference(c.shape, owned, device, rows, numerics, {0, 3, 8});
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Every kernel with little work: one, two and four tiles of rows streamed, tiles of 64 and of 128.
TEST(OutputProjectionCuda, SmallProjectionsOfEveryKernel) {
  FATHOM_NEEDS_DEVICE();
  for (const Case& c :
       {Case{{4, 2, 24}, WeightFormat::kFp8Block128}, Case{{2, 1, 24}, WeightFormat::kBF16}}) {
    const OwnedWeight owned = c.Weight();
    const LinearWeight device = OnDevice(owned.weight);
    for (const int64_t rows : {1, 9, 17, 40, 70}) {
      ExpectMatchesReference(c.shape, owned, device, rows, Numerics::kProduct, {8});
      if (HasFatalFailure()) return;
    }
    ExpectMatchesReference(c.shape, owned, device, 3, Numerics::kReference, {0});
  }
}

TEST(OutputProjectionCuda, ARowHasTheSameBitsInEveryBatch) {
  FATHOM_NEEDS_DEVICE();
  const Shape shape{8, 2, 72};
  const OwnedWeight owned(WeightFormat::kFp8Block128, 2 * 72, 2048, 8);
  const LinearWeight device = OnDevice(owned.weight);
  for (const auto numerics : {Numerics::kProduct, Numerics::kReference}) {
    PaddedMatrix input(300, 8 * kHeadDim, 0);
    input.Randomise(5, true);
    const Result all = RunCuda(shape, device, input, Table(0, 300), numerics, 0, CudaWay::kTiles);
    for (const int64_t rows : {1, 2, 3, 8, 9, 64, 65, 130}) {
      for (const int64_t first : {int64_t{0}, 150 - rows / 2, 300 - rows}) {
        const CudaWay way = first == 0 ? CudaWay::kTiles : CudaWay::kStream;
        const Result part =
            RunCuda(shape, device, Slice(input, first, rows), Table(first, rows), numerics, 8, way);
        ASSERT_TRUE(SameBits(part.y, Slice(all.y, first, rows))) << first << " + " << rows;
        ASSERT_TRUE(SameBits(part.o, Slice(all.o, first, rows))) << first << " + " << rows;
      }
    }
  }
}

}  // namespace
}  // namespace fathom::ops
