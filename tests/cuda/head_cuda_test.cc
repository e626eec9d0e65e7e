#include "cuda/device_memory.h"
#include "ops/head/cuda.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

TEST(EmbedCuda, CopiesTheTokensRowToEveryStream) {
  FATHOM_NEEDS_DEVICE();
  constexpr int64_t kWidth = 320, kVocab = 50, kTokens = 129;
  std::vector<bf16_t> table;
  for (float x : RandomFloats(kVocab * kWidth, 1)) table.push_back(F32ToBf16(x));
  std::vector<int32_t> token;
  for (int t = 0; t < kTokens; ++t) token.push_back((t * 7) % kVocab);
  std::vector<float> want(kTokens * 4 * kWidth);
  EmbedReference({table.data(), token.data(), F32Matrix(want.data(), kTokens, 4 * kWidth)});
  const DeviceArray<bf16_t> device_table(table);
  const DeviceArray<int32_t> device_token(token);
  for (DType type : {DType::kF32, DType::kBF16}) {
    const DeviceMatrix x(kTokens, 4 * kWidth, type);
    EmbedCuda({device_table.data(), device_token.data(), x.view()}, nullptr);
    EXPECT_EQ(x.Download(), want);
  }
}

TEST(HeadCuda, CollapsesTheRowsAskedFor) {
  FATHOM_NEEDS_DEVICE();
  constexpr int64_t kWidth = 256, kTokens = 9;
  const std::vector<int32_t> rows = {1, 4, 8};
  const auto fn = RandomFloats(4 * 4 * kWidth, 1, 0.05f), base = RandomFloats(4, 2);
  const auto norm = RandomFloats(kWidth, 3, 1.0f, true);
  const std::vector<float> scale = {0.7f};
  auto x = RandomFloats(kTokens * 4 * kWidth, 4, 3.0f, true);
  for (Numerics numerics : {Numerics::kProduct, Numerics::kReference}) {
    std::vector<float> gathered, u(3 * kWidth), z(3 * kWidth);
    for (int32_t row : rows) {
      gathered.insert(gathered.end(), x.begin() + row * 4 * kWidth,
                      x.begin() + (row + 1) * 4 * kWidth);
    }
    const HyperConnectionSite host_site = {fn.data(), base.data(), scale.data(), 4};
    HyperConnectionReference({.x = F32Matrix(gathered.data(), 3, 4 * kWidth),
                              .site = &host_site,
                              .u = F32Matrix(u.data(), 3, kWidth),
                              .norm = norm.data(),
                              .z = F32Matrix(z.data(), 3, kWidth),
                              .numerics = numerics});
    const DType type = DeviceActivationType(numerics);
    const DeviceArray<float> device_fn(fn), device_base(base), device_scale(scale),
        device_norm(norm);
    const DeviceArray<int32_t> device_rows(rows);
    const DeviceMatrix device_x(x, kTokens, 4 * kWidth, type), device_gathered(3, 4 * kWidth, type),
        device_u(3, kWidth, type), device_z(3, kWidth, type);
    const HyperConnectionSite site = {device_fn.data(), device_base.data(), device_scale.data(), 4};
    HeadCollapseCuda({.x = device_x.view(),
                      .rows = device_rows.data(),
                      .num_rows = 3,
                      .site = &site,
                      .norm = device_norm.data(),
                      .gathered = device_gathered.view(),
                      .u = device_u.view(),
                      .z = device_z.view(),
                      .numerics = numerics},
                     nullptr);
    EXPECT_LT(RelativeL2(device_z.Download(), z), numerics == Numerics::kProduct ? 2e-3 : 1e-5);
  }
}

}  // namespace
}  // namespace fathom::ops
