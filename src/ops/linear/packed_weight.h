// The CPU backend's form of a weight: stored precision, re-ordered for the panel kernels.
//
// Outputs come in panels of 32, inputs are padded with zeros to a multiple of 4 (FP4: of 32). The
// last panel is padded with zero weights. Within a panel inputs go in pairs (k, k+1); a "slot" is
// one element of [32 outputs][2 inputs], slot = 2 * output + (k & 1):
//
//   kF32      per input 32 floats, outputs ascending.
//   kBF16     per pair 64 words, slots ascending: 16 outputs fill a 512-bit register.
//   kFp8      per pair 64 bytes. 128-bit lane L holds outputs 4L..4L+3 in its low half and
//             16+4L..16+4L+3 in its high half, so that interleaving two byte-lookup results with
//             vpunpck{l,h}bw yields outputs 0..15 and 16..31 in order.
//   kFp4      per two pairs 32 words. Nibble j of word i is slot i + 32 * (j & 1) of pair j / 2:
//             shifting the register right by 4j leaves one table index per word (and, with the
//             upper words, per dword).
#pragma once

#include <cstdint>
#include <memory>

#include "ops/linear/linear.h"
#include "ops/linear/linear_kernels.h"

namespace fathom::ops {

struct CpuPackedWeight : PackedWeight {
  WeightFormat format = WeightFormat::kBF16;
  int64_t out = 0;
  int64_t in = 0;
  int64_t depth = 0;   // padded inputs
  int64_t panels = 0;  // ceil(out / 32)
  int64_t panel_bytes = 0;
  int64_t panel_scales = 0;  // scale bytes of one panel
  struct Free {
    void operator()(uint8_t* p) const;
  };
  std::unique_ptr<uint8_t[], Free> data;   // [panels][panel_bytes]
  std::unique_ptr<uint8_t[], Free> scale;  // [panels][panel_scales]

  // The weight operands of panels [p, p + count).
  PanelJob Job(int64_t p, int64_t count = 1) const;
};

// The packed form of `weight`, checked to be there.
const CpuPackedWeight& Packed(const LinearWeight& weight);

// Bytes of one panel of padded depth `depth`.
int64_t PanelBytes(WeightFormat format, int64_t depth);

// The kernels of CpuIsa().
const LinearKernels& CurrentLinearKernels();

// What happens to a row of x before the product: nothing (kReference, F32), -> bf16 (BF16) or the
// activation quantiser (FP8, FP4).
void PrepareRow(const LinearKernels& kernels, WeightFormat format, Numerics numerics,
                const float* x, int64_t channels, int64_t padded, float* out);

}  // namespace fathom::ops
