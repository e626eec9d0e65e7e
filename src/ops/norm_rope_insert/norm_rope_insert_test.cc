#include "ops/norm_rope_insert/norm_rope_insert.h"

#include <cmath>
#include <cstring>

#include "ops/norm_rope_insert/rope.h"
#include "ops/quantise/quantise.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

TEST(Rope, YarnKeepsTheFirstFifteenPairsAndDividesTheLastBySixteen) {
  const RopeFrequencies plain = PlainRope(160000);
  const RopeFrequencies yarn = YarnRope(160000, {});
  for (int i = 0; i <= 15; ++i) EXPECT_EQ(yarn.f[i], plain.f[i]) << i;
  for (int i = 25; i < kRopePairs; ++i) EXPECT_FLOAT_EQ(yarn.f[i], plain.f[i] / 16) << i;
  for (int i = 16; i < 25; ++i) {
    EXPECT_LT(yarn.f[i], plain.f[i]);
    EXPECT_GT(yarn.f[i], plain.f[i] / 16);
  }
}

TEST(Rope, AngleIsRoundedToFloatBeforeTheCosine) {
  const RopeFrequencies plain = PlainRope(10000);
  float table[kRopeDim];
  RopeTableRow(plain, 1'048'575, table);
  for (int i = 0; i < kRopePairs; ++i) {
    const float angle = 1'048'575.0f * plain.f[i];
    EXPECT_NEAR(table[2 * i], std::cos(static_cast<double>(angle)), 1e-6);
    EXPECT_NEAR(table[2 * i + 1], std::sin(static_cast<double>(angle)), 1e-6);
  }
}

