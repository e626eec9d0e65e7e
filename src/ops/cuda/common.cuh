// Device code shared by the kernels: loads and stores of activations, rounding, reductions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "core/matrix.h"
#include "ops/cuda/device.h"
#include "ops/numerics.h"

namespace fathom::ops::cuda {

__device__ inline float ToFloat(float x) {
  return x;
}
__device__ inline float ToFloat(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

template <class T>
__device__ inline T FromFloat(float x);
template <>
__device__ inline float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// rn_bf16 of model.md, kept as float32.
__device__ inline float RoundBf16(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}
__device__ inline float RoundIf(float x, bool round) {
  return round ? RoundBf16(x) : x;
}

// Smallest power of two >= x, from the bits (model.md 0.2).
__device__ inline float PowerOfTwoUp(float x) {
  const unsigned bits = __float_as_uint(x);
  return __uint_as_float(((bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1u : 0u)) << 23);
}

__device__ inline unsigned char ToE4m3(float x) {
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}
__device__ inline float FromE4m3(unsigned char code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}
__device__ inline float FromE8m0(unsigned char byte) {
  return byte == 0 ? 0x1p-127f : __uint_as_float(static_cast<unsigned>(byte) << 23);
}

__device__ inline float WarpSum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
__device__ inline float WarpMax(float x) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

// Calls fn(T{}) with the element type of an activation matrix.
template <class Fn>
void WithActivationType(DType type, Fn&& fn) {
  if (type == DType::kBF16) {
    fn(__nv_bfloat16{});
  } else {
    fn(float{});
  }
}

inline unsigned Blocks(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

}  // namespace fathom::ops::cuda
