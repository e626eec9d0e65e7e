#include <cstdio>
#include <cstdlib>

#include "ops/linear/cuda_launch.cuh"
#include "ops/output_projection/cuda.h"

namespace fathom::ops {
namespace cuda {
namespace {

constexpr int kPairs = kRopeDim / 2;

// A thread per pair of channels: pair of head of token, ascending. The same products and sums as
// RotateRow, never fused.
template <class T>
__global__ void __launch_bounds__(256) InverseRotateKernel(T* o, int64_t stride, const float* rope,
                                                           int heads, int64_t count, bool round) {
  LetNextStart();
  WaitForPrevious();
  const int64_t index = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (index >= count) return;
  const int pair = static_cast<int>(index % kPairs);
  const int64_t row = index / kPairs / heads;
  const int head = static_cast<int>(index / kPairs % heads);
  const float* table = rope + row * kRopeDim + 2 * pair;
  T* at = o + row * stride + int64_t{head} * kHeadDim + kNopeDim + 2 * pair;
  const float c = table[0];
  const float s = -table[1];
  const float a = ToFloat(at[0]);
  const float b = ToFloat(at[1]);
  at[0] = FromFloat<T>(RoundIf(__fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)), round));
  at[1] = FromFloat<T>(RoundIf(__fadd_rn(__fmul_rn(a, s), __fmul_rn(b, c)), round));
}

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fathom: output projection on CUDA: %s\n", what);
  std::abort();
}

}  // namespace
}  // namespace cuda

int64_t OutputProjectionCudaScratchBytes(const OutputProjectionArgs& args, int64_t rows) {
  if (args.numerics == Numerics::kReference) return 0;
  // More rows may take either way.
  if (cuda::ReadableInPlace(args.o, args.groups) && rows <= cuda::kStreamRows) return 0;
  return LinearCudaScratchBytes(rows, int64_t{kHeadDim} * args.heads);
}

void OutputProjectionCuda(const OutputProjectionArgs& args, void* scratch, CudaStream stream,
                          CudaWay way) {
  using namespace cuda;
  const CudaWeightView& w = PackedCuda(*args.wo_a).view;
  const bool product = args.numerics == Numerics::kProduct;
  const int rows = static_cast<int>(args.o.rows);
  Require(args.heads % args.groups == 0 && w.out % args.groups == 0 &&
              w.in == kHeadDim * args.heads / args.groups,
          "wo_a has another shape than [groups * rank, 512 * heads / groups]");

  const int64_t count = args.o.rows * args.heads * kPairs;
  WithActivationType(args.o.dtype, [&](auto type) {
    using T = decltype(type);
    LaunchOverlapped(InverseRotateKernel<T>, Blocks(count, 256), 256, 0, stream, 1,
                     static_cast<T*>(args.o.data), args.o.stride, args.rope, args.heads, count,
                     product);
  });

  WithActivationType(args.y.dtype, [&](auto type) {
    using T = decltype(type);
    const auto out = OutputOf<T>(args.y, args.groups, product);
    if (!product || w.format == Format::kF32) {
      LaunchFloat(w, args.o, args.groups, out, stream);
      return;
    }
    const auto* x = static_cast<const __nv_bfloat16*>(args.o.data);
    int64_t stride = args.o.stride;
    const Form form =
        IsWide(rows, w, args.groups, way) ? WideForm(Form::kPlain, w.format) : Form::kPlain;
    if (form != Form::kPlain || !ReadableInPlace(args.o, args.groups)) {
      Prepare(args.o, form, scratch, stream);
      x = static_cast<const __nv_bfloat16*>(scratch);
      stride = CudaDepth(args.o.cols);
    }
    if (w.format == Format::kFp8Block128) {
      LaunchFormat<Format::kFp8Block128, T>(w, x, stride, rows, args.groups, out, stream, way);
    } else {
      Require(w.format == Format::kBF16, "wo_a is FP4");
      LaunchFormat<Format::kBF16, T>(w, x, stride, rows, args.groups, out, stream, way);
    }
  });
  FATHOM_CUDA_CHECK(cudaGetLastError());
}

}  // namespace fathom::ops