TEST(Rope, InverseUndoesTheRotation) {
  const auto x = RandomFloats(kRopeDim, 1);
  auto y = x;
  float table[kRopeDim];
  RopeTableRow(YarnRope(160000, {}), 777'777, table);
  RotateRow(y.data(), table, false);
  RotateRow(y.data(), table, true);
  for (int i = 0; i < kRopeDim; ++i) EXPECT_NEAR(y[i], x[i], 1e-5);
}

struct Case {
  int tokens, heads;
  RowFormat format;
  Numerics numerics;
};

struct Result {
  std::vector<float> q;
  std::vector<std::byte> rows;
};

template <class Fn>
Result RunInsert(const Case& c, Fn&& run) {
  const bool product = c.numerics == Numerics::kProduct;
  Result r;
  r.q = RandomFloats(int64_t{c.tokens} * c.heads * kHeadDim, 3, 2.0f, product);
  auto kv = RandomFloats(int64_t{c.tokens} * kHeadDim, 4, 5.0f, product);
  auto norm = RandomFloats(kHeadDim, 5, 1.0f, true);
  std::vector<float> rope(c.tokens * kRopeDim);
  for (int t = 0; t < c.tokens; ++t) {
    RopeTableRow(YarnRope(160000, {}), 1000 + t, rope.data() + t * kRopeDim);
  }
  r.rows.resize(int64_t{c.tokens} * kHeadDim * 4);
  NormRopeInsertArgs args;
  args.q = F32Matrix(r.q.data(), c.tokens, int64_t{c.heads} * kHeadDim);
  args.kv = F32Matrix(kv.data(), c.tokens, kHeadDim);
  args.kv_norm = norm.data();
  args.rope = rope.data();
  args.step_rows = {r.rows.data(), 0, c.tokens, kHeadDim, c.format};
  args.heads = c.heads;
  args.numerics = c.numerics;
  run(args);
  return r;
}

std::vector<float> Decoded(const Case& c, Result& r) {
  std::vector<float> out(int64_t{c.tokens} * kHeadDim);
  const PagedRows rows{r.rows.data(), 0, c.tokens, kHeadDim, c.format};
  for (int t = 0; t < c.tokens; ++t) {
    DecodeRow(c.format, kHeadDim, rows.data(0, t), rows.scale(0, t), out.data() + t * kHeadDim);
  }
  return out;
}

TEST(NormRopeInsert, CpuAgreesWithReference) {
  ThreadPool pool(2);
  ForEachIsa([&](Isa) {
    for (Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
      for (RowFormat format : {RowFormat::kF32, RowFormat::kBf16, RowFormat::kFp8Main}) {
        for (int tokens : {1, 3, 40}) {
          const Case c{tokens, 3, format, numerics};
          Result want = RunInsert(c, [](auto& args) { NormRopeInsertReference(args); });
          Result got = RunInsert(c, [&](auto& args) { NormRopeInsertCpu(args, pool); });
          const double bound = numerics == Numerics::kProduct ? 1e-3 : 1e-6;
          EXPECT_LT(RelativeL2(got.q, want.q), bound);
          // A rounding at an e4m3 tie moves one value by a step: rare, so the norm stays small.
          EXPECT_LT(RelativeL2(Decoded(c, got), Decoded(c, want)),
                    format == RowFormat::kFp8Main ? 3e-3 : bound);
        }
      }
    }
  });
}

TEST(NormRopeInsert, Bf16AndFp8RowsHoldTheSameValues) {
  ThreadPool pool(2);
  ForEachIsa([&](Isa) {
    const Case bf16{20, 1, RowFormat::kBf16, Numerics::kProduct};
    const Case fp8{20, 1, RowFormat::kFp8Main, Numerics::kProduct};
    Result a = RunInsert(bf16, [&](auto& args) { NormRopeInsertCpu(args, pool); });
    Result b = RunInsert(fp8, [&](auto& args) { NormRopeInsertCpu(args, pool); });
    EXPECT_EQ(Decoded(bf16, a), Decoded(fp8, b));
  });
}

TEST(WindowCommit, KeepsTheLastWindowOfEverySequenceByPosition) {
  const int ring_rows = 130;  // two extra rows for speculation
  const int tokens = 300 + 5 + 1;
  std::vector<int32_t> position, sequence, start = {0, 300, 305, 306}, slot = {2, 0, 1};
  for (int t = 0; t < 300; ++t) position.push_back(50 + t), sequence.push_back(0);
  for (int t = 0; t < 5; ++t) position.push_back(1'048'570 + t), sequence.push_back(1);
  position.push_back(7), sequence.push_back(2);
  StepView step{.num_tokens = tokens,
                .num_sequences = 3,
                .position = position.data(),
                .sequence = sequence.data(),
                .query_start = start.data(),
                .slot = slot.data()};
  for (RowFormat format : {RowFormat::kF32, RowFormat::kFp8Main}) {
    const int64_t row_bytes = RowDataBytes(format, kHeadDim) + RowScaleBytes(format);
    std::vector<std::byte> from(tokens * row_bytes),
        ring(3 * ring_rows * row_bytes, std::byte{0xee});
    const PagedRows source{from.data(), 0, tokens, kHeadDim, format};
    const PagedRows rings{ring.data(), ring_rows * row_bytes, ring_rows, kHeadDim, format};
    for (int t = 0; t < tokens; ++t) {
      const auto row = RandomFloats(kHeadDim, t);
      EncodeRow(format, kHeadDim, row.data(), source.data(0, t), source.scale(0, t));
    }
    WindowCommitReference({.step = &step, .step_rows = source, .ring = rings});
    for (int s = 0; s < 3; ++s) {
      for (int t = std::max(start[s], start[s + 1] - kWindow); t < start[s + 1]; ++t) {
        const int row = position[t] % ring_rows;
        EXPECT_EQ(std::memcmp(rings.data(slot[s], row), source.data(0, t),
                              RowDataBytes(format, kHeadDim)),
                  0);
        EXPECT_EQ(std::memcmp(rings.scale(slot[s], row), source.scale(0, t), RowScaleBytes(format)),
                  0);
      }
    }
    EXPECT_EQ(*rings.data(1, 8), std::byte{0xee}) << "rows of other positions are not touched";
  }
}

TEST(RmsNorm, CpuAgreesWithReferenceForEveryWidth) {
  ThreadPool pool(2);
  ForEachIsa([&](Isa) {
    for (int64_t n : {128, 160, 256, 320}) {
      auto x = RandomFloats(7 * n, n, 10.0f, true);
      auto w = RandomFloats(n, 1, 1.0f, true);
      std::vector<float> want(7 * n), got(7 * n, NAN);
      RmsNormArgs args{F32Matrix(x.data(), 7, n), w.data(), F32Matrix(want.data(), 7, n)};
      RmsNormReference(args);
      args.y = F32Matrix(got.data(), 7, n);
      RmsNormCpu(args, pool);
      EXPECT_LT(RelativeL2(got, want), 1e-3);
    }
  });
}

}  // namespace
}  // namespace fathom::ops
