#include "ops/router/router.h"

#include <numeric>

#include "ops/testing.h"

namespace fathom::ops {
namespace {

struct Routes {
  std::vector<int32_t> experts;
  std::vector<float> weights;
};

template <class Fn>
Routes Route(std::vector<float>& logits, int64_t tokens, int k, RouterArgs args, Fn&& run) {
  Routes out{std::vector<int32_t>(tokens * k, -1), std::vector<float>(tokens * k, NAN)};
  args.logits = F32Matrix(logits.data(), tokens, static_cast<int64_t>(logits.size()) / tokens);
  args.top_k = k;
  args.experts = out.experts.data();
  args.weights = out.weights.data();
  run(args);
  return out;
}

TEST(Router, CpuAgreesWithReferenceAndWeightsSumToTheScale) {
  ThreadPool pool(2);
  for (int64_t experts : {8, 12, 256}) {
    const int k = experts == 256 ? 6 : 3;
    auto logits = RandomFloats(100 * experts, experts, 4.0f);
    auto bias = RandomFloats(experts, 1);
    RouterArgs args;
    args.bias = bias.data();
    args.scale = 2.5f;
    const Routes want = Route(logits, 100, k, args, [](auto& a) { RouterReference(a); });
    const Routes got = Route(logits, 100, k, args, [&](auto& a) { RouterCpu(a, pool); });
    EXPECT_EQ(got.experts, want.experts);
    EXPECT_LT(RelativeL2(got.weights, want.weights), 1e-6);
    for (int t = 0; t < 100; ++t) {
      const float* w = got.weights.data() + t * k;
      EXPECT_NEAR(std::accumulate(w, w + k, 0.0f), 2.5f, 1e-5);
      EXPECT_TRUE(std::is_sorted(got.experts.begin() + t * k, got.experts.begin() + (t + 1) * k));
    }
  }
}

TEST(Router, BiasChoosesButDoesNotWeigh) {
  ThreadPool pool(1);
  std::vector<float> logits = {5, 4, 3, -40};
  std::vector<float> bias = {0, 0, 0, 100};
  RouterArgs args;
  args.bias = bias.data();
  const Routes got = Route(logits, 1, 2, args, [&](auto& a) { RouterCpu(a, pool); });
  EXPECT_EQ(got.experts, (std::vector<int32_t>{0, 3}));
  EXPECT_GT(got.weights[0], 0.999f);
}

TEST(Router, VeryNegativeLogitsKeepTheirProportions) {
  // softplus(-30) is e^-30: computed as log(1 + exp(x)) it would be 0 and the weights 0/0.
  ThreadPool pool(1);
  std::vector<float> logits = {-30, -30, -32, -34};
  std::vector<float> bias(4, 0.0f);
  RouterArgs args;
  args.bias = bias.data();
  const Routes got = Route(logits, 1, 2, args, [&](auto& a) { RouterCpu(a, pool); });
  EXPECT_NEAR(got.weights[0], 0.5f, 1e-5);
  EXPECT_NEAR(got.weights[1], 0.5f, 1e-5);
  std::vector<float> vanished(4, -300.0f);
  const Routes floor = Route(vanished, 1, 2, args, [&](auto& a) { RouterCpu(a, pool); });
  EXPECT_NEAR(floor.weights[0], 0.5f, 1e-5);
}

TEST(Router, HashLayersTakeTheTableOfTheTokenItself) {
  ThreadPool pool(1);
  auto logits = RandomFloats(3 * 8, 9);
  std::vector<int64_t> table = {5, 1, 7, 0, 2, 3};
  std::vector<int32_t> token = {2, 0, 1};
  RouterArgs args;
  args.tid2eid = table.data();
  args.token = token.data();
  const Routes want = Route(logits, 3, 2, args, [](auto& a) { RouterReference(a); });
  const Routes got = Route(logits, 3, 2, args, [&](auto& a) { RouterCpu(a, pool); });
  EXPECT_EQ(got.experts, (std::vector<int32_t>{2, 3, 1, 5, 0, 7}));
  EXPECT_EQ(got.experts, want.experts);
  EXPECT_LT(RelativeL2(got.weights, want.weights), 1e-6);
}

}  // namespace
}  // namespace fathom::ops
