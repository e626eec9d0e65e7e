// One launch per seam. Few tokens: a cluster of eight blocks per token, each with an eighth of the
// channels of all four streams, so that a single decoded token reads the 24 rows of `fn` from eight
// multiprocessors; their sums meet by stores into each other's shared memory. Many tokens: a block
// for four of them, which share every value of `fn` it reads. Both add the same partial sums in the
// same order: a token's results do not depend on its batch.
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

// The streams of a channel after the site before: out[k] = post[k] o + sum over j of comb[j][k]
// in[j].
__device__ void Update(const float* post, const float* comb, const float (&in)[S], float o,
                       bool round, float (&out)[S]) {
#pragma unroll
  for (int k = 0; k < S; ++k) {
    out[k] = __fmul_rn(post[k], o);
#pragma unroll
    for (int j = 0; j < S; ++j) out[k] = __fmaf_rn(comb[j * S + k], in[j], out[k]);
    out[k] = cuda::RoundIf(out[k], round);
  }
}

__device__ float Collapse(const float* pre, const float (&in)[S], bool round) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < S; ++j) sum = __fmaf_rn(pre[j], in[j], sum);
  return cuda::RoundIf(sum, round);
}

// A mix from its sum over the channels; kind: 0 pre, 1 post, 2 comb.
__device__ float Mix(const SeamParams& p, const float* total, float rho, int index, int kind) {
  return __fmaf_rn(__fmul_rn(total[index], rho), p.site.scale[kind], p.site.base[index]);
}
__device__ float InverseRms(float squares, int64_t channels) {
  return 1.0f / sqrtf(squares / static_cast<float>(channels) + kNormEps);
}
__device__ float PreOf(const SeamParams& p, const float* total, float rho, int j) {
  return Sigmoid(Mix(p, total, rho, j, 0)) + p.eps;
}

// post and comb of token t, by a warp.
__device__ void StoreMixes(const SeamParams& p, const float* total, float rho, int64_t t) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane < S) p.post[t * S + lane] = 2.0f * Sigmoid(Mix(p, total, rho, S + lane, 1));
  const int cell = lane % (S * S);
  const float value = Sinkhorn(Mix(p, total, rho, 2 * S + cell, 2), p.iterations, p.eps);
  if (lane < S * S) p.comb[t * S * S + lane] = value;
}

// Lane l gets WarpSum of value[l], by the same additions, with a fifth of the exchanges.
template <int kHalf = 16>
__device__ float WarpSums(float (&value)[32]) {
  const bool upper = (threadIdx.x & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float mine = upper ? value[i + kHalf] : value[i];
    const float other = upper ? value[i] : value[i + kHalf];
    value[i] = mine + __shfl_xor_sync(0xffffffffu, other, kHalf);
  }
  if constexpr (kHalf > 1) return WarpSums<kHalf / 2>(value);
  return value[0];
}

constexpr int kWarps = kThreads / 32;
constexpr int kSums = kMixes + 1;  // the sums of fn's rows, and of squares

struct SeamShared {
  float partial[kWarps][kSums];
  float incoming[kCluster][kSums];  // of every block of the cluster
  float incoming_squares[kCluster];
  float total[kSums];
  uint64_t fn_here, sums_here, squares_here;  // barriers, used once
};

