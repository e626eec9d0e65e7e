#include "ops/cuda/hopper.cuh"
#include "ops/norm_rope_insert/cuda.h"
#include "ops/quantise/cuda.cuh"

namespace fathom::ops {
namespace {

constexpr int kWarps = 4;     // of a block
constexpr int kPerLane = 16;  // channels of a 512-channel row
constexpr int kRopeLane = kNopeDim / kPerLane;

__device__ float InverseRms(const float (&v)[kPerLane]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sum += v[i] * v[i];
  return 1.0f / sqrtf(cuda::WarpSum(sum) / kHeadDim + kNormEps);
}

// The last four lanes hold the rotary channels, pairs within a lane.
__device__ void Rotate(float (&v)[kPerLane], const float* table, int lane, bool round) {
  if (lane < kRopeLane) return;
  const float* pairs = table + (lane - kRopeLane) * kPerLane;
#pragma unroll
  for (int i = 0; i < kPerLane; i += 2) {
    const float c = pairs[i], s = pairs[i + 1];
    const float a = v[i], b = v[i + 1];
    v[i] = cuda::RoundIf(a * c - b * s, round);
    v[i + 1] = cuda::RoundIf(a * s + b * c, round);
  }
}

struct InsertParams {
  int64_t q_stride, kv_stride;
  const float* kv_norm;
  const float* rope;
  PagedRows rows;
  int heads;
  int64_t units;  // tokens * (heads + 1)
  bool round_kv, round;
  const int32_t* position;  // null: the key stays out of the ring
  const int32_t* sequence;
  const int32_t* slot;
  PagedRows ring;
};

// A warp per head of a token; the unit past the last head is the key.
template <class T>
__global__ void Insert(T* q, const T* kv, InsertParams p) {
  cuda::LetNextStart();
  cuda::WaitForPrevious();
  const int64_t unit = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (unit >= p.units) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t t = unit / (p.heads + 1);
  const int head = static_cast<int>(unit % (p.heads + 1));
  const float* rope = p.rope + t * kRopeDim;
  float v[kPerLane];
  if (head < p.heads) {
    T* x = q + t * p.q_stride + int64_t{head} * kHeadDim;
    cuda::LoadWarpRow(x, v, lane);
    const float r = InverseRms(v);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) v[i] = cuda::RoundIf(v[i] * r, p.round);
    Rotate(v, rope, lane, p.round);
    cuda::StoreWarpRow(v, x, lane);
    return;
  }
  cuda::LoadWarpRow(kv + t * p.kv_stride, v, lane);
  const float r = InverseRms(v);
  float w[kPerLane];
  cuda::LoadWarpRow(p.kv_norm, w, lane);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) v[i] = cuda::RoundIf(w[i] * (v[i] * r), p.round);
  Rotate(v, rope, lane, p.round);
  if (p.round_kv && p.rows.format == RowFormat::kBf16) cuda::RoundKvWarpRow(v, lane);
  const auto store = [&](const PagedRows& rows, int32_t block, int32_t row) {
    cuda::EncodeWarpRow(p.rows.format, v, cuda::RowData(rows, block, row),
                        cuda::RowScale(rows, block, row), lane);
  };
  store(p.rows, 0, static_cast<int32_t>(t));
  if (p.position == nullptr) return;
  const int32_t position = p.position[t];
  if (position >= 0) store(p.ring, p.slot[p.sequence[t]], position % p.ring.rows_per_page);
}

// A warp per row of the step's last kWindow of every sequence.
__global__ void Commit(StepView step, PagedRows from, PagedRows ring) {
  cuda::LetNextStart();
  cuda::WaitForPrevious();
  const int sequence = static_cast<int>(blockIdx.y);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto age = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  const int32_t t = step.query_start[sequence + 1] - 1 - age;
  if (t < step.query_start[sequence]) return;
  const int32_t slot = step.slot[sequence];
  const int32_t row = step.position[t] % ring.rows_per_page;
  const auto* in = reinterpret_cast<const uint4*>(cuda::RowData(from, 0, t));
  auto* out = reinterpret_cast<uint4*>(cuda::RowData(ring, slot, row));
  const auto words = static_cast<int>(cuda::RowDataBytesOf(from.format, from.channels) / 16);
  for (int i = lane; i < words; i += 32) out[i] = in[i];
  if (lane < cuda::RowScaleBytesOf(from.format) / 4) {
    reinterpret_cast<uint32_t*>(cuda::RowScale(ring, slot, row))[lane] =
        reinterpret_cast<const uint32_t*>(cuda::RowScale(from, 0, t))[lane];
  }
}

