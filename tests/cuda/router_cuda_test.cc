#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>

#include "cuda/linear_device.h"
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

void ExpectAgrees(int64_t experts, int64_t tokens) {
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

TEST(RouterCuda, AgreesWithReference) {
  FATHOM_NEEDS_DEVICE();
  for (int64_t experts : {8, 12, 256, 384, 500, 512}) {
    for (int64_t tokens : {1, 3, 127, 129}) ExpectAgrees(experts, tokens);
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

// A gate, activations and a layer's router on the device.
struct Gate {
  int64_t experts = 0, in = 0, tokens = 1;
  int k = 1;
  std::vector<bf16_t> weight;
  std::vector<float> x, bias;  // bias of learned layers
  std::vector<int64_t> table;  // of hash layers
  std::vector<int32_t> token;
};

Gate MakeGate(int64_t experts, int64_t in, int64_t tokens, bool hash) {
  Gate gate{.experts = experts, .in = in, .tokens = tokens, .k = experts >= 32 ? 6 : 3};
  static std::map<std::pair<int64_t, int64_t>, std::vector<bf16_t>> weights;
  std::vector<bf16_t>& known = weights[{experts, in}];
  if (known.empty()) {
    const float sigma = 2.0f / std::sqrt(static_cast<float>(in));
    for (const float w : RandomFloats(experts * in, experts + in, sigma)) {
      known.push_back(F32ToBf16(w));
    }
  }
  gate.weight = known;
  gate.x = RandomFloats(tokens * in, tokens, 1.0f, true);
  if (hash) {
    constexpr int kVocabulary = 11;
    std::vector<int64_t> ids(experts);
    std::iota(ids.begin(), ids.end(), 0);
    std::mt19937 rng(static_cast<uint32_t>(experts));
    for (int i = 0; i < kVocabulary; ++i) {
      std::shuffle(ids.begin(), ids.end(), rng);
      gate.table.insert(gate.table.end(), ids.begin(), ids.begin() + gate.k);
    }
    for (int64_t t = 0; t < tokens; ++t) {
      gate.token.push_back(static_cast<int32_t>((7 * t + 3) % kVocabulary));
    }
  } else {
    gate.bias = RandomFloats(experts, 5, 0.1f);
  }
  return gate;
}

// One launch gives the bits of the two, also `in_a_row` times.
void ExpectSameBitsTogether(const Gate& gate, int64_t gap = 0, int in_a_row = 20) {
  const LinearWeight host{.format = WeightFormat::kBF16,
                          .out = gate.experts,
                          .in = gate.in,
                          .data = gate.weight.data(),
                          .scale = nullptr,
                          .packed = nullptr};
  const LinearWeight weight = OnDevice(host);
  testing::PaddedMatrix rows(gate.tokens, gate.in, 0);
  rows.data = gate.x;
  const GuardedMatrix x(rows, gate.in + gap, DType::kBF16);
  const DeviceArray<float> bias(gate.bias);
  DeviceArray<float> logits(gate.tokens * gate.experts);
  const DeviceArray<int64_t> table(gate.table);
  const DeviceArray<int32_t> token(gate.token);
  DeviceArray<int32_t> experts(gate.tokens * gate.k);
  DeviceArray<float> weights(gate.tokens * gate.k);
  const DeviceArray<uint8_t> scratch(LinearCudaScratchBytes(gate.tokens, gate.in));
  const MatrixView y = F32Matrix(logits.data(), gate.tokens, gate.experts);
  const LinearArgs product{.x = x.view(), .weight = &weight, .y = y, .round_output = false};
  const RouterArgs route{y,
                         gate.bias.empty() ? nullptr : bias.data(),
                         gate.table.empty() ? nullptr : table.data(),
                         gate.token.empty() ? nullptr : token.data(),
                         gate.k,
                         2.5f,
                         experts.data(),
                         weights.data()};
  const auto result = [&] {
    const std::vector<float> values = weights.Download();
    std::vector<uint32_t> bits(values.size());
    std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
    const std::vector<int32_t> chosen = experts.Download();
    experts.Upload(std::vector<int32_t>(chosen.size(), -1));
    weights.Upload(std::vector<float>(values.size(), -1.0f));
    return std::pair(chosen, bits);
  };
  LinearCuda(product, scratch.data(), nullptr);
  RouterCuda(route, nullptr);
  const auto want = result();
  // Nothing reads the logits again.
  logits.Upload(std::vector<float>(gate.tokens * gate.experts, NAN));
  ASSERT_TRUE(GateAndRouteCudaTakes(product, route));
  GateAndRouteCuda(product, route, nullptr);
  EXPECT_EQ(result(), want);
  // Launches that begin while those before them still run.
  for (int i = 0; i < in_a_row; ++i) GateAndRouteCuda(product, route, nullptr);
  EXPECT_EQ(result(), want) << "launches in a row";
}

std::string Describe(const Gate& gate) {
  return std::to_string(gate.tokens) + " tokens, gate " + std::to_string(gate.experts) + " x " +
         std::to_string(gate.in) + (gate.table.empty() ? "" : ", hash");
}

TEST(RouterCuda, WithItsGateTheSameBits) {
  FATHOM_NEEDS_DEVICE();
  const std::pair<int64_t, int64_t> shapes[] = {
      {8, 64},     {8, 256},    {12, 320},   {32, 200},   {64, 1000},  {256, 128},  {256, 640},
      {256, 4096}, {256, 7168}, {260, 4096}, {384, 1024}, {384, 4096}, {384, 7168}, {384, 7000}};
  for (const auto& [experts, in] : shapes) {
    for (const int64_t tokens : {1, 2, 3, 7, 8}) {
      for (const bool hash : {false, true}) {
        const Gate gate = MakeGate(experts, in, tokens, hash);
        SCOPED_TRACE(Describe(gate));
        ExpectSameBitsTogether(gate, tokens == 3 ? 24 : 0);
      }
    }
  }
}

// Every kernel with little work; the last gate's weights pass through rings of stages.
TEST(RouterCuda, SmallRoutesAndGatesOfEveryKernel) {
  FATHOM_NEEDS_DEVICE();
  for (const int64_t experts : {12, 384, 512}) ExpectAgrees(experts, 2);
  for (const auto& [experts, in] :
       {std::pair<int64_t, int64_t>{32, 1160}, {260, 640}, {384, 4608}}) {
    for (const int64_t tokens : {1, 3}) {
      const Gate gate = MakeGate(experts, in, tokens, /*hash=*/tokens == 3);
      SCOPED_TRACE(Describe(gate));
      ExpectSameBitsTogether(gate, 0, 2);
    }
  }
}

TEST(RouterCuda, WithItsGateTiesAndLogitsThatAreNoNumbers) {
  FATHOM_NEEDS_DEVICE();
  constexpr bf16_t kInfinity = 0x7f80, kNegative = 0x8000, kNaN = 0x7fc0;
  for (const int64_t experts : {8, 64, 256, 384}) {
    for (const int64_t tokens : {1, 8}) {
      for (const bool hash : {false, true}) {
        Gate gate = MakeGate(experts, 512, tokens, hash);
        for (float& x : gate.x) x = std::fabs(x) + 0.125f;  // logits of infinities stay infinite
        SCOPED_TRACE(Describe(gate));
        const auto row = [&](int64_t e) { return gate.weight.begin() + e * gate.in; };

        // Ties of every second expert, the best ones.
        Gate normal = gate;
        std::fill(gate.bias.begin(), gate.bias.end(), 0.0f);
        std::fill_n(row(1), gate.in, F32ToBf16(0.03125f));
        for (int64_t e = 3; e < experts; e += 2) std::copy_n(row(1), gate.in, row(e));
        ExpectSameBitsTogether(gate);

        // All the same.
        for (int64_t e = 0; e < experts; ++e) std::copy_n(normal.weight.begin(), gate.in, row(e));
        ExpectSameBitsTogether(gate);

        // Infinite, negative infinite and no number, beside others.
        gate = normal;
        row(2)[100] = kInfinity;
        row(3)[200] = kInfinity | kNegative;
        row(experts - 1)[511] = kNaN;
        ExpectSameBitsTogether(gate);

        // Fewer numbers than are chosen; then none.
        for (const int64_t numbers : {int64_t{2}, int64_t{0}}) {
          gate = normal;
          for (int64_t e = numbers; e < experts; ++e) row(e)[7] = kNaN;
          ExpectSameBitsTogether(gate);
        }
        // A bias that lets nobody be chosen.
        if (!hash) {
          gate = normal;
          std::fill(gate.bias.begin(), gate.bias.end(), -INFINITY);
          gate.bias[experts / 2] = 0.0f;
          ExpectSameBitsTogether(gate);
        }
      }
    }
  }
}

TEST(RouterCuda, WithItsGateTakesFewRowsOfPlainGates) {
  const LinearWeight weight{.format = WeightFormat::kBF16,
                            .out = 256,
                            .in = 4096,
                            .data = nullptr,
                            .scale = nullptr,
                            .packed = nullptr};
  const auto takes = [&](const LinearWeight& w, int64_t rows, DType type, Numerics numerics,
                         bool round) {
    const MatrixView y = F32Matrix(nullptr, rows, w.out);
    return GateAndRouteCudaTakes({.x = {nullptr, type, rows, w.in, w.in},
                                  .weight = &w,
                                  .y = y,
                                  .numerics = numerics,
                                  .round_output = round},
                                 {.logits = y, .top_k = 6});
  };
  constexpr auto kProduct = Numerics::kProduct;
  EXPECT_TRUE(takes(weight, 1, DType::kBF16, kProduct, false));
  EXPECT_TRUE(takes(weight, 8, DType::kBF16, kProduct, false));
  EXPECT_FALSE(takes(weight, 9, DType::kBF16, kProduct, false));
  EXPECT_FALSE(takes(weight, 1, DType::kF32, kProduct, false));
  EXPECT_FALSE(takes(weight, 1, DType::kBF16, kProduct, true));
  EXPECT_FALSE(takes(weight, 1, DType::kBF16, Numerics::kReference, false));
  LinearWeight other = weight;
  other.format = WeightFormat::kF32;
  EXPECT_FALSE(takes(other, 1, DType::kBF16, kProduct, false));
  other = weight;
  other.in = 4100;
  EXPECT_FALSE(takes(other, 1, DType::kBF16, kProduct, false));
  other = weight;
  other.out = 385;
  EXPECT_FALSE(takes(other, 1, DType::kBF16, kProduct, false));
}

}  // namespace
}  // namespace fathom::ops
