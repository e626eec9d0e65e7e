#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops/router/router.h"

namespace fathom::ops {

void RouterReference(const RouterArgs& args) {
  const int k = args.top_k;
  const int64_t num_experts = args.logits.cols;
  std::vector<double> score(num_experts);
  std::vector<int32_t> order(num_experts);
  for (int64_t t = 0; t < args.logits.rows; ++t) {
    const float* logits = args.logits.f32_row(t);
    for (int64_t e = 0; e < num_experts; ++e) {
      const double x = logits[e];
      score[e] = std::sqrt(x > 20 ? x : std::log1p(std::exp(x)));
    }
    int32_t* experts = args.experts + t * k;
    float* weights = args.weights + t * k;
    if (args.tid2eid != nullptr) {
      for (int i = 0; i < k; ++i) {
        experts[i] = static_cast<int32_t>(args.tid2eid[int64_t{args.token[t]} * k + i]);
      }
    } else {
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return static_cast<float>(score[a]) + args.bias[a] >
               static_cast<float>(score[b]) + args.bias[b];
      });
      std::copy_n(order.begin(), k, experts);
    }
    std::sort(experts, experts + k);
    double sum = 0;
    for (int i = 0; i < k; ++i) sum += score[experts[i]];
    for (int i = 0; i < k; ++i) {
      weights[i] = static_cast<float>(score[experts[i]] / sum * args.scale);
    }
  }
}

}  // namespace fathom::ops
