#include <algorithm>
#include <cfloat>
#include <cmath>

#include "ops/router/router.h"

namespace fathom::ops {
namespace {

// sqrt(softplus(x)); log1p keeps it positive where exp(x) underflows against 1 (x < -16.6).
// Floored so that a token all of whose chosen experts vanish still divides by something.
float SqrtSoftplus(float x) {
  return std::max(std::sqrt(x > 20.0f ? x : std::log1p(std::exp(x))), FLT_MIN);
}

}  // namespace

void RouterCpu(const RouterArgs& args, ThreadPool& pool) {
  const int k = args.top_k;
  const int64_t num_experts = args.logits.cols;
  pool.ParallelFor(args.logits.rows, 64, [&](int64_t begin, int64_t end, int worker) {
    auto* score = static_cast<float*>(pool.Scratch(worker, num_experts * 2 * sizeof(float)));
    float* biased = score + num_experts;
    for (int64_t t = begin; t < end; ++t) {
      const float* logits = args.logits.f32_row(t);
      int32_t* experts = args.experts + t * k;
      float* weights = args.weights + t * k;
      if (args.tid2eid != nullptr) {
        for (int i = 0; i < k; ++i) {
          experts[i] = static_cast<int32_t>(args.tid2eid[int64_t{args.token[t]} * k + i]);
          score[experts[i]] = SqrtSoftplus(logits[experts[i]]);
        }
      } else {
        for (int64_t e = 0; e < num_experts; ++e) {
          score[e] = SqrtSoftplus(logits[e]);
          biased[e] = score[e] + args.bias[e];
        }
        for (int i = 0; i < k; ++i) {  // k is 2 to 6: repeated maximum beats any sort
          const auto best = std::max_element(biased, biased + num_experts) - biased;
          experts[i] = static_cast<int32_t>(best);
          biased[best] = -FLT_MAX;
        }
      }
      std::sort(experts, experts + k);
      float sum = 0;
      for (int i = 0; i < k; ++i) sum += score[experts[i]];
      for (int i = 0; i < k; ++i) weights[i] = score[experts[i]] / sum * args.scale;
    }
  });
}

}  // namespace fathom::ops
