// What these prove: the inverse rotation equals RotateRow to the bit, each group multiplies its own
// heads (also when a panel straddles two groups), and a row's bits do not depend on its batch.
#include "ops/output_projection/output_projection.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "ops/linear/linear_testing.h"
#include "ops/norm_rope_insert/rope.h"
#include "ops/output_projection/rotate_kernels.h"

namespace fathom::ops {
namespace {

using testing::AvailableIsas;
using testing::IsaScope;
using testing::OwnedWeight;
using testing::PaddedMatrix;

std::vector<float> Table(int64_t rows) {
  const RopeFrequencies frequencies = PlainRope(10000);
  std::vector<float> table(rows * kRopeDim);
  for (int64_t t = 0; t < rows; ++t) {
    RopeTableRow(frequencies, 1000 + 37 * t, table.data() + t * kRopeDim);
  }
  return table;
}

OutputProjectionArgs Args(PaddedMatrix& o, const std::vector<float>& table, int heads, int groups,
                          const OwnedWeight& w, PaddedMatrix& y, Numerics numerics) {
  return {.o = o.view(),
          .rope = table.data(),
          .heads = heads,
          .groups = groups,
          .wo_a = &w.weight,
          .y = y.view(),
          .numerics = numerics};
}

TEST(OutputProjection, EveryIsaMatchesTheReference) {
  struct Case {
    int heads, groups;
    int64_t rank;
    WeightFormat format;
  };
  constexpr Case kCases[] = {{4, 2, 64, WeightFormat::kFp8Block128},
                             {2, 2, 24, WeightFormat::kFp8Block128},
                             {6, 3, 40, WeightFormat::kFp8Block128},
                             {4, 1, 33, WeightFormat::kBF16},
                             {4, 4, 5, WeightFormat::kFp8Block128}};
  ThreadPool pool(2);
  for (const Case& c : kCases) {
    const int64_t out = c.groups * c.rank;
    const int64_t depth = int64_t{kHeadDim} * c.heads / c.groups;
    const OwnedWeight w(c.format, out, depth, 4);
    for (const int64_t rows : {1, 2, 3, 7, 100}) {
      const std::vector<float> table = Table(rows);
      for (const auto numerics : {Numerics::kProduct, Numerics::kReference}) {
        PaddedMatrix input(rows, int64_t{kHeadDim} * c.heads, 8);
        input.Randomise(3, numerics == Numerics::kProduct);
        PaddedMatrix rotated = input;
        PaddedMatrix expected(rows, out, 0);
        OutputProjectionReference(Args(rotated, table, c.heads, c.groups, w, expected, numerics));
        for (const Isa isa : AvailableIsas()) {
          const IsaScope scope(isa);
          SCOPED_TRACE(std::string(IsaName(isa)) + " rows " + std::to_string(rows) + " rank " +
                       std::to_string(c.rank));
          PaddedMatrix o = input;
          PaddedMatrix y(rows, out, 3);
          OutputProjectionCpu(Args(o, table, c.heads, c.groups, w, y, numerics), pool);
          ASSERT_TRUE(y.PaddingUntouched());
          ASSERT_TRUE(o.PaddingUntouched());
          for (int64_t t = 0; t < rows; ++t) {
            for (int64_t i = 0; i < o.cols; ++i) {
              ASSERT_EQ(std::bit_cast<uint32_t>(o.view().f32_row(t)[i]),
                        std::bit_cast<uint32_t>(rotated.view().f32_row(t)[i]));
            }
            for (int64_t j = 0; j < out; ++j) {
              double magnitude = 0;
              const float* x = o.view().f32_row(t) + j / c.rank * depth;
              for (int64_t i = 0; i < depth; ++i) {
                magnitude += std::fabs(double{WeightAt(w.weight, j, i)} * x[i]);
              }
              const double want = expected.view().f32_row(t)[j];
              double bound = magnitude * 0x1p-24 * (64 + depth / 64.0);
              if (numerics == Numerics::kProduct) bound += std::fabs(want) * 0x1p-7;
              ASSERT_LE(std::fabs(y.view().f32_row(t)[j] - want), bound) << t << " " << j;
            }
          }
        }
      }
    }
  }
}

RC_GTEST_PROP(OutputProjection, ARowHasTheSameBitsInEveryBatchAndThreadCount, ()) {
  static const OwnedWeight w(WeightFormat::kFp8Block128, 2 * 48, 1024, 8);
  const int64_t rows = *rc::gen::inRange<int64_t>(1, 220);
  const int64_t row = *rc::gen::inRange<int64_t>(0, rows);
  const int threads = *rc::gen::inRange(1, 4);
  const std::vector<float> table = Table(rows);
  PaddedMatrix input(rows, 4 * kHeadDim, 0);
  input.Randomise(static_cast<uint32_t>(rows), true);
  ThreadPool many(threads);
  ThreadPool one(1);
  for (const Isa isa : AvailableIsas()) {
    if (isa == Isa::kScalar && rows > 40) continue;  // slow, and nothing in it depends on rows
    const IsaScope scope(isa);
    PaddedMatrix o = input;
    PaddedMatrix y(rows, 96, 0);
    OutputProjectionCpu(Args(o, table, 4, 2, w, y, Numerics::kProduct), many);
    PaddedMatrix o1(1, 4 * kHeadDim, 0);
    std::copy_n(input.view().f32_row(row), 4 * kHeadDim, o1.data.begin());
    const std::vector<float> table1(table.begin() + row * kRopeDim,
                                    table.begin() + (row + 1) * kRopeDim);
    PaddedMatrix y1(1, 96, 0);
    OutputProjectionCpu(Args(o1, table1, 4, 2, w, y1, Numerics::kProduct), one);
    for (int64_t i = 0; i < 96; ++i) {
      RC_ASSERT(std::bit_cast<uint32_t>(y1.data[i]) ==
                std::bit_cast<uint32_t>(y.view().f32_row(row)[i]));
    }
  }
}

}  // namespace
}  // namespace fathom::ops
