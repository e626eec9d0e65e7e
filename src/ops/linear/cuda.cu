// LinearCuda: prepare the rows, then the skinny, tiled or float product.
#include "ops/linear/cuda_launch.cuh"

namespace fathom::ops {
int64_t LinearCudaScratchBytes(int64_t rows, int64_t in) {
  return (rows * CudaDepth(in) * 2 + 255) / 256 * 256;
}

void LinearCuda(const LinearArgs& args, void* scratch, CudaStream stream, CudaWay way) {
  using namespace cuda;
  const CudaWeightView& w = PackedCuda(*args.weight).view;
  const int rows = static_cast<int>(args.x.rows);
  const Form form = FormOf(w.format, args.numerics);
  const bool round = args.numerics == Numerics::kProduct && args.round_output;

  WithActivationType(args.y.dtype, [&](auto y_type) {
    using T = decltype(y_type);
    const auto out = OutputOf<T>(args.y, 1, round);
    if (form == Form::kFloat) {
      LaunchFloat(w, args.x, 1, out, stream);
      return;
    }
    if (form == Form::kQuantised && TakesFresh(rows, w)) {
      if (w.format == Format::kFp8Block128) {
        LaunchFresh<Format::kFp8Block128>(w, args.x, out, stream);
      } else {
        LaunchFresh<Format::kFp4Block32>(w, args.x, out, stream);
      }
      return;
    }
    const auto* x = static_cast<const __nv_bfloat16*>(args.x.data);
    int64_t stride = args.x.stride;
    const Form wanted = IsWide(rows, w, 1, way) ? WideForm(form, w.format) : form;
    if (wanted != Form::kPlain || !ReadableInPlace(args.x, 1)) {
      Prepare(args.x, wanted, scratch, stream);
      x = static_cast<const __nv_bfloat16*>(scratch);
      stride = w.depth;
    }
    switch (w.format) {
      case Format::kFp8Block128:
        LaunchFormat<Format::kFp8Block128, T>(w, x, stride, rows, 1, out, stream, way);
        break;
      case Format::kFp4Block32:
        LaunchFormat<Format::kFp4Block32, T>(w, x, stride, rows, 1, out, stream, way);
        break;
      case Format::kBF16:
        LaunchFormat<Format::kBF16, T>(w, x, stride, rows, 1, out, stream, way);
        break;
      case Format::kF32: break;  // a float product, above
    }
  });
  FATHOM_CUDA_CHECK(cudaGetLastError());
}

}  // namespace fathom::ops