// kStaged: the block's part of fn is copied into shared memory while the kernel in front finishes.
// A ninth warp does Sinkhorn's iterations beside the others' work. Dynamic shared memory: fn
// [mixes * S][slice] when kStaged, streams [S][slice], u [slice].
template <bool kStaged, class T>
__global__ void __launch_bounds__(kThreads + 32)
    Seam(T* x, const T* o, T* u, T* z, const __grid_constant__ SeamParams p) {
  extern __shared__ __align__(16) float seam_memory[];
  __shared__ SeamShared s;
  cg::cluster_group cluster = cg::this_cluster();
  const auto rank = static_cast<int>(cluster.block_rank());
  const auto thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t t = blockIdx.x / kCluster;
  const int64_t first = rank * p.slice;
  const auto count = static_cast<int>(max(int64_t{0}, min(p.slice, p.d - first)));
  const int fn_rows = p.has_site ? p.site.mixes * S : 0;
  float* const staged = seam_memory;
  float* const streams = seam_memory + (kStaged ? fn_rows * p.slice : 0);
  float* const collapsed = streams + S * p.slice;
  x += t * p.x_stride;
  u += t * p.u_stride;
  cuda::LetNextStart();
  if (thread == 0) {
    cuda::BarrierInit(&s.fn_here, 1);
    cuda::BarrierInit(&s.sums_here, 1);
    cuda::BarrierInit(&s.squares_here, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    cuda::BarrierArriveExpecting(&s.sums_here, kCluster * kSums * sizeof(float));
    cuda::BarrierArriveExpecting(&s.squares_here, kCluster * sizeof(float));
    if (kStaged) {
      cuda::BarrierArriveExpecting(&s.fn_here,
                                   static_cast<uint32_t>(fn_rows * count) * sizeof(float));
    }
  }
  cluster.sync();  // barriers are ready for what other blocks store
  if (kStaged) {
    if (warp == kWarps && count > 0) {
      for (int row = lane; row < fn_rows; row += 32) {
        cuda::CopyBulk(staged + row * p.slice, p.site.fn + row * p.d + first,
                       static_cast<uint32_t>(count) * sizeof(float), &s.fn_here);
      }
    }
  } else {
    // On their way to L2 while the kernel in front finishes.
    constexpr int kLine = 128 / sizeof(float);
    const auto lines = (count + kLine - 1) / kLine;
    for (int i = thread; i < fn_rows * lines; i += kThreads + 32) {
      const float* at = p.site.fn + i / lines * p.d + first + i % lines * kLine;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    }
  }
  cuda::WaitForPrevious();

  const bool worker = warp < kWarps;
  if (worker) {
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
        float out[S];
        Update(post, comb, in, cuda::ToFloat(o[t * p.o_stride + first + i]), p.round, out);
#pragma unroll
        for (int k = 0; k < S; ++k) {
          in[k] = out[k];
          x[k * p.d + first + i] = cuda::FromFloat<T>(in[k]);
        }
      }
#pragma unroll
      for (int j = 0; j < S; ++j) streams[j * p.slice + i] = in[j];
    }
  }

  float squares = 0.0f;
  if (p.has_site) {
    const int mixes = p.site.mixes;
    if (worker) {
      float sums[32] = {};
      if (kStaged) cuda::BarrierWait(&s.fn_here, 0);
      // Every thread reads what it wrote.
      for (int j = 0; j < S; ++j) {
        for (int i = thread; i < count; i += kThreads) {
          const float v = streams[j * p.slice + i];
          const float* const fn =
              kStaged ? staged + j * p.slice + i : p.site.fn + j * p.d + first + i;
          const int64_t row = S * (kStaged ? p.slice : p.d);
          sums[kMixes] = __fmaf_rn(v, v, sums[kMixes]);
          if (mixes == kMixes) {
#pragma unroll
            for (int m = 0; m < kMixes; ++m) sums[m] = __fmaf_rn(fn[m * row], v, sums[m]);
          } else {
#pragma unroll
            for (int m = 0; m < S; ++m) sums[m] = __fmaf_rn(fn[m * row], v, sums[m]);
          }
        }
      }
      const float sum = WarpSums(sums);
      if (lane < kSums) s.partial[warp][lane] = sum;
    }
    __syncthreads();
    for (int i = thread; i < kCluster * kSums; i += kThreads + 32) {
      const int m = i % kSums;
      float sum = 0.0f;
      for (int w = 0; w < kWarps; ++w) sum += s.partial[w][m];
      cuda::StoreRemote(&s.incoming[rank][m], sum, &s.sums_here, static_cast<uint32_t>(i / kSums));
    }
    cuda::BarrierWaitCluster(&s.sums_here, 0);
    if (thread < kSums) {
      float sum = 0.0f;
      for (int r = 0; r < kCluster; ++r) sum += s.incoming[r][thread];
      s.total[thread] = sum;
    }
    __syncthreads();
    const float rho = InverseRms(s.total[kMixes], S * p.d);
    if (!worker) {
      if (mixes > S && rank == 0) StoreMixes(p, s.total, rho, t);
      return;
    }
    float pre[S];
#pragma unroll
    for (int j = 0; j < S; ++j) pre[j] = PreOf(p, s.total, rho, j);
    for (int i = thread; i < count; i += kThreads) {
      float in[S];
#pragma unroll
      for (int j = 0; j < S; ++j) in[j] = streams[j * p.slice + i];
      const float sum = Collapse(pre, in, p.round);
      collapsed[i] = sum;
      squares = __fmaf_rn(sum, sum, squares);
      u[first + i] = cuda::FromFloat<T>(sum);
    }
  } else {
    if (!worker) return;
    if (p.norm != nullptr) {
      for (int i = thread; i < count; i += kThreads) {
        collapsed[i] = cuda::ToFloat(u[first + i]);
        squares = __fmaf_rn(collapsed[i], collapsed[i], squares);
      }
    }
  }

  if (p.norm == nullptr) return;
  squares = cuda::WarpSum(squares);
  if (lane == 0) s.partial[warp][0] = squares;
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
  if (thread < kCluster) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += s.partial[w][0];
    cuda::StoreRemote(&s.incoming_squares[rank], sum, &s.squares_here,
                      static_cast<uint32_t>(thread));
  }
  // Nobody leaves before everything that comes to it is there.
  cuda::BarrierWaitCluster(&s.squares_here, 0);
  float total = 0.0f;
  for (int r = 0; r < kCluster; ++r) total += s.incoming_squares[r];
  const float r = InverseRms(total, p.d);
  for (int i = thread; i < count; i += kThreads) {
    z[t * p.z_stride + first + i] =
        cuda::FromFloat<T>(cuda::RoundIf(p.norm[first + i] * (collapsed[i] * r), p.round));
  }
}

