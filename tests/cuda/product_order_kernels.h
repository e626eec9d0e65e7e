// Chains of tensor core products, by mma and by wgmma.
#pragma once

#include <cstdint>

namespace fathom::ops {

// d [64, 64] f32 = a [64, k] b [64, k] transposed, both bf16 and row-major on the device, k a
// multiple of 64: one chain of products of 16 channels from zero, in ascending order.
void ChainByMma(const uint16_t* a, const uint16_t* b, int k, float* d);
void ChainByWgmma(const uint16_t* a, const uint16_t* b, int k, float* d);

}  // namespace fathom::ops
