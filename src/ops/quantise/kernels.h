// Per-ISA row encoders, byte-equal with EncodeRow.
#pragma once

#include <cstdint>

namespace fathom::ops {

struct QuantiseKernels {
  void (*encode_fp8_main)(const float* x, uint8_t* data, uint8_t* scale);
  // channels is a multiple of 16; lanes are rounded to bfloat16.
  void (*encode_bf16)(const float* x, uint16_t* data, int channels);
};

extern const QuantiseKernels kQuantiseAvx2;
extern const QuantiseKernels kQuantiseAvx512;

}  // namespace fathom::ops
