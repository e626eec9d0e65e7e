#include <algorithm>
#include <cmath>

#include "core/dtype.h"
#include "ops/experts/experts_kernels.h"

namespace fathom::ops {
namespace {

void Swiglu(const float* g, const float* u, int64_t n, float limit, float weight, bool round,
            float* a) {
  for (int64_t i = 0; i < n; ++i) {
    const float gate = std::min(g[i], limit);
    const float up = std::clamp(u[i], -limit, limit);
    const float value = gate / (1.0f + std::exp(-gate)) * up * weight;
    a[i] = round ? RoundBf16(value) : value;
  }
}

void Add(const float* x, int64_t n, bool round, float* y) {
  for (int64_t i = 0; i < n; ++i) {
    const float sum = y[i] + x[i];
    y[i] = round ? RoundBf16(sum) : sum;
  }
}

}  // namespace

const ExpertsKernels kExpertsScalar = {Swiglu, Add};

}  // namespace fathom::ops
