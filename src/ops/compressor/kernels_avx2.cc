#include <immintrin.h>

#include <cstdint>

#include "ops/compressor/kernels.h"
#include "ops/vec16.h"

namespace fathom::ops {
namespace {

// Per lane: x > 0 ? yes : no.
inline V16 SelectPositive(V16 x, V16 yes, V16 no) {
  const __m256 zero = _mm256_setzero_ps();
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(x.lo, zero, _CMP_GT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(x.hi, zero, _CMP_GT_OQ))};
}

}  // namespace
}  // namespace fathom::ops

#include "ops/compressor/kernels.inc"

namespace fathom::ops {

const CompressorKernels kCompressorAvx2 = {
    Pool, Advance, Divide, AddRows, NormRope, EncodeFp4,
};

}  // namespace fathom::ops
