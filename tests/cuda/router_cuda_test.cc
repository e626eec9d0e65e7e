#include <numeric>

#include "cuda/device_memory.h"
#include "ops/router/cuda.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

struct Routes {
  std::vector<int32_t> experts;
  std::vector<float> weights;
};

struct Input {
  std::vector<float> logits, bias;
  std::vector<int64_t> table;
  std::vector<int32_t> token;
  int64_t tokens = 1;
  int k = 1;
  float scale = 1.0f;
};

Routes Reference(const Input& in) {
  Routes out{std::vector<int32_t>(in.tokens * in.k, -1), std::vector<float>(in.tokens * in.k, NAN)};
  auto logits = in.logits;
  RouterReference({F32Matrix(logits.data(), in.tokens, std::ssize(in.logits) / in.tokens),
                   in.bias.empty() ? nullptr : in.bias.data(),
                   in.table.empty() ? nullptr : in.table.data(),
                   in.token.empty() ? nullptr : in.token.data(), in.k, in.scale, out.experts.data(),
                   out.weights.data()});
  return out;
}

Routes Device(const Input& in) {
  const DeviceArray<float> logits(in.logits), bias(in.bias);
  const DeviceArray<int64_t> table(in.table);
  const DeviceArray<int32_t> token(in.token), experts(in.tokens * in.k);
  const DeviceArray<float> weights(in.tokens * in.k);
  RouterCuda(
      {F32Matrix(logits.data(), in.tokens, std::ssize(in.logits) / in.tokens),
       in.bias.empty() ? nullptr : bias.data(), in.table.empty() ? nullptr : table.data(),
       in.token.empty() ? nullptr : token.data(), in.k, in.scale, experts.data(), weights.data()},
      nullptr);
  return {experts.Download(), weights.Download()};
}

TEST(RouterCuda, AgreesWithReference) {
  FATHOM_NEEDS_DEVICE();
  for (int64_t experts : {8, 12, 256, 384}) {
    for (int64_t tokens : {1, 3, 127, 129}) {
      Input in;
      in.tokens = tokens;
      in.k = experts >= 256 ? 8 : 3;
      in.scale = 2.5f;
      in.logits = RandomFloats(tokens * experts, experts, 4.0f);
      in.bias = RandomFloats(experts, 1);
      const Routes want = Reference(in), got = Device(in);
      EXPECT_EQ(got.experts, want.experts);
      EXPECT_LT(RelativeL2(got.weights, want.weights), 1e-6);
    }
  }
}

TEST(RouterCuda, TiesGoToTheLowerId) {
  FATHOM_NEEDS_DEVICE();
  Input in;
  in.logits.assign(40, 1.0f);
  in.logits[37] = 2.0f;
  in.bias.assign(40, 0.0f);
  in.k = 4;
  EXPECT_EQ(Device(in).experts, (std::vector<int32_t>{0, 1, 2, 37}));
}

TEST(RouterCuda, VeryNegativeLogitsKeepTheirProportions) {
  FATHOM_NEEDS_DEVICE();
  for (float logit : {-30.0f, -300.0f, -3000.0f}) {
    Input in;
    in.logits = {logit, logit, logit - 2, logit - 4};
    in.bias.assign(4, 0.0f);
    in.k = 2;
    const Routes got = Device(in);
    EXPECT_NEAR(got.weights[0], 0.5f, 1e-5) << logit;
    EXPECT_NEAR(got.weights[1], 0.5f, 1e-5) << logit;
  }
}

TEST(RouterCuda, HashLayersTakeTheTableOfTheTokenItself) {
  FATHOM_NEEDS_DEVICE();
  Input in;
  in.tokens = 3;
  in.k = 2;
  in.logits = RandomFloats(3 * 8, 9);
  in.table = {5, 1, 7, 0, 2, 3};
  in.token = {2, 0, 1};
  const Routes want = Reference(in), got = Device(in);
  EXPECT_EQ(got.experts, (std::vector<int32_t>{2, 3, 1, 5, 0, 7}));
  EXPECT_LT(RelativeL2(got.weights, want.weights), 1e-6);
}

}  // namespace
}  // namespace fathom::ops
