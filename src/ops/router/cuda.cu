#include <cfloat>

#include "ops/cuda/hopper.cuh"
#include "ops/router/cuda.h"

namespace fathom::ops {
namespace {

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

// sqrt(softplus(x)); floored so that a token all of whose chosen experts vanish still divides by
// something. Double is cheap here and leaves the choice to the logits alone.
__device__ double Score(float x) {
  const double v = x;
  return fmax(sqrt(v > 20 ? v : log1p(exp(v))), static_cast<double>(FLT_MIN));
}

// A warp (one block) per token. Shared: biased scores [E].
__global__ void Route(RouterParams p) {
  extern __shared__ float biased[];
  cuda::LetNextStart();
  cuda::WaitForPrevious();
  const int64_t t = blockIdx.x;
  const auto lane = static_cast<int>(threadIdx.x);
  const float* logits = p.logits + t * p.stride;
  int mine = -1;  // the expert this lane holds, lanes below top_k
  if (p.tid2eid != nullptr) {
    if (lane < p.top_k) {
      mine = static_cast<int>(p.tid2eid[int64_t{p.token[t]} * p.top_k + lane]);
    }
  } else {
    for (int e = lane; e < p.experts; e += 32) {
      biased[e] = static_cast<float>(Score(logits[e])) + p.bias[e];
    }
    __syncwarp();
    for (int round = 0; round < p.top_k; ++round) {
      float best = -INFINITY;
      int at = p.experts;
      for (int e = lane; e < p.experts; e += 32) {
        if (biased[e] > best) best = biased[e], at = e;
      }
      for (int offset = 16; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, best, offset);
        const int other_at = __shfl_xor_sync(0xffffffffu, at, offset);
        if (other > best || (other == best && other_at < at)) best = other, at = other_at;
      }
      if (at == p.experts) at = round;  // only NaN is left: any expert, but one that exists
      if (lane == round) mine = at;
      if (lane == 0) biased[at] = -INFINITY;
      __syncwarp();
    }
  }
  // Rank by id: the order in which experts are written (and summed).
  int rank = 0;
  for (int i = 0; i < p.top_k; ++i) {
    const int other = __shfl_sync(0xffffffffu, mine, i);
    rank += other < mine || (other == mine && i < lane);
  }
  const double score = lane < p.top_k ? Score(logits[mine]) : 0.0;
  double sum = score;
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (lane < p.top_k) {
    p.chosen[t * p.top_k + rank] = mine;
    p.weights[t * p.top_k + rank] = static_cast<float>(score / sum * p.scale);
  }
}

}  // namespace

void RouterCuda(const RouterArgs& args, CudaStream stream) {
  const RouterParams params = {
      args.logits.f32(), args.logits.stride, static_cast<int>(args.logits.cols),
      args.bias,         args.tid2eid,       args.token,
      args.top_k,        args.scale,         args.experts,
      args.weights};
  cuda::LaunchOverlapped(Route, static_cast<unsigned>(args.logits.rows), 32,
                         params.experts * static_cast<int64_t>(sizeof(float)), stream, 1, params);
}

}  // namespace fathom::ops
