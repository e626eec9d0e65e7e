// One launch per seam: a cluster of eight blocks per token, each with an eighth of the channels of
// all four streams, so that a single decoded token reads the 24 rows of `fn` from eight
// multiprocessors. The split is fixed: a token's sums do not depend on its batch.
#include <cooperative_groups.h>

#include "ops/cuda/hopper.cuh"
#include "ops/hyper_connection/cuda.h"

namespace fathom::ops {
namespace {

namespace cg = cooperative_groups;

constexpr int S = kStreams;
constexpr int kCluster = 8;
constexpr int kThreads = 256;
constexpr int kMixes = 24;

struct SeamParams {
  int64_t x_stride, o_stride, u_stride, z_stride;
  int64_t d;
  int64_t slice;  // channels per block
  HyperConnectionSite site;
  float* post;
  float* comb;
  const float* norm;
  int iterations;
  float eps;
  bool has_o, has_site, round;
};

__device__ float Sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

// Sums N values of every thread over the cluster, blocks in rank order; all threads get the totals
// in `total` [N]. `partial` [kThreads/32][N] and `mine` [N] are shared.
template <int N>
__device__ void ClusterSum(cg::cluster_group& cluster, const float (&value)[N], float* partial,
                           float* mine, float* total) {
  const auto thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float sum = cuda::WarpSum(value[i]);
    if (thread % 32 == 0) partial[thread / 32 * N + i] = sum;
  }
  __syncthreads();
  if (thread < N) {
    float sum = 0.0f;
    for (int w = 0; w < kThreads / 32; ++w) sum += partial[w * N + thread];
    mine[thread] = sum;
  }
  cluster.sync();
  if (thread < N) {
    float sum = 0.0f;
    for (int rank = 0; rank < kCluster; ++rank) sum += cluster.map_shared_rank(mine, rank)[thread];
    total[thread] = sum;
  }
  __syncthreads();
}

// Lanes 0..15 of a warp hold comb[j][k] at lane 4*j + k (model.md 3); the upper lanes repeat them.
__device__ float Sinkhorn(float value, int iterations, float eps) {
  const auto across = [](float x, int a, int b) {  // sum over two lane bits
    x += __shfl_xor_sync(0xffffffffu, x, a);
    return x + __shfl_xor_sync(0xffffffffu, x, b);
  };
  float top = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
  value = expf(value - top);
  // __fdividef is two units of the last place off at most: the forty divisions wait for each other.
  value = value / across(value, 1, 2) + eps;
  for (int round = 0; round < iterations; ++round) {
    if (round > 0) value = __fdividef(value, across(value, 1, 2) + eps);
    value = __fdividef(value, across(value, 4, 8) + eps);
  }
  return value;
}

template <class T>
__global__ void __launch_bounds__(kThreads) Seam(T* x, const T* o, T* u, T* z, SeamParams p) {
  extern __shared__ float streams[];  // [S][slice], then u [slice]
  __shared__ float partial[kThreads / 32 * (kMixes + 1)];
  __shared__ float mine[kMixes + 1], total[kMixes + 1];
  __shared__ float mine_u[1], total_u[1];
  cg::cluster_group cluster = cg::this_cluster();
  const auto rank = static_cast<int>(cluster.block_rank());
  const auto thread = static_cast<int>(threadIdx.x);
  const int64_t t = blockIdx.x / kCluster;
  const int64_t first = rank * p.slice;
  const auto count = static_cast<int>(max(int64_t{0}, min(p.slice, p.d - first)));
  float* collapsed = streams + S * p.slice;
  x += t * p.x_stride;
  u += t * p.u_stride;
  cuda::LetNextStart();
  if (p.has_site) {
    // The site's parameters are on their way to L2 while the kernel in front finishes.
    constexpr int kLine = 128 / sizeof(float);
    const auto lines = (count + kLine - 1) / kLine;
    for (int i = thread; i < p.site.mixes * S * lines; i += kThreads) {
      const float* at = p.site.fn + i / lines * p.d + first + i % lines * kLine;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    }
  }
  cuda::WaitForPrevious();

  float post[S], comb[S * S];
  if (p.has_o) {
    for (int k = 0; k < S; ++k) post[k] = p.post[t * S + k];
    for (int i = 0; i < S * S; ++i) comb[i] = p.comb[t * S * S + i];
  }
  for (int i = thread; i < count; i += kThreads) {
    float in[S];
#pragma unroll
    for (int j = 0; j < S; ++j) in[j] = cuda::ToFloat(x[j * p.d + first + i]);
    if (p.has_o) {
      const float site_output = cuda::ToFloat(o[t * p.o_stride + first + i]);
      float out[S];
#pragma unroll
      for (int k = 0; k < S; ++k) {
        out[k] = post[k] * site_output;
#pragma unroll
        for (int j = 0; j < S; ++j) out[k] += comb[j * S + k] * in[j];
      }
#pragma unroll
      for (int k = 0; k < S; ++k) {
        in[k] = cuda::RoundIf(out[k], p.round);
        x[k * p.d + first + i] = cuda::FromFloat<T>(in[k]);
      }
    }
#pragma unroll
    for (int j = 0; j < S; ++j) streams[j * p.slice + i] = in[j];
  }

  float squares[1] = {0.0f};
  if (p.has_site) {
    const int mixes = p.site.mixes;
    float sums[kMixes + 1] = {};
    for (int j = 0; j < S; ++j) {
      for (int i = thread; i < count; i += kThreads) {
        const float v = streams[j * p.slice + i];
        const float* fn = p.site.fn + j * p.d + first + i;
        sums[kMixes] += v * v;
        if (mixes == kMixes) {
#pragma unroll
          for (int m = 0; m < kMixes; ++m) sums[m] += fn[m * S * p.d] * v;
        } else {
#pragma unroll
          for (int m = 0; m < S; ++m) sums[m] += fn[m * S * p.d] * v;
        }
      }
    }
    ClusterSum(cluster, sums, partial, mine, total);
    const float rho = 1.0f / sqrtf(total[kMixes] / static_cast<float>(S * p.d) + kNormEps);
    float pre[S];
#pragma unroll
    for (int j = 0; j < S; ++j) {
      pre[j] = Sigmoid(total[j] * rho * p.site.scale[0] + p.site.base[j]) + p.eps;
    }
    if (mixes > S && rank == 0 && thread < 32) {
      if (thread < S) {
        p.post[t * S + thread] =
            2.0f * Sigmoid(total[S + thread] * rho * p.site.scale[1] + p.site.base[S + thread]);
      }
      const int cell = 2 * S + thread % (S * S);
      const float value =
          Sinkhorn(total[cell] * rho * p.site.scale[2] + p.site.base[cell], p.iterations, p.eps);
      if (thread < S * S) p.comb[t * S * S + thread] = value;
    }
    for (int i = thread; i < count; i += kThreads) {
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < S; ++j) sum += pre[j] * streams[j * p.slice + i];
      sum = cuda::RoundIf(sum, p.round);
      collapsed[i] = sum;
      squares[0] += sum * sum;
      u[first + i] = cuda::FromFloat<T>(sum);
    }
  } else if (p.norm != nullptr) {
    for (int i = thread; i < count; i += kThreads) {
      collapsed[i] = cuda::ToFloat(u[first + i]);
      squares[0] += collapsed[i] * collapsed[i];
    }
  }

