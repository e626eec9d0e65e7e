#include <cmath>
#include <cstring>

#include "cuda/device_memory.h"
#include "ops/norm_rope_insert/cuda.h"
#include "ops/quantise/quantise.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

TEST(RopeCuda, TablesAreExactAtEveryPosition) {
  FATHOM_NEEDS_DEVICE();
  std::vector<int32_t> position = {0, 1, 127, 65'535, 300'000, 777'777, 1'048'575};
  StepView host;
  host.num_tokens = static_cast<int32_t>(position.size());
  host.position = position.data();
  const DeviceStep step(host);
  for (const RopeFrequencies& rope : {PlainRope(10000), YarnRope(160000, {})}) {
    DeviceArray<float> table(host.num_tokens * kRopeDim);
    RopeTablesCuda(step.view(), rope, table.data(), nullptr);
    const std::vector<float> got = table.Download();
    for (int t = 0; t < host.num_tokens; ++t) {
      float want[kRopeDim];
      RopeTableRow(rope, position[t], want);
      for (int i = 0; i < kRopeDim; ++i) {
        EXPECT_NEAR(got[t * kRopeDim + i], want[i], 3e-7) << position[t] << " " << i;
      }
    }
  }
}

struct Case {
  int tokens, heads;
  RowFormat format;
  Numerics numerics;
};

struct Result {
  std::vector<float> q, rows;
};

std::vector<float> Decoded(const Case& c, std::vector<std::byte> bytes) {
  std::vector<float> out(int64_t{c.tokens} * kHeadDim);
  const PagedRows rows{bytes.data(), 0, c.tokens, kHeadDim, c.format};
  for (int t = 0; t < c.tokens; ++t) {
    DecodeRow(c.format, kHeadDim, rows.data(0, t), rows.scale(0, t), out.data() + t * kHeadDim);
  }
  return out;
}

void CheckInsert(const Case& c) {
  const bool product = c.numerics == Numerics::kProduct;
  const DType type = DeviceActivationType(c.numerics);
  auto q = RandomFloats(int64_t{c.tokens} * c.heads * kHeadDim, 3, 2.0f, product);
  auto kv = RandomFloats(int64_t{c.tokens} * kHeadDim, 4, 5.0f, product);
  auto norm = RandomFloats(kHeadDim, 5, 1.0f, true);
  std::vector<float> rope(c.tokens * kRopeDim);
  for (int t = 0; t < c.tokens; ++t) {
    RopeTableRow(YarnRope(160000, {}), 300'000 + t, rope.data() + t * kRopeDim);
  }
  const int64_t row_bytes = RowDataBytes(c.format, kHeadDim) + RowScaleBytes(c.format);
  const int64_t width = int64_t{c.heads} * kHeadDim;
  const DeviceMatrix device_q(q, c.tokens, width, type), device_kv(kv, c.tokens, kHeadDim, type);
  const DeviceArray<float> device_norm(norm), device_rope(rope);
  const DeviceArray<std::byte> device_rows(c.tokens * row_bytes);
  NormRopeInsertArgs args;
  args.heads = c.heads;
  args.numerics = c.numerics;
  args.q = device_q.view();
  args.kv = device_kv.view();
  args.kv_norm = device_norm.data();
  args.rope = device_rope.data();
  args.step_rows = {device_rows.data(), 0, c.tokens, kHeadDim, c.format};
  NormRopeInsertCuda(args, nullptr);
  const Result got = {device_q.Download(), Decoded(c, device_rows.Download())};

  std::vector<std::byte> rows(c.tokens * row_bytes);
  args.q = F32Matrix(q.data(), c.tokens, width);
  args.kv = F32Matrix(kv.data(), c.tokens, kHeadDim);
  args.kv_norm = norm.data();
  args.rope = rope.data();
  args.step_rows.base = rows.data();
  NormRopeInsertReference(args);
  const double bound = product ? 1e-3 : 1e-6;
  EXPECT_LT(RelativeL2(got.q, q), bound);
  // A rounding at an e4m3 tie moves one value by a step: rare, so the norm stays small.
  EXPECT_LT(RelativeL2(got.rows, Decoded(c, rows)), product && c.format != RowFormat::kF32 ? 3e-3
                                                    : c.format == RowFormat::kF32          ? bound
                                                                                           : 3e-3);
}

TEST(NormRopeInsertCuda, AgreesWithReference) {
  FATHOM_NEEDS_DEVICE();
  for (Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
    for (RowFormat format : {RowFormat::kF32, RowFormat::kBf16, RowFormat::kFp8Main}) {
      for (int tokens : {1, 3, 127, 129}) {
        for (int heads : {1, 4, 8, 64, 128}) {
          if (tokens * heads > 9000) continue;
          SCOPED_TRACE(std::to_string(tokens) + " tokens, " + std::to_string(heads) +
                       " heads, format " + std::to_string(static_cast<int>(format)));
          CheckInsert({tokens, heads, format, numerics});
        }
      }
    }
  }
}

TEST(WindowCommitCuda, GivesTheBytesOfTheReference) {
  FATHOM_NEEDS_DEVICE();
  const int ring_rows = 130;
  std::vector<int32_t> position, sequence, start = {0, 300, 305, 306}, slot = {2, 0, 1};
  for (int t = 0; t < 300; ++t) position.push_back(50 + t), sequence.push_back(0);
  for (int t = 0; t < 5; ++t) position.push_back(1'048'570 + t), sequence.push_back(1);
  position.push_back(7), sequence.push_back(2);
  const StepView host{.num_tokens = 306,
                      .num_sequences = 3,
                      .position = position.data(),
                      .sequence = sequence.data(),
                      .query_start = start.data(),
                      .slot = slot.data()};
  const DeviceStep step(host);
  for (RowFormat format : {RowFormat::kF32, RowFormat::kBf16, RowFormat::kFp8Main}) {
    const int64_t row_bytes = RowDataBytes(format, kHeadDim) + RowScaleBytes(format);
    std::vector<std::byte> from(306 * row_bytes);
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 131 + i / 509);
    std::vector<std::byte> ring(3 * ring_rows * row_bytes, std::byte{0xff});
    const DeviceArray<std::byte> device_from(from), device_ring(3 * ring_rows * row_bytes);
    const PagedRows source{from.data(), 0, 306, kHeadDim, format};
    const PagedRows rings{ring.data(), ring_rows * row_bytes, ring_rows, kHeadDim, format};
    WindowCommitReference({.step = &host, .step_rows = source, .ring = rings});
    PagedRows device_source = source, device_rings = rings;
    device_source.base = device_from.data();
    device_rings.base = device_ring.data();
    WindowCommitCuda({.step = &step.view(), .step_rows = device_source, .ring = device_rings},
                     nullptr);
    EXPECT_TRUE(device_ring.Download() == ring) << static_cast<int>(format);
  }
}

// The last two tokens are padding; their sequences hold slots of others.
TEST(NormRopeInsertCuda, CommitsTheBytesOfWindowCommit) {
  FATHOM_NEEDS_DEVICE();
  constexpr int kTokens = 7, kReal = 5, kSlots = 6, kRingRows = 130, kHeads = 3;
  std::vector<int32_t> position = {0, 7, 129, 130, 1'048'575, -1, -1};
  std::vector<int32_t> sequence = {0, 1, 2, 3, 4, 5, 6}, start = {0, 1, 2, 3, 4, 5, 6, 7};
  std::vector<int32_t> slot = {2, 0, 5, 1, 3, 0, 1};
  StepView host{.num_tokens = kTokens,
                .num_sequences = kTokens,
                .position = position.data(),
                .sequence = sequence.data(),
                .query_start = start.data(),
                .slot = slot.data()};
  const DeviceStep step(host);
  host.num_tokens = host.num_sequences = kReal;
  const DeviceStep real(host);
  const DeviceArray<float> norm(RandomFloats(kHeadDim, 5, 1.0f, true));
  const DeviceArray<float> rope(RandomFloats(int64_t{kTokens} * kRopeDim, 6, 1.0f, false));
  for (Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
    const DType type = DeviceActivationType(numerics);
    for (RowFormat format : {RowFormat::kF32, RowFormat::kBf16, RowFormat::kFp8Main}) {
      const int64_t row_bytes = RowDataBytes(format, kHeadDim) + RowScaleBytes(format);
      const DeviceMatrix kv(RandomFloats(int64_t{kTokens} * kHeadDim, 4, 5.0f, true), kTokens,
                            kHeadDim, type);
      struct Bytes {
        std::vector<float> q;
        std::vector<std::byte> rows, ring;
        bool operator==(const Bytes&) const = default;
      };
      const auto run = [&](bool commits) {
        constexpr int64_t kWidth = int64_t{kHeads} * kHeadDim;
        const DeviceMatrix q(RandomFloats(kTokens * kWidth, 3, 2.0f, true), kTokens, kWidth, type);
        const DeviceArray<std::byte> rows(kTokens * row_bytes);
        const DeviceArray<std::byte> rings(kSlots * kRingRows * row_bytes);
        const PagedRows step_rows{rows.data(), 0, kTokens, kHeadDim, format};
        const PagedRows ring{rings.data(), kRingRows * row_bytes, kRingRows, kHeadDim, format};
        NormRopeInsertCuda({.q = q.view(),
                            .kv = kv.view(),
                            .kv_norm = norm.data(),
                            .rope = rope.data(),
                            .step_rows = step_rows,
                            .heads = kHeads,
                            .numerics = numerics,
                            .step = commits ? &step.view() : nullptr,
                            .ring = commits ? ring : PagedRows{}},
                           nullptr);
        if (!commits) {
          WindowCommitCuda({.step = &real.view(), .step_rows = step_rows, .ring = ring}, nullptr);
        }
        return Bytes{q.Download(), rows.Download(), rings.Download()};
      };
      EXPECT_TRUE(run(true) == run(false)) << static_cast<int>(format);
    }
  }
}

TEST(RmsNormCuda, AgreesWithReferenceForEveryWidthAndInPlace) {
  FATHOM_NEEDS_DEVICE();
  for (Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
    for (int64_t n : {128, 160, 320, 1024, 1536, 7168}) {
      for (int64_t tokens : {1, 3, 129}) {
        const auto x = RandomFloats(tokens * n, n, 10.0f, true);
        const auto w = RandomFloats(n, 1, 1.0f, true);
        std::vector<float> want = x;
        RmsNormReference({F32Matrix(want.data(), tokens, n), w.data(),
                          F32Matrix(want.data(), tokens, n), numerics});
        const DeviceMatrix device(x, tokens, n, DeviceActivationType(numerics));
        const DeviceArray<float> weight(w);
        RmsNormCuda({device.view(), weight.data(), device.view(), numerics}, nullptr);
        EXPECT_LT(RelativeL2(device.Download(), want),
                  numerics == Numerics::kProduct ? 1e-3 : 1e-6);
      }
    }
  }
}

}  // namespace
}  // namespace fathom::ops
