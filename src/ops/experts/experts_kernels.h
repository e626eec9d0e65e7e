// The element-wise parts of ExpertsCpu, one set per ISA. Plain declarations only: the per-ISA
// files include this header.
#pragma once

#include <cstdint>

namespace fathom::ops {

struct ExpertsKernels {
  // a[i] = silu(min(g[i], limit)) * clamp(u[i], +-limit) * weight, -> bf16 when `round`.
  // silu's exponential is within 2 ulp; an element's result does not depend on its place.
  void (*swiglu)(const float* g, const float* u, int64_t n, float limit, float weight, bool round,
                 float* a);
  // y[i] += x[i]; the sum -> bf16 when `round`.
  void (*add)(const float* x, int64_t n, bool round, float* y);
};

extern const ExpertsKernels kExpertsScalar;
extern const ExpertsKernels kExpertsAvx2;
extern const ExpertsKernels kExpertsAvx512;

}  // namespace fathom::ops
