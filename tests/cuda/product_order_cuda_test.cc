// mma and wgmma add the same products in the same way: kernels for few rows and for many may mix
// them and still give a row the same bits.
#include <bit>
#include <random>

#include "cuda/device_memory.h"
#include "cuda/product_order_kernels.h"

namespace fathom::ops {
namespace {

TEST(ProductOrderCuda, MmaAndWgmmaGiveTheSameBits) {
  FATHOM_NEEDS_DEVICE();
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  for (const int k : {64, 512, 4'096}) {
    // Magnitudes over many binades: what a product loses to alignment would show.
    const auto values = [&] {
      std::vector<uint16_t> out(static_cast<size_t>(64 * k));
      for (uint16_t& v : out) {
        v = std::bit_cast<uint16_t>(
            F32ToBf16(std::ldexp(normal(random), static_cast<int>(random() % 16) - 8)));
      }
      return out;
    };
    const DeviceArray<uint16_t> a(values()), b(values());
    DeviceArray<float> by_mma(64 * 64), by_wgmma(64 * 64);
    ChainByMma(a.data(), b.data(), k, by_mma.data());
    ChainByWgmma(a.data(), b.data(), k, by_wgmma.data());
    const std::vector<float> want = by_mma.Download(), got = by_wgmma.Download();
    int differ = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      differ += std::bit_cast<uint32_t>(want[i]) != std::bit_cast<uint32_t>(got[i]);
    }
    EXPECT_EQ(differ, 0) << k << " channels, of " << want.size();
  }
}

}  // namespace
}  // namespace fathom::ops
