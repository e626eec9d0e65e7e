#include "ops/norm_rope_insert/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "ops/numerics.h"

namespace fathom::ops {

RopeFrequencies PlainRope(double theta) {
  RopeFrequencies out;
  for (int i = 0; i < kRopePairs; ++i) {
    // The power is computed in f32, as the model's own code does (model.md 4.1).
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(kRopeDim);
    out.f[i] = 1.0f / std::pow(static_cast<float>(theta), exponent);
  }
  return out;
}

RopeFrequencies YarnRope(double theta, const YarnParams& yarn) {
  const auto correction = [&](double beta) {
    return kRopeDim * std::log(yarn.original_max_position / (2 * std::numbers::pi * beta)) /
           (2 * std::log(theta));
  };
  const double low = std::max(std::floor(correction(yarn.beta_fast)), 0.0);
  double high = std::min(std::ceil(correction(yarn.beta_slow)), static_cast<double>(kRopeDim - 1));
  if (high <= low) high = low + 0.001;  // a degenerate ramp is a step
  RopeFrequencies out = PlainRope(theta);
  for (int i = 0; i < kRopePairs; ++i) {
    const float ramp = std::clamp(static_cast<float>((i - low) / (high - low)), 0.0f, 1.0f);
    out.f[i] = out.f[i] / static_cast<float>(yarn.factor) * ramp + out.f[i] * (1.0f - ramp);
  }
  return out;
}

void RopeTableRow(const RopeFrequencies& frequencies, int64_t position, float* table) {
  const float t = static_cast<float>(position);
  for (int i = 0; i < kRopePairs; ++i) {
    const float angle = t * frequencies.f[i];
    table[2 * i] = std::cos(angle);
    table[2 * i + 1] = std::sin(angle);
  }
}

void RotateRow(float* x, const float* table, bool inverse) {
  for (int i = 0; i < kRopePairs; ++i) {
    const float c = table[2 * i];
    const float s = inverse ? -table[2 * i + 1] : table[2 * i + 1];
    const float a = x[2 * i];
    const float b = x[2 * i + 1];
    x[2 * i] = a * c - b * s;
    x[2 * i + 1] = a * s + b * c;
  }
}

}  // namespace fathom::ops
