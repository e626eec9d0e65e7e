// LinearCuda: prepare the rows, then the skinny, tiled or float product.
#include "ops/linear/cuda_float.cuh"
#include "ops/linear/cuda_prepare.cuh"
#include "ops/linear/cuda_skinny.cuh"
#include "ops/linear/cuda_tile.cuh"

namespace fathom::ops {
namespace cuda {
namespace {

template <class T>
struct Output {
  T* y;
  int64_t stride;
  bool round;
  bool vector;
};

template <Format F, bool kInterleaved, int kTiles, class T>
__global__ void __launch_bounds__(kSkinnyThreads)
    SkinnyKernel(CudaWeightView w, const __nv_bfloat16* x, int64_t x_stride, int rows,
                 Output<T> out) {
  __shared__ SkinnyShared<kTiles> shared;
  const int r = threadIdx.x % 32 / 4;
  SkinnyProduct<F, kInterleaved, kTiles>(
      w, blockIdx.x * 16 * kTiles, w.out, r < rows ? x + r * x_stride : nullptr, rows, shared,
      [&](int t, int o, float v) {
        out.y[t * out.stride + o] = FromFloat<T>(RoundIf(v, out.round));
      });
}

template <Format F, bool kInterleaved, int kRows, class T>
__global__ void __launch_bounds__(kTileThreads, kRows > 64 ? 1 : 2)
    TileKernel(CudaWeightView w, const __nv_bfloat16* x, int64_t x_stride, int rows,
               Output<T> out) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int row0 = blockIdx.x * kRows;
  const int count = min(kRows, rows - row0);
  const __nv_bfloat16* const first = x + row0 * x_stride;
  TileProduct<F, kInterleaved, kRows>(
      w, blockIdx.y * kTileOutputs, w.out, x,
      [&](int r) { return r < count ? first + r * x_stride : nullptr; }, count, shared,
      [&](int r, int o, const float4& v, int n) {
        StoreResults(out.y + (row0 + r) * out.stride + o, v, n, out.round, out.vector);
      });
}

template <class X, class T>
__global__ void __launch_bounds__(kFloatThreads)
    FloatKernel(CudaWeightView w, const X* x, int64_t x_stride, int rows, Output<T> out) {
  __shared__ FloatShared shared;
  const int row0 = blockIdx.x * kFloatRows;
  FloatProduct(
      w, blockIdx.y * kFloatOutputs, w.out, min(kFloatRows, rows - row0), shared,
      [&](int r, int k) { return ToFloat(x[(row0 + r) * x_stride + k]); },
      [&](int r, int o, float v) {
        out.y[(row0 + r) * out.stride + o] = FromFloat<T>(RoundIf(v, out.round));
      });
}

template <Format F, bool kInterleaved, class T>
void LaunchProduct(const CudaWeightView& w, const __nv_bfloat16* x, int64_t x_stride, int rows,
                   const Output<T>& out, cudaStream_t stream) {
  if (rows <= 2) {
    SkinnyKernel<F, kInterleaved, 1, T>
        <<<Blocks(w.out, 16), kSkinnyThreads, 0, stream>>>(w, x, x_stride, rows, out);
    return;
  }
  if (rows <= kSkinnyRows) {  // two tiles share the reads of x
    SkinnyKernel<F, kInterleaved, 2, T>
        <<<Blocks(w.out, 32), kSkinnyThreads, 0, stream>>>(w, x, x_stride, rows, out);
    return;
  }
  const auto launch = [&](auto kernel, int tile_rows, int bytes) {
    FATHOM_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    // Tiles of the same outputs run side by side: they share the weight through L2.
    kernel<<<dim3(Blocks(rows, tile_rows), Blocks(w.out, kTileOutputs)), kTileThreads, bytes,
             stream>>>(w, x, x_stride, rows, out);
  };
  if (rows <= 64) {
    launch(TileKernel<F, kInterleaved, 64, T>, 64, kTileSharedBytes<64>);
  } else {
    launch(TileKernel<F, kInterleaved, 128, T>, 128, kTileSharedBytes<128>);
  }
}

// Whether the product may read x in place: bf16, whole units, 16-byte rows.
bool ReadableInPlace(const MatrixView& x) {
  return x.dtype == DType::kBF16 && x.cols % kUnit == 0 && x.stride % 8 == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}

}  // namespace
}  // namespace cuda

int64_t LinearCudaScratchBytes(int64_t rows, int64_t in) {
  return (rows * CudaDepth(in) * 2 + 255) / 256 * 256;
}

void LinearCuda(const LinearArgs& args, void* scratch, CudaStream stream) {
  using namespace cuda;
  const CudaWeightView& w = PackedCuda(*args.weight).view;
  const int rows = static_cast<int>(args.x.rows);
  const Form form = FormOf(w.format, args.numerics);
  const bool round = args.numerics == Numerics::kProduct && args.round_output;

  WithActivationType(args.y.dtype, [&](auto y_type) {
    using T = decltype(y_type);
    const Output<T> out{static_cast<T*>(args.y.data), args.y.stride, round, RowsAligned(args.y)};
    if (form == Form::kFloat) {
      WithActivationType(args.x.dtype, [&](auto x_type) {
        using X = decltype(x_type);
        FloatKernel<X, T>
            <<<dim3(Blocks(rows, kFloatRows), Blocks(w.out, kFloatOutputs)), kFloatThreads, 0,
               stream>>>(w, static_cast<const X*>(args.x.data), args.x.stride, rows, out);
      });
      return;
    }
    const auto* x = static_cast<const __nv_bfloat16*>(args.x.data);
    int64_t stride = args.x.stride;
    if (form == Form::kQuantised || !ReadableInPlace(args.x)) {
      Prepare(args.x, form, scratch, stream);
      x = static_cast<const __nv_bfloat16*>(scratch);
      stride = w.depth;
    }
    switch (w.format) {
      case Format::kFp8Block128:
        LaunchProduct<Format::kFp8Block128, true, T>(w, x, stride, rows, out, stream);
        break;
      case Format::kFp4Block32:
        LaunchProduct<Format::kFp4Block32, true, T>(w, x, stride, rows, out, stream);
        break;
      case Format::kBF16:
        LaunchProduct<Format::kBF16, false, T>(w, x, stride, rows, out, stream);
        break;
      case Format::kF32: break;  // a float product, above
    }
  });
  FATHOM_CUDA_CHECK(cudaGetLastError());
}

}  // namespace fathom::ops