constexpr int kTokens = 4;  // of a block of SeamMany

struct ManyShared {
  float mixes[kTokens][S + S * S];  // post and comb of the site before
  float partial[kCluster][kWarps][kTokens][kSums];
  float squares[kCluster][kWarps][kTokens];
  float total[kTokens][kSums];
  float pre[kTokens][S];
  float rho[kTokens], inverse[kTokens];
};

// Tokens kTokens * blockIdx.x ...; a slice of the channels, the share of a block of Seam, at a
// time. With site (24 mixes) and norm. Dynamic shared memory: streams of a slice
// [kTokens][S][slice], collapsed channels [kTokens][d] as T.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    SeamMany(T* x, const T* o, T* u, T* z, const __grid_constant__ SeamParams p, int tokens) {
  extern __shared__ float many_streams[];
  __shared__ ManyShared s;
  T* const collapsed = reinterpret_cast<T*>(many_streams + kTokens * S * p.slice);
  const auto thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t t0 = int64_t{blockIdx.x} * kTokens;
  const auto here = static_cast<int>(min(int64_t{kTokens}, tokens - t0));
  cuda::LetNextStart();
  cuda::WaitForPrevious();
  if (p.has_o) {
    for (int i = thread; i < here * S; i += kThreads) s.mixes[i / S][i % S] = p.post[t0 * S + i];
    for (int i = thread; i < here * S * S; i += kThreads) {
      s.mixes[i / (S * S)][S + i % (S * S)] = p.comb[t0 * S * S + i];
    }
  }
  __syncthreads();

  for (int rank = 0; rank < kCluster; ++rank) {
    const int64_t first = rank * p.slice;
    const auto count = static_cast<int>(max(int64_t{0}, min(p.slice, p.d - first)));
    for (int i = thread; i < count; i += kThreads) {
      float in[kTokens][S], out[kTokens];
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const int64_t token = t0 + min(t, here - 1);
#pragma unroll
        for (int j = 0; j < S; ++j) {
          in[t][j] = cuda::ToFloat(x[token * p.x_stride + j * p.d + first + i]);
        }
        out[t] = p.has_o ? cuda::ToFloat(o[token * p.o_stride + first + i]) : 0.0f;
      }
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        float next[S];
        if (p.has_o && t < here) {
          Update(s.mixes[t], s.mixes[t] + S, in[t], out[t], p.round, next);
#pragma unroll
          for (int k = 0; k < S; ++k) {
            in[t][k] = next[k];
            x[(t0 + t) * p.x_stride + k * p.d + first + i] = cuda::FromFloat<T>(next[k]);
          }
        }
#pragma unroll
        for (int j = 0; j < S; ++j) many_streams[(t * S + j) * p.slice + i] = in[t][j];
      }
    }
    // Every thread reads what it wrote.
    float sums[kTokens][kSums] = {};
    const int per_stream = thread < count ? (count - thread + kThreads - 1) / kThreads : 0;
    float next[kMixes];  // the weights of the step to come
    const auto load = [&](int step) {
      const int j = step / per_stream, i = thread + step % per_stream * kThreads;
      const float* fn = p.site.fn + j * p.d + first + i;
#pragma unroll
      for (int m = 0; m < kMixes; ++m) next[m] = __ldg(fn + m * S * p.d);
    };
    if (per_stream > 0) load(0);
    for (int step = 0; step < S * per_stream; ++step) {
      const int j = step / per_stream, i = thread + step % per_stream * kThreads;
      float weight[kMixes];
#pragma unroll
      for (int m = 0; m < kMixes; ++m) weight[m] = next[m];
      if (step + 1 < S * per_stream) load(step + 1);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const float v = many_streams[(t * S + j) * p.slice + i];
        sums[t][kMixes] = __fmaf_rn(v, v, sums[t][kMixes]);
#pragma unroll
        for (int m = 0; m < kMixes; ++m) sums[t][m] = __fmaf_rn(weight[m], v, sums[t][m]);
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float value[32];
#pragma unroll
      for (int m = 0; m < 32; ++m) value[m] = m < kSums ? sums[t][m < kSums ? m : 0] : 0.0f;
      const float sum = WarpSums(value);
      if (lane < kSums) s.partial[rank][warp][t][lane] = sum;
    }
  }
  __syncthreads();
  for (int i = thread; i < kTokens * kSums; i += kThreads) {
    float total = 0.0f;
    for (int rank = 0; rank < kCluster; ++rank) {
      float sum = 0.0f;
      for (int w = 0; w < kWarps; ++w) sum += s.partial[rank][w][i / kSums][i % kSums];
      total += sum;
    }
    s.total[i / kSums][i % kSums] = total;
  }
  __syncthreads();
  if (warp < here) {
    const float rho = InverseRms(s.total[warp][kMixes], S * p.d);
    if (lane < S) s.pre[warp][lane] = PreOf(p, s.total[warp], rho, lane);
    StoreMixes(p, s.total[warp], rho, t0 + warp);
  }
  __syncthreads();

  for (int rank = 0; rank < kCluster; ++rank) {
    const int64_t first = rank * p.slice;
    const auto count = static_cast<int>(max(int64_t{0}, min(p.slice, p.d - first)));
    float squares[kTokens] = {};
    for (int i = thread; i < count; i += kThreads) {
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= here) break;
        float in[S];
#pragma unroll
        for (int j = 0; j < S; ++j) {
          in[j] = cuda::ToFloat(x[(t0 + t) * p.x_stride + j * p.d + first + i]);
        }
        const float sum = Collapse(s.pre[t], in, p.round);
        squares[t] = __fmaf_rn(sum, sum, squares[t]);
        collapsed[t * p.d + first + i] = cuda::FromFloat<T>(sum);
        u[(t0 + t) * p.u_stride + first + i] = cuda::FromFloat<T>(sum);
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float sum = cuda::WarpSum(squares[t]);
      if (lane == 0) s.squares[rank][warp][t] = sum;
    }
  }
  __syncthreads();
  if (thread < here) {
    float total = 0.0f;
    for (int rank = 0; rank < kCluster; ++rank) {
      float sum = 0.0f;
      for (int w = 0; w < kWarps; ++w) sum += s.squares[rank][w][thread];
      total += sum;
    }
    s.inverse[thread] = InverseRms(total, p.d);
  }
  __syncthreads();
  for (int64_t i = thread; i < p.d; i += kThreads) {
    const float weight = p.norm[i];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= here) break;
      const float value = cuda::ToFloat(collapsed[t * p.d + i]);
      z[(t0 + t) * p.z_stride + i] =
          cuda::FromFloat<T>(cuda::RoundIf(weight * (value * s.inverse[t]), p.round));
    }
  }
}

