#include <cmath>

#include "cuda/device_memory.h"
#include "ops/hyper_connection/cuda.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

enum class Parts { kAll, kFirst, kLast, kHead };  // kFirst: no post; kLast: post alone

struct Seam {
  std::vector<float> x, o, post, comb, u, z;
};

Seam Input(int64_t tokens, int64_t d) {
  Seam s;
  s.x = RandomFloats(tokens * 4 * d, 10, 3.0f, true);
  s.o = RandomFloats(tokens * d, 11, 1.0f, true);
  s.post = RandomFloats(tokens * 4, 12);
  s.comb = RandomFloats(tokens * 16, 13, 0.3f);
  s.u.assign(tokens * d, 0.0f);
  s.z.assign(tokens * d, 0.0f);
  return s;
}

void Choose(Parts parts, HyperConnectionArgs& args) {
  if (parts == Parts::kFirst || parts == Parts::kHead) args.o = {};
  if (parts == Parts::kHead) args.post = args.comb = nullptr;
  if (parts == Parts::kLast) args.site = nullptr, args.norm = nullptr;
}

// The device's results, tokens [begin, end) in one launch each of `batch`.
Seam RunDevice(const Seam& in, int64_t tokens, int64_t d, Numerics numerics, Parts parts,
               int64_t batch) {
  const DType type = DeviceActivationType(numerics);
  const int mixes = parts == Parts::kHead ? 4 : 24;
  const DeviceMatrix x(in.x, tokens, 4 * d, type), o(in.o, tokens, d, type);
  const DeviceMatrix u(in.u, tokens, d, type), z(in.z, tokens, d, type);
  const DeviceArray<float> post(in.post), comb(in.comb);
  const DeviceArray<float> fn(RandomFloats(mixes * 4 * d, 1, 0.05f));
  const DeviceArray<float> base(RandomFloats(mixes, 2, 1.0f)), norm(RandomFloats(d, 3, 1, true));
  const DeviceArray<float> scale(std::vector<float>{0.7f, 1.3f, 2.0f});
  const HyperConnectionSite site = {fn.data(), base.data(), scale.data(), mixes};
  const auto rows = [](const MatrixView& m, int64_t first, int64_t count) {
    return MatrixView{static_cast<std::byte*>(m.data) + first * m.stride * ElementBytes(m.dtype),
                      m.dtype, count, m.cols, m.stride};
  };
  for (int64_t t = 0; t < tokens; t += batch) {
    const int64_t count = std::min(batch, tokens - t);
    HyperConnectionArgs args;
    args.x = rows(x.view(), t, count);
    args.o = rows(o.view(), t, count);
    args.site = &site;
    args.post = post.data() + t * 4;
    args.comb = comb.data() + t * 16;
    args.u = rows(u.view(), t, count);
    args.norm = norm.data();
    args.z = rows(z.view(), t, count);
    args.numerics = numerics;
    Choose(parts, args);
    HyperConnectionCuda(args, nullptr);
  }
  return {x.Download(), o.Download(), post.Download(), comb.Download(), u.Download(), z.Download()};
}

Seam RunReference(Seam s, int64_t tokens, int64_t d, Numerics numerics, Parts parts) {
  const int mixes = parts == Parts::kHead ? 4 : 24;
  const auto fn = RandomFloats(mixes * 4 * d, 1, 0.05f), base = RandomFloats(mixes, 2, 1.0f);
  const auto norm = RandomFloats(d, 3, 1.0f, true);
  const std::vector<float> scale = {0.7f, 1.3f, 2.0f};
  const HyperConnectionSite site = {fn.data(), base.data(), scale.data(), mixes};
  HyperConnectionArgs args;
  args.x = F32Matrix(s.x.data(), tokens, 4 * d);
  args.o = F32Matrix(s.o.data(), tokens, d);
  args.site = &site;
  args.post = s.post.data();
  args.comb = s.comb.data();
  args.u = F32Matrix(s.u.data(), tokens, d);
  args.norm = norm.data();
  args.z = F32Matrix(s.z.data(), tokens, d);
  args.numerics = numerics;
  Choose(parts, args);
  HyperConnectionReference(args);
  return s;
}

