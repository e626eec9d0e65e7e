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

// Greater for greater values; 0 for what is never chosen, NaN and -infinity.
__device__ unsigned Key(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // no negative zero
  if (!(x > -INFINITY)) return 0;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

constexpr int kThreads = 256;

// A block per token; the first warp chooses. Shared: scores [E], then Key of the biased ones [E].
__global__ void __launch_bounds__(kThreads) Route(RouterParams p) {
  extern __shared__ double scores[];
  auto* const keys = reinterpret_cast<unsigned*>(scores + p.experts);
  constexpr unsigned kAll = 0xffffffffu;
  cuda::LetNextStart();
  cuda::WaitForPrevious();
  const int64_t t = blockIdx.x;
  const auto thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const float* logits = p.logits + t * p.stride;
  const bool learned = p.tid2eid == nullptr;
  if (learned) {
    for (int e = thread; e < p.experts; e += kThreads) {
      scores[e] = Score(logits[e]);
      keys[e] = Key(static_cast<float>(scores[e]) + p.bias[e]);
    }
    __syncthreads();
  }
  if (thread >= 32) return;
  int mine = -1;  // the expert this lane holds, lanes below top_k
  if (learned) {
    for (int round = 0; round < p.top_k; ++round) {
      unsigned best = 0;
      int at = p.experts;
      for (int e = lane; e < p.experts; e += 32) {
        if (keys[e] > best) best = keys[e], at = e;
      }
      const unsigned most = __reduce_max_sync(kAll, best);
      at = __reduce_min_sync(kAll, best == most ? at : p.experts);
      if (at == p.experts) at = round;  // only NaN is left: any expert, but one that exists
      if (lane == round) mine = at;
      if (lane == 0) keys[at] = 0;
      __syncwarp();
    }
  } else if (lane < p.top_k) {
    mine = static_cast<int>(p.tid2eid[int64_t{p.token[t]} * p.top_k + lane]);
  }
  // Rank by id: the order in which experts are written (and summed).
  int rank = 0;
  for (int i = 0; i < p.top_k; ++i) {
    const int other = __shfl_sync(kAll, mine, i);
    rank += other < mine || (other == mine && i < lane);
  }
  const double score = lane >= p.top_k ? 0.0 : learned ? scores[mine] : Score(logits[mine]);
  double sum = score;
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAll, sum, offset);
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
  cuda::LaunchOverlapped(Route, static_cast<unsigned>(args.logits.rows), kThreads,
                         params.experts * static_cast<int64_t>(sizeof(double) + sizeof(unsigned)),
                         stream, 1, params);
}

bool GateAndRouteCudaTakes(const LinearArgs&, const RouterArgs&) {
  return false;
}
void GateAndRouteCuda(const LinearArgs&, const RouterArgs&, CudaStream) {}

}  // namespace fathom::ops