  if (p.norm != nullptr) {
    ClusterSum(cluster, squares, partial, mine_u, total_u);
    const float r = 1.0f / sqrtf(total_u[0] / static_cast<float>(p.d) + kNormEps);
    for (int i = thread; i < count; i += kThreads) {
      z[t * p.z_stride + first + i] =
          cuda::FromFloat<T>(cuda::RoundIf(p.norm[first + i] * (collapsed[i] * r), p.round));
    }
  }
  cluster.sync();  // another block may still read this one's shared memory
}

}  // namespace

void HyperConnectionCuda(const HyperConnectionArgs& args, CudaStream stream) {
  const int64_t d = args.x.cols / S;
  const SeamParams params = {.x_stride = args.x.stride,
                             .o_stride = args.o.stride,
                             .u_stride = args.u.stride,
                             .z_stride = args.z.stride,
                             .d = d,
                             .slice = (d + kCluster - 1) / kCluster,
                             .site = args.site != nullptr ? *args.site : HyperConnectionSite{},
                             .post = args.post,
                             .comb = args.comb,
                             .norm = args.norm,
                             .iterations = args.sinkhorn_iterations,
                             .eps = args.eps,
                             .has_o = !args.o.empty(),
                             .has_site = args.site != nullptr,
                             .round = args.numerics == Numerics::kProduct};
  const size_t shared = static_cast<size_t>((S + 1) * params.slice) * sizeof(float);
  cuda::WithActivationType(args.x.dtype, [&]<class T>(T) {
    cuda::LaunchOverlapped(Seam<T>, static_cast<unsigned>(args.x.rows * kCluster), kThreads, shared,
                           stream, kCluster, static_cast<T*>(args.x.data),
                           static_cast<const T*>(args.o.data), static_cast<T*>(args.u.data),
                           static_cast<T*>(args.z.data), params);
  });
}

}  // namespace fathom::ops
