#include "ops/hyper_connection/hyper_connection.h"

#include "ops/testing.h"

namespace fathom::ops {
namespace {

struct Seam {
  std::vector<float> x, o, post, comb, u, z;
};

struct Fixture {
  int64_t d;
  std::vector<float> fn, base, scale, norm;
  HyperConnectionSite site;
  Fixture(int64_t width, int mixes) : d(width) {
    fn = RandomFloats(mixes * 4 * d, 1, 0.05f);
    base = RandomFloats(mixes, 2, 1.0f);
    scale = {0.7f, 1.3f, 2.0f};
    norm = RandomFloats(d, 3, 1.0f, true);
    site = {fn.data(), base.data(), scale.data(), mixes};
  }
};

Seam Input(int64_t tokens, int64_t d) {
  Seam s;
  s.x = RandomFloats(tokens * 4 * d, 10, 3.0f, true);
  s.o = RandomFloats(tokens * d, 11, 1.0f, true);
  s.post = RandomFloats(tokens * 4, 12);
  s.comb = RandomFloats(tokens * 16, 13, 0.3f);
  s.u.assign(tokens * d, NAN);
  s.z.assign(tokens * d, NAN);
  return s;
}

HyperConnectionArgs Args(Seam& s, const Fixture& f, int64_t tokens, Numerics numerics) {
  HyperConnectionArgs args;
  args.x = F32Matrix(s.x.data(), tokens, 4 * f.d);
  args.o = F32Matrix(s.o.data(), tokens, f.d);
  args.site = &f.site;
  args.post = s.post.data();
  args.comb = s.comb.data();
  args.u = F32Matrix(s.u.data(), tokens, f.d);
  args.norm = f.norm.data();
  args.z = F32Matrix(s.z.data(), tokens, f.d);
  args.numerics = numerics;
  return args;
}

TEST(HyperConnection, CpuAgreesWithReference) {
  ThreadPool pool(2);
  ForEachIsa([&](Isa) {
    for (Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
      for (int64_t d : {64, 256, 320}) {
        for (int64_t tokens : {1, 3, 16, 37}) {
          const Fixture f(d, 24);
          Seam want = Input(tokens, d), got = Input(tokens, d);
          HyperConnectionReference(Args(want, f, tokens, numerics));
          HyperConnectionCpu(Args(got, f, tokens, numerics), pool);
          const double bound = numerics == Numerics::kProduct ? 2e-3 : 1e-5;
          EXPECT_LT(RelativeL2(got.x, want.x), bound);
          EXPECT_LT(RelativeL2(got.z, want.z), bound);
          EXPECT_LT(RelativeL2(got.post, want.post), 1e-4);
          EXPECT_LT(RelativeL2(got.comb, want.comb), 1e-4);
        }
      }
    }
  });
}

TEST(HyperConnection, CombIsDoublyStochastic) {
  ThreadPool pool(1);
  const Fixture f(256, 24);
  Seam s = Input(5, 256);
  HyperConnectionCpu(Args(s, f, 5, Numerics::kReference), pool);
  for (int t = 0; t < 5; ++t) {
    for (int j = 0; j < 4; ++j) {
      float row = 0, column = 0;
      for (int k = 0; k < 4; ++k) {
        row += s.comb[t * 16 + j * 4 + k];
        column += s.comb[t * 16 + k * 4 + j];
      }
      EXPECT_NEAR(row, 1.0f, 2e-2);  // columns are normalised last
      EXPECT_NEAR(column, 1.0f, 1e-4);
    }
  }
}

TEST(HyperConnection, ResidualSumRunsOverTheFirstIndexOfComb) {
  ThreadPool pool(1);
  ForEachIsa([&](Isa) {
    Seam s = Input(1, 16);
    for (int stream = 0; stream < 4; ++stream) {
      for (int i = 0; i < 16; ++i) s.x[stream * 16 + i] = static_cast<float>(stream + 1);
    }
    std::fill(s.o.begin(), s.o.end(), 0.0f);
    std::fill(s.comb.begin(), s.comb.end(), 0.0f);
    s.comb[1 * 4 + 2] = 1.0f;  // from stream 1 to stream 2
    HyperConnectionArgs args;
    args.x = F32Matrix(s.x.data(), 1, 64);
    args.o = F32Matrix(s.o.data(), 1, 16);
    args.post = s.post.data();
    args.comb = s.comb.data();
    HyperConnectionCpu(args, pool);
    for (int i = 0; i < 64; ++i) EXPECT_EQ(s.x[i], i / 16 == 2 ? 2.0f : 0.0f);
  });
}

TEST(HyperConnection, EveryTokenIsIndependentOfItsBatch) {
  ThreadPool pool(2);
  ForEachIsa([&](Isa) {
    const Fixture f(256, 24);
    const int64_t tokens = 39;
    Seam all = Input(tokens, 256);
    Seam single = all;
    HyperConnectionCpu(Args(all, f, tokens, Numerics::kProduct), pool);
    for (int64_t t = 0; t < tokens; ++t) {
      HyperConnectionArgs args = Args(single, f, tokens, Numerics::kProduct);
      args.x = F32Matrix(args.x.f32_row(t), 1, 1024);
      args.o = F32Matrix(args.o.f32_row(t), 1, 256);
      args.post += t * 4;
      args.comb += t * 16;
      args.u = F32Matrix(args.u.f32_row(t), 1, 256);
      args.z = F32Matrix(args.z.f32_row(t), 1, 256);
      HyperConnectionCpu(args, pool);
    }
    EXPECT_EQ(all.x, single.x);
    EXPECT_EQ(all.z, single.z);
    EXPECT_EQ(all.comb, single.comb);
  });
}

TEST(HyperConnection, HeadCollapseHasNoSinkhorn) {
  ThreadPool pool(1);
  ForEachIsa([&](Isa) {
    const Fixture f(256, 4);
    Seam want = Input(6, 256), got = Input(6, 256);
    auto args = Args(want, f, 6, Numerics::kReference);
    args.o = {};
    args.post = args.comb = nullptr;
    HyperConnectionReference(args);
    auto fast = Args(got, f, 6, Numerics::kReference);
    fast.o = {};
    fast.post = fast.comb = nullptr;
    HyperConnectionCpu(fast, pool);
    EXPECT_LT(RelativeL2(got.z, want.z), 1e-5);
  });
}

}  // namespace
}  // namespace fathom::ops
