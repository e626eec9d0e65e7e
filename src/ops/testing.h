// Small helpers for op tests: random data, and running a test under every instruction set.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "core/cpu_features.h"
#include "core/dtype.h"
#include "core/matrix.h"

namespace fathom::ops {

inline std::vector<float> RandomFloats(int64_t n, uint64_t seed, float scale = 1.0f,
                                       bool bf16 = false) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> out(n);
  for (float& x : out) x = bf16 ? RoundBf16(normal(generator)) : normal(generator);
  return out;
}

// ||a - b|| / ||b||, infinite when a holds a NaN.
inline double RelativeL2(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i])) return INFINITY;
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / std::max(norm, 1e-30));
}

// Calls fn(isa) for every instruction set this machine has, restoring the choice afterwards.
template <class Fn>
void ForEachIsa(Fn&& fn) {
  const Isa before = CpuIsa();
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (!SetCpuIsa(isa)) continue;
    SCOPED_TRACE(std::string(IsaName(isa)));
    fn(isa);
  }
  SetCpuIsa(before);
}

}  // namespace fathom::ops
