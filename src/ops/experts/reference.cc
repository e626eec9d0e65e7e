#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/experts/experts.h"

namespace fathom::ops {
namespace {

// y_e of one token (model.md 7.2).
std::vector<float> Expert(const ExpertWeights& w, const float* z, float limit, float weight,
                          Numerics numerics) {
  std::vector<float> in(z, z + w.w1.in);
  std::vector<float> gate(w.w1.out);
  std::vector<float> up(w.w3.out);
  std::vector<float> down(w.w2.out);
  const MatrixView x = F32Matrix(in.data(), 1, w.w1.in);
  LinearReference(
      {.x = x, .weight = &w.w1, .y = F32Matrix(gate.data(), 1, w.w1.out), .numerics = numerics});
  LinearReference(
      {.x = x, .weight = &w.w3, .y = F32Matrix(up.data(), 1, w.w3.out), .numerics = numerics});
  for (size_t i = 0; i < gate.size(); ++i) {
    const float g = std::min(gate[i], limit);
    const float u = std::clamp(up[i], -limit, limit);
    const float silu = static_cast<float>(g / (1.0 + std::exp(-static_cast<double>(g))));
    const float a = silu * u * weight;
    gate[i] = numerics == Numerics::kProduct ? RoundBf16(a) : a;
  }
  LinearReference({.x = F32Matrix(gate.data(), 1, w.w2.in),
                   .weight = &w.w2,
                   .y = F32Matrix(down.data(), 1, w.w2.out),
                   .numerics = numerics});
  return down;
}

}  // namespace

void ExpertsReference(const ExpertsArgs& args) {
  for (int64_t t = 0; t < args.z.rows; ++t) {
    std::vector<float> sum(args.y.cols, 0.0f);
    const auto add = [&](const std::vector<float>& y) {
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += y[i];
    };
    for (int j = 0; j < args.top_k; ++j) {
      const int64_t at = t * args.top_k + j;
      add(Expert(args.experts[args.chosen[at]], args.z.f32_row(t), args.limit, args.weights[at],
                 args.numerics));
    }
    add(Expert(*args.shared, args.z.f32_row(t), args.shared_limit, 1.0f, args.numerics));
    for (size_t i = 0; i < sum.size(); ++i) {
      args.y.f32_row(t)[i] = args.numerics == Numerics::kProduct ? RoundBf16(sum[i]) : sum[i];
    }
  }
}

}  // namespace fathom::ops