void ExpectAgrees(int64_t tokens, int64_t d, Numerics numerics, Parts parts) {
  SCOPED_TRACE("width " + std::to_string(d) + ", tokens " + std::to_string(tokens) + ", parts " +
               std::to_string(static_cast<int>(parts)));
  const Seam input = Input(tokens, d);
  const Seam want = RunReference(input, tokens, d, numerics, parts);
  const Seam got = RunDevice(input, tokens, d, numerics, parts, tokens);
  const double bound = numerics == Numerics::kProduct ? 2e-3 : 1e-5;
  EXPECT_LT(RelativeL2(got.x, want.x), bound);
  EXPECT_LT(RelativeL2(got.post, want.post), 2e-4);
  EXPECT_LT(RelativeL2(got.comb, want.comb), 2e-4);
  if (parts != Parts::kLast) {
    EXPECT_LT(RelativeL2(got.z, want.z), bound);
    EXPECT_LT(RelativeL2(got.u, want.u), bound);
  }
}

TEST(HyperConnectionCuda, AgreesWithReference) {
  FATHOM_NEEDS_DEVICE();
  for (Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
    for (Parts parts : {Parts::kAll, Parts::kFirst, Parts::kLast, Parts::kHead}) {
      for (int64_t d : {64, 256, 320, 4096, 7168}) {
        for (int64_t tokens : {1, 3, 129}) {
          if (tokens == 129 && d > 4000) continue;
          ExpectAgrees(tokens, d, numerics, parts);
        }
      }
    }
  }
}

// Every number of tokens that a team takes at a time, with one team and two, once and several times
// over.
TEST(HyperConnectionCuda, SmallSeamsOfEveryKernel) {
  FATHOM_NEEDS_DEVICE();
  for (const Parts parts : {Parts::kAll, Parts::kFirst, Parts::kLast, Parts::kHead}) {
    for (const int64_t tokens : {1, 3}) {
      ExpectAgrees(tokens, 320, Numerics::kProduct, parts);
      ExpectAgrees(tokens, 64, Numerics::kReference, parts);
    }
  }
  for (const int64_t tokens : {10, 20, 40, 70, 129}) {
    ExpectAgrees(tokens, 64, Numerics::kProduct, Parts::kAll);
  }
}

// The number of tokens decides how many a cluster takes at a time, and how often.
TEST(HyperConnectionCuda, EveryTokenIsIndependentOfItsBatch) {
  FATHOM_NEEDS_DEVICE();
  struct Case {
    int64_t tokens, d;
    std::vector<int64_t> batches;
  };
  for (const Case& c : {Case{39, 256, {1, 7}}, Case{603, 256, {1, 20, 150}}, Case{97, 320, {1, 40}},
                        Case{257, 4096, {1, 9, 24, 50, 120}}, Case{140, 7168, {1, 12, 30, 64}}}) {
    for (const Parts part : {Parts::kAll, Parts::kFirst, Parts::kHead}) {
      const Seam input = Input(c.tokens, c.d);
      const Seam all = RunDevice(input, c.tokens, c.d, Numerics::kProduct, part, c.tokens);
      for (const int64_t batch : c.batches) {
        const Seam parts = RunDevice(input, c.tokens, c.d, Numerics::kProduct, part, batch);
        EXPECT_EQ(parts.x, all.x) << c.tokens << " of " << c.d;
        EXPECT_EQ(parts.u, all.u);
        EXPECT_EQ(parts.z, all.z);
        EXPECT_EQ(parts.post, all.post);
        EXPECT_EQ(parts.comb, all.comb);
      }
    }
  }
}

}  // namespace
}  // namespace fathom::ops
