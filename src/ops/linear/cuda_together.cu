// Products of the same few rows in one launch: a step's projections of one input. Jobs are the
// tiles of 16 outputs of all weights, computed as by SkinnyFreshKernel and SkinnyKernel, to the
// same bits. Blocks have jobs of one format: the first ones of FP8, which quantise the rows for
// themselves, the others of BF16.
#include <algorithm>
#include <climits>

#include "ops/linear/cuda_launch.cuh"

namespace fathom::ops {
namespace cuda {
namespace {

struct TogetherProduct {
  void* y;
  int64_t y_stride;
  int first;  // of its tiles, counted over all products
  int out;
  bool float_y, round, wide;
  const uint8_t* scale;
  const uint8_t* data;
};

struct Together {
  Preparation<__nv_bfloat16> x;
  TogetherProduct product[kMostTogether];  // FP8 first; `first` of those that do not exist: INT_MAX
  int fp8_tiles, tiles;
  int fp8_blocks;
  int most;  // jobs of a block, or of a warp
};

// Jobs of one format: every step-th tile.
template <class X>
struct TogetherCursor {
  // The order of the members is not that of a product's: LinearCursor's kernels say why.
  const Together* all;
  int tile, step;
  int which;  // product
  int out0, out_begin, out_end;
  int rows;
  X x[1];
  const uint8_t* data;
  const uint8_t* scale;
  bool wide;

  __device__ TogetherCursor(const Together& together, X first_x, int64_t x_stride, int index,
                            int by)
      : all(&together),
        tile(index),
        step(by),
        out_begin(0),
        rows(together.x.rows),
        x{first_x + min(static_cast<int>(threadIdx.x) % 32 / 4, together.x.rows - 1) * x_stride} {
    Enter();
  }
  __device__ void Next() {
    tile += step;
    Enter();
  }

