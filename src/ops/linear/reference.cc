#include <vector>

#include "ops/linear/linear.h"
#include "ops/quantise/quantise.h"

namespace fathom::ops {

float WeightAt(const LinearWeight& weight, int64_t o, int64_t i) {
  switch (weight.format) {
    case WeightFormat::kF32: return static_cast<const float*>(weight.data)[o * weight.in + i];
    case WeightFormat::kBF16:
      return Bf16ToF32(static_cast<const bf16_t*>(weight.data)[o * weight.in + i]);
    case WeightFormat::kFp8Block128: {
      const uint8_t byte = static_cast<const uint8_t*>(weight.data)[o * weight.in + i];
      const int64_t tiles = (weight.in + 127) / 128;
      return E4m3ToF32(byte) * E8m0ToF32(weight.scale[o / 128 * tiles + i / 128]);
    }
    case WeightFormat::kFp4Block32: {
      const uint8_t byte = static_cast<const uint8_t*>(weight.data)[(o * weight.in + i) / 2];
      const uint8_t code = (byte >> (4 * (i & 1))) & 15;
      return E2m1ToF32(code) * E8m0ToF32(weight.scale[o * (weight.in / 32) + i / 32]);
    }
  }
  return 0;
}

void LinearReference(const LinearArgs& args) {
  const LinearWeight& w = *args.weight;
  const bool product = args.numerics == Numerics::kProduct;
  std::vector<float> row(w.in);
  std::vector<float> x(args.x.rows * w.in);
  for (int64_t t = 0; t < args.x.rows; ++t) {
    row.assign(args.x.f32_row(t), args.x.f32_row(t) + w.in);
    if (product && w.format == WeightFormat::kBF16) {
      for (float& value : row) value = RoundBf16(value);
    } else if (product && w.format != WeightFormat::kF32) {
      QuantiseActivationRow(row.data(), w.in);
    }
    std::copy(row.begin(), row.end(), x.begin() + t * w.in);
  }
  std::vector<double> weights(w.in);
  for (int64_t o = 0; o < w.out; ++o) {
    for (int64_t i = 0; i < w.in; ++i) weights[i] = WeightAt(w, o, i);
    for (int64_t t = 0; t < args.x.rows; ++t) {
      double sum = 0;
      for (int64_t i = 0; i < w.in; ++i) sum += weights[i] * x[t * w.in + i];
      const float y = static_cast<float>(sum);
      args.y.f32_row(t)[o] = product && args.round_output ? RoundBf16(y) : y;
    }
  }
}

}  // namespace fathom::ops