// Fewer tokens leave multiprocessors idle.
constexpr int kManyTokens = 256;
// With a staged fn a block takes a multiprocessor for itself: more tokens would wait for each
// other.
constexpr int kStagedTokens = 16;
constexpr int64_t kMostShared = 220 << 10;  // bytes a block may have, less SeamShared

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
  const int64_t rows = args.x.rows;
  // A value that is not rounded would not survive in T.
  if (rows >= kManyTokens && params.has_site && params.site.mixes == kMixes &&
      params.norm != nullptr && params.round && args.x.dtype == DType::kBF16) {
    using T = __nv_bfloat16;
    const int64_t shared = kTokens * (S * params.slice * static_cast<int64_t>(sizeof(float)) +
                                      d * static_cast<int64_t>(sizeof(T)));
    cuda::AllowShared(SeamMany<T>, shared);
    cuda::LaunchOverlapped(SeamMany<T>, cuda::Blocks(rows, kTokens), kThreads, shared, stream, 1,
                           static_cast<T*>(args.x.data), static_cast<const T*>(args.o.data),
                           static_cast<T*>(args.u.data), static_cast<T*>(args.z.data), params,
                           static_cast<int>(rows));
    return;
  }
  const int64_t plain = (S + 1) * params.slice * static_cast<int64_t>(sizeof(float));
  const int64_t fn = params.site.mixes * S * params.slice * static_cast<int64_t>(sizeof(float));
  const bool staged = rows <= kStagedTokens && params.has_site && plain + fn <= kMostShared &&
                      d % 4 == 0 && params.slice % 4 == 0 &&
                      reinterpret_cast<uintptr_t>(params.site.fn) % 16 == 0;
  cuda::WithActivationType(args.x.dtype, [&]<class T>(T) {
    const auto launch = [&](auto kernel, int64_t shared) {
      cuda::AllowShared(kernel, shared);
      cuda::LaunchOverlapped(kernel, static_cast<unsigned>(rows * kCluster), kThreads + 32, shared,
                             stream, kCluster, static_cast<T*>(args.x.data),
                             static_cast<const T*>(args.o.data), static_cast<T*>(args.u.data),
                             static_cast<T*>(args.z.data), params);
    };
    if (staged) launch(Seam<true, T>, plain + fn);
    else launch(Seam<false, T>, plain);
  });
}

}  // namespace fathom::ops
