// Shared by the tests of linear, experts and output_projection: random weights in every format,
// matrices with guarded padding, and the comparison of a product with its reference.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/cpu_features.h"
#include "core/dtype.h"
#include "core/matrix.h"
#include "ops/linear/linear.h"

namespace fathom::ops::testing {

inline std::vector<Isa> AvailableIsas() {
  const Isa current = CpuIsa();
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (SetCpuIsa(isa)) isas.push_back(isa);
  }
  SetCpuIsa(current);
  return isas;
}

struct IsaScope {
  explicit IsaScope(Isa isa) : before(CpuIsa()) { SetCpuIsa(isa); }
  ~IsaScope() { SetCpuIsa(before); }
  IsaScope(const IsaScope&) = delete;
  IsaScope& operator=(const IsaScope&) = delete;
  const Isa before;
};

// A packed weight with its checkpoint bytes. Values are of order 1 / sqrt(in).
struct OwnedWeight {
  OwnedWeight(WeightFormat format, int64_t out, int64_t in, uint32_t seed) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    const float sigma = 1.0f / std::sqrt(static_cast<float>(in));
    const uint8_t middle = static_cast<uint8_t>(127 + std::ilogb(sigma));
    switch (format) {
      case WeightFormat::kF32:
        data.resize(out * in * 4);
        for (int64_t i = 0; i < out * in; ++i) {
          const float v = normal(rng) * sigma;
          std::memcpy(data.data() + 4 * i, &v, 4);
        }
        break;
      case WeightFormat::kBF16:
        data.resize(out * in * 2);
        for (int64_t i = 0; i < out * in; ++i) {
          const bf16_t v = F32ToBf16(normal(rng) * sigma);
          std::memcpy(data.data() + 2 * i, &v, 2);
        }
        break;
      case WeightFormat::kFp8Block128:
        data.resize(out * in);
        for (uint8_t& byte : data) byte = F32ToE4m3(normal(rng) * 64);
        scale.resize(((out + 127) / 128) * ((in + 127) / 128));
        for (uint8_t& byte : scale) byte = static_cast<uint8_t>(middle - 7 + rng() % 4);
        break;
      case WeightFormat::kFp4Block32:
        data.resize(out * in / 2);
        for (uint8_t& byte : data) byte = static_cast<uint8_t>(rng());
        scale.resize(out * (in / 32));
        for (uint8_t& byte : scale) byte = static_cast<uint8_t>(middle - 2 + rng() % 4);
        break;
    }
    weight.format = format;
    weight.out = out;
    weight.in = in;
    Pack();
  }
  OwnedWeight(OwnedWeight&&) = default;

  // Points the weight at data and scale as they are now.
  void Pack() {
    weight.data = data.data();
    weight.scale = scale.empty() ? nullptr : scale.data();
    PackLinearCpu(weight);
  }

  std::vector<uint8_t> data;
  std::vector<uint8_t> scale;
  LinearWeight weight;
};

// rows x cols with `padding` guard floats after every row, all NaN until written.
struct PaddedMatrix {
  PaddedMatrix(int64_t rows_, int64_t cols_, int64_t padding)
      : rows(rows_),
        cols(cols_),
        stride(cols_ + padding),
        data(rows_ * stride, std::numeric_limits<float>::quiet_NaN()) {}

  MatrixView view() { return {data.data(), DType::kF32, rows, cols, stride}; }

  void Fill(float value) {
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t i = 0; i < cols; ++i) data[t * stride + i] = value;
    }
  }

  void Randomise(uint32_t seed, bool bf16) {
    std::mt19937 rng(seed * 7919 + 1);
    std::normal_distribution<float> normal;
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t i = 0; i < cols; ++i) {
        const float v = normal(rng);
        data[t * stride + i] = bf16 ? RoundBf16(v) : v;
      }
    }
  }

  bool PaddingUntouched() const {
    for (int64_t t = 0; t < rows; ++t) {
      for (int64_t i = cols; i < stride; ++i) {
        if (!std::isnan(data[t * stride + i])) return false;
      }
    }
    return true;
  }

  int64_t rows;
  int64_t cols;
  int64_t stride;
  std::vector<float> data;
};

// |got - expected| within the error of an f32 sum over `in` terms in any order, plus one bf16 ulp
// (half from each side) when rounded. The bound uses |w||x|, so it fails for a wrong term.
inline void ExpectClose(const LinearWeight& w, MatrixView x, MatrixView expected, MatrixView got,
                        bool rounded) {
  std::vector<double> magnitude(w.in);
  for (int64_t o = 0; o < w.out; ++o) {
    for (int64_t i = 0; i < w.in; ++i) magnitude[i] = std::fabs(WeightAt(w, o, i));
    for (int64_t t = 0; t < x.rows; ++t) {
      double sum = 0;
      for (int64_t i = 0; i < w.in; ++i) sum += magnitude[i] * std::fabs(x.f32_row(t)[i]);
      const double want = expected.f32_row(t)[o];
      // Quantisation may raise a value by 1/16; partial sums of 64 terms, then in/64 of them.
      double bound = sum * 0x1p-24 * (64 + w.in / 64.0) * 1.1;
      if (rounded) bound += std::fabs(want) * 0x1p-7;
      ASSERT_LE(std::fabs(got.f32_row(t)[o] - want), bound) << "row " << t << " output " << o;
    }
  }
}

}  // namespace fathom::ops::testing
