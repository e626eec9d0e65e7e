// What these prove: grouping, SwiGLU, re-quantising and combining give the reference's result for
// every instruction set, weight format and batch, and a token's row has the same bits whatever
// tokens stand around it.
#include "ops/experts/experts.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "ops/experts/experts_kernels.h"
#include "ops/linear/linear_testing.h"

namespace fathom::ops {
namespace {

using testing::AvailableIsas;
using testing::IsaScope;
using testing::OwnedWeight;
using testing::PaddedMatrix;

struct Layer {
  Layer(WeightFormat routed, WeightFormat shared_format, int64_t width, int64_t inner, int count) {
    owned.reserve(3 * (count + 1));
    const auto make = [&](WeightFormat format) {
      const auto seed = static_cast<uint32_t>(owned.size());
      owned.emplace_back(format, inner, width, seed + 1);
      owned.emplace_back(format, width, inner, seed + 2);
      owned.emplace_back(format, inner, width, seed + 3);
      const size_t at = owned.size() - 3;
      return ExpertWeights{owned[at].weight, owned[at + 1].weight, owned[at + 2].weight};
    };
    for (int e = 0; e < count; ++e) experts.push_back(make(routed));
    shared = make(shared_format);
  }
  std::vector<OwnedWeight> owned;
  std::vector<ExpertWeights> experts;
  ExpertWeights shared;
};

struct Choice {
  Choice(int64_t rows, int experts, int k, uint32_t seed) {
    std::mt19937 rng(seed);
    std::vector<int32_t> ids(experts);
    for (int64_t t = 0; t < rows; ++t) {
      std::iota(ids.begin(), ids.end(), 0);
      std::shuffle(ids.begin(), ids.end(), rng);
      std::sort(ids.begin(), ids.begin() + k);
      chosen.insert(chosen.end(), ids.begin(), ids.begin() + k);
      for (int j = 0; j < k; ++j) weights.push_back(0.1f + static_cast<float>(rng() % 100) / 60);
    }
  }
  std::vector<int32_t> chosen;
  std::vector<float> weights;
};

ExpertsArgs Args(const Layer& layer, PaddedMatrix& z, const Choice& choice, int k, PaddedMatrix& y,
                 Numerics numerics) {
  return {.z = z.view(),
          .experts = layer.experts.data(),
          .num_experts = static_cast<int>(layer.experts.size()),
          .shared = &layer.shared,
          .chosen = choice.chosen.data(),
          .weights = choice.weights.data(),
          .top_k = k,
          .limit = 1.0f,  // low, so that the clamp matters
          .shared_limit = std::numeric_limits<float>::infinity(),
          .y = y.view(),
          .numerics = numerics};
}

void ExpectNear(PaddedMatrix& expected, PaddedMatrix& got, Numerics numerics) {
  // kProduct rounds g, u and a to bf16 and a to e4m3 (2^-4 relative): a sum that differs in its
  // last bit may cross one of those edges, which moves one term of many by that much.
  const float scale = numerics == Numerics::kProduct ? 0.02f : 1e-5f;
  double largest = 0;
  for (int64_t t = 0; t < expected.rows; ++t) {
    for (int64_t i = 0; i < expected.cols; ++i) {
      largest = std::max<double>(largest, std::fabs(expected.view().f32_row(t)[i]));
    }
  }
  double error = 0;
  double worst = 0;
  for (int64_t t = 0; t < expected.rows; ++t) {
    for (int64_t i = 0; i < expected.cols; ++i) {
      const double d = std::fabs(expected.view().f32_row(t)[i] - got.view().f32_row(t)[i]);
      ASSERT_FALSE(std::isnan(d)) << "row " << t << " channel " << i;
      worst = std::max(worst, d);
      error += d;
    }
  }
  EXPECT_LE(worst, scale * largest);
  // Such crossings are rare: nearly all elements agree.
  EXPECT_LE(error / (expected.rows * expected.cols), 0.05 * scale * largest);
}

TEST(Experts, EveryIsaMatchesTheReference) {
  struct Case {
    WeightFormat routed, shared;
    int64_t width, inner;
    int experts, k;
  };
  constexpr auto kFp4 = WeightFormat::kFp4Block32;
  constexpr auto kFp8 = WeightFormat::kFp8Block128;
  constexpr auto kBf16 = WeightFormat::kBF16;
  constexpr Case kCases[] = {
      {kFp4, kFp8, 256, 256, 8, 2},  {kFp4, kFp8, 96, 160, 5, 3},
      {kFp8, kFp8, 136, 72, 4, 1},   {kFp4, kBf16, 64, 416, 3, 3},
      {kBf16, kBf16, 40, 100, 6, 2}, {WeightFormat::kF32, kFp8, 32, 64, 2, 1},
  };
  ThreadPool pool(2);
  for (const Case& c : kCases) {
    const Layer layer(c.routed, c.shared, c.width, c.inner, c.experts);
    for (const int64_t rows : {1, 2, 7, 33, 130}) {
      const Choice choice(rows, c.experts, c.k, static_cast<uint32_t>(rows));
      for (const auto numerics : {Numerics::kProduct, Numerics::kReference}) {
        PaddedMatrix z(rows, c.width, 5);
        z.Randomise(3, numerics == Numerics::kProduct);
        PaddedMatrix expected(rows, c.width, 0);
        ExpertsReference(Args(layer, z, choice, c.k, expected, numerics));
        for (const Isa isa : AvailableIsas()) {
          const IsaScope scope(isa);
          SCOPED_TRACE(std::string(IsaName(isa)) + " rows " + std::to_string(rows) + " width " +
                       std::to_string(c.width));
          PaddedMatrix y(rows, c.width, 3);
          ExpertsCpu(Args(layer, z, choice, c.k, y, numerics), pool);
          ASSERT_TRUE(y.PaddingUntouched());
          ExpectNear(expected, y, numerics);
        }
      }
    }
  }
}

RC_GTEST_PROP(Experts, ARowHasTheSameBitsInEveryBatchAndThreadCount, ()) {
  static const Layer layer(WeightFormat::kFp4Block32, WeightFormat::kFp8Block128, 128, 160, 6);
  constexpr int kTop = 2;
  const int64_t rows = *rc::gen::inRange<int64_t>(2, 260);
  const int64_t row = *rc::gen::inRange<int64_t>(0, rows);
  const int threads = *rc::gen::inRange(1, 4);
  const auto numerics = *rc::gen::arbitrary<bool>() ? Numerics::kProduct : Numerics::kReference;
  Choice choice(rows, 6, kTop, static_cast<uint32_t>(rows + row));
  PaddedMatrix z(rows, 128, 0);
  z.Randomise(static_cast<uint32_t>(row), true);
  ThreadPool many(threads);
  ThreadPool one(1);
  Choice single(0, 6, kTop, 0);
  single.chosen.assign(choice.chosen.begin() + row * kTop,
                       choice.chosen.begin() + (row + 1) * kTop);
  single.weights.assign(choice.weights.begin() + row * kTop,
                        choice.weights.begin() + (row + 1) * kTop);
  PaddedMatrix z1(1, 128, 0);
  std::copy_n(z.view().f32_row(row), 128, z1.data.begin());
  for (const Isa isa : AvailableIsas()) {
    const IsaScope scope(isa);
    PaddedMatrix y(rows, 128, 0);
    ExpertsCpu(Args(layer, z, choice, kTop, y, numerics), many);
    PaddedMatrix alone(1, 128, 0);
    ExpertsCpu(Args(layer, z1, single, kTop, alone, numerics), one);
    for (int64_t i = 0; i < 128; ++i) {
      RC_ASSERT(std::bit_cast<uint32_t>(alone.data[i]) ==
                std::bit_cast<uint32_t>(y.view().f32_row(row)[i]));
    }
  }
}

TEST(Experts, SwigluIsWithinAFewUlpsAndIndependentOfPlace) {
  std::vector<float> g;
  for (float v = -120.0f; v < 120.0f; v += 0.37f) g.push_back(v);
  const std::vector<float> u(g.size(), 0.75f);
  for (const Isa isa : AvailableIsas()) {
    const ExpertsKernels& kernels = isa == Isa::kScalar ? kExpertsScalar
                                    : isa == Isa::kAvx2 ? kExpertsAvx2
                                                        : kExpertsAvx512;
    std::vector<float> a(g.size());
    kernels.swiglu(g.data(), u.data(), static_cast<int64_t>(g.size()), 100.0f, 1.5f, false,
                   a.data());
    for (size_t i = 0; i < g.size(); ++i) {
      const double gate = std::min(g[i], 100.0f);
      const double want = gate / (1.0 + std::exp(-gate)) * 0.75 * 1.5;
      EXPECT_NEAR(a[i], want, std::fabs(want) * 0x1p-21 + 1e-35) << IsaName(isa) << " g " << g[i];
      float alone = 0;
      kernels.swiglu(&g[i], &u[i], 1, 100.0f, 1.5f, false, &alone);
      EXPECT_EQ(std::bit_cast<uint32_t>(alone), std::bit_cast<uint32_t>(a[i]));
    }
  }
}

}  // namespace
}  // namespace fathom::ops
