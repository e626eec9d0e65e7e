#include <algorithm>
#include <cmath>
#include <vector>

#include "core/status.h"
#include "ops/hyper_connection/hyper_connection.h"
#include "ops/norm_rope_insert/norm_rope_insert.h"

namespace fathom::ops {
namespace {

constexpr int S = kStreams;

float Round(float x, Numerics numerics) {
  return numerics == Numerics::kProduct ? RoundBf16(x) : x;
}

double Sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

// X[k] <- post[k] * o + sum_j comb[j,k] * X[j]
void Post(const HyperConnectionArgs& args, int64_t t) {
  const int64_t d = args.x.cols / S;
  float* x = args.x.f32_row(t);
  const float* o = args.o.f32_row(t);
  const float* post = args.post + t * S;
  const float* comb = args.comb + t * S * S;
  for (int64_t i = 0; i < d; ++i) {
    double y[S];
    for (int k = 0; k < S; ++k) {
      y[k] = static_cast<double>(post[k]) * o[i];
      for (int j = 0; j < S; ++j) y[k] += static_cast<double>(comb[j * S + k]) * x[j * d + i];
    }
    for (int k = 0; k < S; ++k) x[k * d + i] = Round(static_cast<float>(y[k]), args.numerics);
  }
}

void Sinkhorn(double* c, int iterations, double eps) {
  for (int j = 0; j < S; ++j) {
    const double top = *std::max_element(c + j * S, c + j * S + S);
    double sum = 0;
    for (int k = 0; k < S; ++k) sum += c[j * S + k] = std::exp(c[j * S + k] - top);
    for (int k = 0; k < S; ++k) c[j * S + k] = c[j * S + k] / sum + eps;
  }
  for (int round = 0; round < iterations; ++round) {
    for (int j = 0; round > 0 && j < S; ++j) {
      double sum = eps;
      for (int k = 0; k < S; ++k) sum += c[j * S + k];
      for (int k = 0; k < S; ++k) c[j * S + k] /= sum;
    }
    for (int k = 0; k < S; ++k) {
      double sum = eps;
      for (int j = 0; j < S; ++j) sum += c[j * S + k];
      for (int j = 0; j < S; ++j) c[j * S + k] /= sum;
    }
  }
}

void Pre(const HyperConnectionArgs& args, int64_t t) {
  const HyperConnectionSite& site = *args.site;
  const int64_t n = args.x.cols;
  const int64_t d = n / S;
  const float* x = args.x.f32_row(t);
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += static_cast<double>(x[i]) * x[i];
  const double rho = 1.0 / std::sqrt(squares / static_cast<double>(n) + kNormEps);
  std::vector<double> mix(site.mixes);
  for (int m = 0; m < site.mixes; ++m) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(site.fn[m * n + i]) * x[i];
    mix[m] = sum * rho;
  }
  double pre[S];
  for (int j = 0; j < S; ++j) {
    pre[j] = Sigmoid(mix[j] * site.scale[0] + site.base[j]) + args.eps;
  }
  if (site.mixes > S) {
    for (int k = 0; k < S; ++k) {
      args.post[t * S + k] =
          static_cast<float>(2.0 * Sigmoid(mix[S + k] * site.scale[1] + site.base[S + k]));
    }
    double comb[S * S];
    for (int i = 0; i < S * S; ++i) comb[i] = mix[2 * S + i] * site.scale[2] + site.base[2 * S + i];
    Sinkhorn(comb, args.sinkhorn_iterations, args.eps);
    for (int i = 0; i < S * S; ++i) args.comb[t * S * S + i] = static_cast<float>(comb[i]);
  }
  float* u = args.u.f32_row(t);
  for (int64_t i = 0; i < d; ++i) {
    double sum = 0;
    for (int j = 0; j < S; ++j) sum += pre[j] * x[j * d + i];
    u[i] = Round(static_cast<float>(sum), args.numerics);
  }
}

}  // namespace

void HyperConnectionReference(const HyperConnectionArgs& args) {
  for (int64_t t = 0; t < args.x.rows; ++t) {
    if (!args.o.empty()) Post(args, t);
    if (args.site != nullptr) Pre(args, t);
  }
  if (args.norm != nullptr) {
    RmsNormReference({.x = TopRows(args.u, args.x.rows),
                      .weight = args.norm,
                      .y = TopRows(args.z, args.x.rows),
                      .numerics = args.numerics});
  }
}

}  // namespace fathom::ops