constexpr int kNormThreads = 256;

// A block per row. Each thread writes only the elements that it read: y may alias x.
template <class T>
__global__ void Norm(const T* x, int64_t x_stride, const float* weight, T* y, int64_t y_stride,
                     int n, bool round) {
  cuda::LetNextStart();
  cuda::WaitForPrevious();
  __shared__ float partial[kNormThreads / 32];
  x += blockIdx.x * x_stride;
  y += blockIdx.x * y_stride;
  const auto thread = static_cast<int>(threadIdx.x);
  float sum = 0.0f;
  for (int i = thread; i < n; i += kNormThreads) {
    const float v = cuda::ToFloat(x[i]);
    sum += v * v;
  }
  sum = cuda::WarpSum(sum);
  if (thread % 32 == 0) partial[thread / 32] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kNormThreads / 32; ++w) total += partial[w];
  const float r = 1.0f / sqrtf(total / static_cast<float>(n) + kNormEps);
  for (int i = thread; i < n; i += kNormThreads) {
    y[i] = cuda::FromFloat<T>(cuda::RoundIf(weight[i] * (cuda::ToFloat(x[i]) * r), round));
  }
}

__global__ void Tables(const int32_t* position, RopeFrequencies rope, float2* table,
                       int64_t count) {
  cuda::LetNextStart();
  cuda::WaitForPrevious();
  const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at >= count) return;
  // fl(fl(t) * f), then cosf and sinf with full range reduction: angles reach 1e6.
  // (std::array's accessors are host functions.)
  const float f = reinterpret_cast<const float*>(&rope)[at % kRopePairs];
  const float angle = __fmul_rn(static_cast<float>(position[at / kRopePairs]), f);
  float s, c;
  sincosf(angle, &s, &c);
  table[at] = {c, s};
}

}  // namespace

void NormRopeInsertCuda(const NormRopeInsertArgs& args, CudaStream stream) {
  const StepView step = args.step == nullptr ? StepView{} : *args.step;
  const InsertParams params = {args.q.stride,
                               args.kv.stride,
                               args.kv_norm,
                               args.rope,
                               args.step_rows,
                               args.heads,
                               args.kv.rows * (args.heads + 1),
                               args.round_kv,
                               args.numerics == Numerics::kProduct,
                               step.position,
                               step.sequence,
                               step.slot,
                               args.ring};
  cuda::WithActivationType(args.kv.dtype, [&]<class T>(T) {
    cuda::LaunchOverlapped(Insert<T>, cuda::Blocks(params.units, kWarps), kWarps * 32, 0, stream, 1,
                           static_cast<T*>(args.q.data), static_cast<const T*>(args.kv.data),
                           params);
  });
  FATHOM_CUDA_CHECK(cudaGetLastError());
}

void WindowCommitCuda(const WindowCommitArgs& args, CudaStream stream) {
  const dim3 grid(kWindow / kWarps, static_cast<unsigned>(args.step->num_sequences));
  cuda::LaunchOverlapped(Commit, grid, kWarps * 32, 0, stream, 1, *args.step, args.step_rows,
                         args.ring);
  FATHOM_CUDA_CHECK(cudaGetLastError());
}

void RmsNormCuda(const RmsNormArgs& args, CudaStream stream) {
  cuda::WithActivationType(args.x.dtype, [&]<class T>(T) {
    cuda::LaunchOverlapped(Norm<T>, static_cast<unsigned>(args.x.rows), kNormThreads, 0, stream, 1,
                           static_cast<const T*>(args.x.data), args.x.stride, args.weight,
                           static_cast<T*>(args.y.data), args.y.stride,
                           static_cast<int>(args.x.cols), args.numerics == Numerics::kProduct);
  });
  FATHOM_CUDA_CHECK(cudaGetLastError());
}

void RopeTablesCuda(const StepView& step, const RopeFrequencies& rope, float* table,
                    CudaStream stream) {
  const int64_t count = int64_t{step.num_tokens} * kRopePairs;
  cuda::LaunchOverlapped(Tables, cuda::Blocks(count, 128), 128, 0, stream, 1, step.position, rope,
                         reinterpret_cast<float2*>(table), count);
  FATHOM_CUDA_CHECK(cudaGetLastError());
}

}  // namespace fathom::ops
