#include <immintrin.h>

#include <cstdint>

#include "ops/compressor/kernels.h"
#include "ops/vec16.h"

namespace fathom::ops {
namespace {

// Per lane: x > 0 ? yes : no.
inline V16 SelectPositive(V16 x, V16 yes, V16 no) {
  const __mmask16 positive = _mm512_cmp_ps_mask(x.v, _mm512_setzero_ps(), _CMP_GT_OQ);
  return {_mm512_mask_blend_ps(positive, no.v, yes.v)};
}

}  // namespace
}  // namespace fathom::ops

#include "ops/compressor/kernels.inc"

namespace fathom::ops {

const CompressorKernels kCompressorAvx512 = {
    Pool, Advance, Divide, AddRows, NormRope, EncodeFp4,
};

}  // namespace fathom::ops
