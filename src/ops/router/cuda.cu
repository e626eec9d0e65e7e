#include "ops/router/cuda.h"
#include "ops/router/cuda_choose.cuh"

namespace fathom::ops {
namespace {

using namespace router;

struct RouterParams {
  const float* logits;
  int64_t stride;
  int experts;
  const float* bias;
  const int64_t* tid2eid;
  const int32_t* token;
  int top_k;
  float scale;
  int32_t* chosen;
  float* weights;
};

constexpr int kThreads = 256;

// A block per token; the first warp chooses, of at most 32 kSlots experts. Shared: scores [E], then
// Key of the biased ones [E].
template <int kSlots>
__global__ void __launch_bounds__(kThreads) Route(RouterParams p) {
  extern __shared__ double scores[];
  auto* const keys = reinterpret_cast<unsigned*>(scores + p.experts);
  constexpr int kEach = (32 * kSlots + kThreads - 1) / kThreads;  // experts of a thread
  const int64_t t = blockIdx.x;
  const auto thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const float* logits = p.logits + t * p.stride;
  const bool learned = p.tid2eid == nullptr;
  cuda::LetNextStart();
  float bias[kEach];  // constant: asked for while the kernel in front runs
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int e = thread + i * kThreads;
    bias[i] = learned && e < p.experts ? p.bias[e] : 0.0f;
  }
  cuda::WaitForPrevious();
  if (learned) {
    float logit[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int e = thread + i * kThreads;
      logit[i] = e < p.experts ? logits[e] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int e = thread + i * kThreads;
      if (e >= p.experts) break;
      scores[e] = Score(logit[i]);
      keys[e] = Key(static_cast<float>(scores[e]) + bias[i]);
    }
    __syncthreads();
  }
  if (thread >= 32) return;
  int mine = -1;
  if (learned) {
    unsigned key[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      key[j] = 32 * j + lane < p.experts ? keys[32 * j + lane] : 0;
    }
    mine = Choose(key, p.experts, p.top_k);
  } else if (lane < p.top_k) {
    mine = static_cast<int>(p.tid2eid[int64_t{p.token[t]} * p.top_k + lane]);
  }
  const double score = lane >= p.top_k ? 0.0 : learned ? scores[mine] : Score(logits[mine]);
  WriteRoute(mine, score, p.top_k, p.scale, p.chosen + t * p.top_k, p.weights + t * p.top_k);
}

}  // namespace

void RouterCuda(const RouterArgs& args, CudaStream stream) {
  const RouterParams params = {
      args.logits.f32(), args.logits.stride, static_cast<int>(args.logits.cols),
      args.bias,         args.tid2eid,       args.token,
      args.top_k,        args.scale,         args.experts,
      args.weights};
  const auto kernel = params.experts <= 256   ? Route<8>
                      : params.experts <= 384 ? Route<12>
                                              : Route<kRouterCudaExperts / 32>;
  cuda::LaunchOverlapped(kernel, static_cast<unsigned>(args.logits.rows), kThreads,
                         params.experts * static_cast<int64_t>(sizeof(double) + sizeof(unsigned)),
                         stream, 1, params);
}

}  // namespace fathom::ops
