#include "core/cpu_features.h"
#include "ops/numerics.h"
#include "ops/quantise/kernels.h"
#include "ops/quantise/quantise.h"

namespace fathom::ops {

void EncodeRowCpu(RowFormat format, int channels, const float* x, std::byte* data,
                  std::byte* scale) {
  const Isa isa = CpuIsa();
  if (isa != Isa::kScalar) {
    const QuantiseKernels& kernels = isa == Isa::kAvx512 ? kQuantiseAvx512 : kQuantiseAvx2;
    if (format == RowFormat::kFp8Main) {
      return kernels.encode_fp8_main(x, reinterpret_cast<uint8_t*>(data),
                                     reinterpret_cast<uint8_t*>(scale));
    }
    if (format == RowFormat::kBf16 && channels % 16 == 0) {
      return kernels.encode_bf16(x, reinterpret_cast<uint16_t*>(data), channels);
    }
  }
  EncodeRow(format, channels, x, data, scale);
}

}  // namespace fathom::ops