 private:
  __device__ void Enter() {
    which = 0;
#pragma unroll
    for (int i = 1; i < kMostTogether; ++i) which += tile >= all->product[i].first ? 1 : 0;
    const TogetherProduct& product = all->product[which];
    out0 = (tile - product.first) * kTile;
    out_end = product.out;
    data = product.data;
    scale = product.scale;
    wide = product.wide;
  }
};

// Dynamic shared memory: SkinnyShared<1>, then [rows][FreshStride(depth)] bf16. kByWarp: of FP8
// weights alone.
template <bool kByWarp>
__global__ void __launch_bounds__(kSkinnyThreads, 2)
    TogetherKernel(const __grid_constant__ Together p) {
  constexpr Format kFp8 = Format::kFp8Block128;
  auto& shared = SharedOf<SkinnyShared<1>>();
  LetNextStart();
  const int depth = p.x.units * kUnit;
  const FreshRow<kFp8> fresh{SharedAddress(&shared + 1)};
  const int64_t stride = FreshStride(depth);
  const auto prepare = [&](int t, int first, int end) {
    FourUnits<__nv_bfloat16> units;
    units.Load(p.x.x + t * p.x.stride, p.x.in, p.x.vector, first, end);
    units.Store(first, end, fresh + t * stride);
  };
  const auto store = [&](const auto& cursor, int t, int o, float v) {
    const TogetherProduct& to = p.product[cursor.which];
    const float value = RoundIf(v, to.round);
    if (to.float_y) {
      static_cast<float*>(to.y)[t * to.y_stride + o] = value;
    } else {
      static_cast<__nv_bfloat16*>(to.y)[t * to.y_stride + o] = FromFloat<__nv_bfloat16>(value);
    }
  };
  if constexpr (kByWarp) {
    const SkinnyShare share(true, p.tiles, p.most);
    const TogetherCursor<FreshRow<kFp8>> cursor(p, fresh, stride, share.first, share.step);
    SkinnyByWarp<kFp8, 1>(
        share.count, depth, shared, cursor,
        [&] {
          WaitForPrevious();
          const int fours = (p.x.units + 3) / 4;
          for (int i = static_cast<int>(threadIdx.x) / 32; i < p.x.rows * fours;
               i += kSkinnyThreads / 32) {
            prepare(i / fours, i % fours * 4, p.x.units);
          }
          __syncthreads();
        },
        store);
    return;
  }
  const auto block = static_cast<int>(blockIdx.x);
  const bool fp8 = block < p.fp8_blocks;
  const int first = fp8 ? block : p.fp8_tiles + block - p.fp8_blocks;
  const int step = fp8 ? p.fp8_blocks : static_cast<int>(gridDim.x) - p.fp8_blocks;
  const int end = fp8 ? p.fp8_tiles : p.tiles;
  const int count = first + (p.most - 1) * step < end ? p.most : p.most - 1;
  if (fp8) {
    const TogetherCursor<FreshRow<kFp8>> cursor(p, fresh, stride, first, step);
    SkinnyByBlock<kFp8, 1>(
        count, depth, shared, cursor,
        [&](int begin, int units) {
          WaitForPrevious();
          for (int t = 0; t < p.x.rows; ++t) {
            for (int unit = begin; unit < begin + units; unit += 4) prepare(t, unit, begin + units);
          }
          __syncwarp();
        },
        store);
  } else {
    const TogetherCursor<const __nv_bfloat16*> cursor(p, p.x.x, p.x.stride, first, step);
    SkinnyByBlock<Format::kBF16, 1>(
        count, depth, shared, cursor, [](int, int) { WaitForPrevious(); }, store);
  }
}

int64_t SharedBytes(int64_t rows, int64_t depth) {
  return static_cast<int64_t>(sizeof(SkinnyShared<1>)) + rows * FreshStride(depth) * 2;
}

}  // namespace
}  // namespace cuda

bool LinearsCudaTake(std::span<const LinearArgs> products) {
  if (products.size() < 2 || products.size() > kMostTogether) return false;
  const MatrixView& x = products[0].x;
  const int64_t depth = CudaDepth(x.cols);
  if (x.rows < 1 || x.rows > cuda::kSkinnyRows || !cuda::ReadableInPlace(x, 1) ||
      x.rows * cuda::FreshStride(depth) * 2 > cuda::kMostFreshBytes) {
    return false;
  }
  return std::all_of(products.begin(), products.end(), [&](const LinearArgs& p) {
    const WeightFormat format = p.weight->format;
    return p.x.data == x.data && p.x.rows == x.rows && p.x.cols == x.cols &&
           p.x.stride == x.stride && p.numerics == Numerics::kProduct && p.weight->out >= 1 &&
           (format == WeightFormat::kFp8Block128 || format == WeightFormat::kBF16);
  });
}

void LinearsCuda(std::span<const LinearArgs> products, CudaStream stream) {
  using namespace cuda;
  const MatrixView& x = products[0].x;
  Together p = {.x = MakePreparation<__nv_bfloat16>(x, Form::kQuantised, nullptr)};
  for (TogetherProduct& product : p.product) product.first = INT_MAX;
  int count = 0;
  for (const Format format : {Format::kFp8Block128, Format::kBF16}) {
    for (const LinearArgs& args : products) {
      if (args.weight->format != format) continue;
      const CudaWeightView& w = PackedCuda(*args.weight).view;
      p.product[count++] = {.y = args.y.data,
                            .y_stride = args.y.stride,
                            .first = p.tiles,
                            .out = w.out,
                            .float_y = args.y.dtype == DType::kF32,
                            .round = args.round_output,
                            .wide = w.wide,
                            .scale = w.scale,
                            .data = w.data};
      p.tiles += static_cast<int>(CudaTiles(w.out));
    }
    if (format == Format::kFp8Block128) p.fp8_tiles = p.tiles;
  }
  const auto launch = [&](auto by_warp, unsigned blocks, int most) {
    p.most = most;
    p.fp8_blocks = static_cast<int>(Blocks(p.fp8_tiles, most));
    const auto kernel = TogetherKernel<decltype(by_warp)::value>;
    const int64_t shared = SharedBytes(x.rows, CudaDepth(x.cols));
    AllowShared(kernel, shared);
    LaunchOverlapped(kernel, blocks, kSkinnyThreads, shared, stream, 1, p);
  };
  if (p.fp8_tiles == p.tiles && JobsByWarp(p.tiles, kSkinnyBlocks)) {
    constexpr int kWarps = kSkinnyThreads / 32, kWorkers = kSkinnyBlocks * kWarps;
    launch(std::true_type(), std::min<unsigned>(kSkinnyBlocks, Blocks(p.tiles, kWarps)),
           (p.tiles + kWorkers - 1) / kWorkers);
    return;
  }
  // Somewhat more blocks than there is place for, rather than two jobs each.
  const int most = std::max(1, (p.tiles + kSkinnyBlocks / 2) / kSkinnyBlocks);
  launch(std::false_type(), Blocks(p.fp8_tiles, most) + Blocks(p.tiles - p.fp8_tiles, most), most);
}

}  // namespace fathom::ops
