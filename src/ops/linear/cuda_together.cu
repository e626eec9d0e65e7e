// Products of the same few rows in one launch: a step's projections of one input. Jobs are the
// tiles of 16 outputs of all weights, computed as by SkinnyFreshKernel and SkinnyKernel, to the
// same bits. Blocks have jobs of one format: the first ones of FP8, which quantise the rows for
// themselves, the others of BF16. The norm of a product is computed by the last of its blocks that
// is done, while others still have weights to read.
#include <algorithm>
#include <climits>

#include "ops/linear/cuda_launch.cuh"
#include "ops/norm_rope_insert/cuda_norm.cuh"

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

struct TogetherNorm {
  const __nv_bfloat16* x;
  int64_t x_stride;
  int n;
  const float* weight;
  __nv_bfloat16* y;
  int64_t y_stride;
  int first_block, blocks;  // those with tiles of x; none: no norm
  uint32_t* arrived;        // of them
};

struct Together {
  Preparation<__nv_bfloat16> x;
  TogetherProduct product[kMostTogether];  // FP8 first; `first` of those that do not exist: INT_MAX
  int fp8_tiles, tiles;
  int fp8_blocks;
  int most;  // jobs of a block, or of a warp
  TogetherNorm norm;
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

static_assert(kNormThreads == kSkinnyThreads);

// Called by blocks with tiles of the norm's x when their products are stored. Nobody waits for
// another block.
__device__ void NormByLast(const TogetherNorm& p, int rows, NormSums (&sums)[kSkinnyRows]) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    __threadfence();  // what the block stored, before it is counted
    last = atomicAdd(p.arrived, 1u) == static_cast<uint32_t>(p.blocks - 1);
    __threadfence();
    if (last) *p.arrived = 0;
  }
  if (__syncthreads_or(last) == 0) return;
  for (int t = 0; t < rows; ++t) {
    // Past L1, and by a read that the compiler moves over no barrier, as it might __ldcg of bf16.
    const auto* const x = reinterpret_cast<const volatile uint16_t*>(p.x + t * p.x_stride);
    NormRow([&](int i) { return ToFloat(__ushort_as_bfloat16(x[i])); }, p.weight,
            p.y + t * p.y_stride, p.n, true, sums[t]);
  }
}

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
  const int norm_block = block - p.norm.first_block;
  const bool norms = norm_block >= 0 && norm_block < p.norm.blocks;
  if (norms && norm_block == 0) {  // nobody has read the norm's weight for a while
    constexpr int kSector = 8;     // floats
    for (int i = static_cast<int>(threadIdx.x) * kSector; i < p.norm.n;
         i += kSkinnyThreads * kSector) {
      PrefetchToL2(p.norm.weight + i);
    }
  }
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
  if (norms) NormByLast(p.norm, p.x.rows, reinterpret_cast<NormSums(&)[kSkinnyRows]>(shared.part));
}

// Whether each warp has tiles of its own.
bool ByWarp(std::span<const LinearArgs> products) {
  constexpr int64_t kMany = 1056;
  int64_t tiles = 0;
  for (const LinearArgs& p : products) {
    if (p.weight->format != Format::kFp8Block128) return false;
    tiles += CudaTiles(p.weight->out);
  }
  return tiles >= kMany;
}

int64_t SharedBytes(int64_t rows, int64_t depth) {
  return static_cast<int64_t>(sizeof(SkinnyShared<1>)) + rows * FreshStride(depth) * 2;
}

}  // namespace
}  // namespace cuda

bool LinearsCudaTake(std::span<const LinearArgs> products, const RmsNormArgs* norm) {
  if (products.size() < 2 || products.size() > kMostTogether) return false;
  const MatrixView& x = products[0].x;
  const int64_t depth = CudaDepth(x.cols);
  if (x.rows < 1 || x.rows > cuda::kSkinnyRows || !cuda::ReadableInPlace(x, 1) ||
      x.rows * cuda::FreshStride(depth) * 2 > cuda::kMostFreshBytes) {
    return false;
  }
  if (norm != nullptr) {
    const MatrixView& y = products[0].y;
    if (norm->x.data != y.data || norm->x.rows != y.rows || norm->x.cols != y.cols ||
        norm->x.stride != y.stride || y.dtype != DType::kBF16 || norm->y.dtype != DType::kBF16 ||
        norm->numerics != Numerics::kProduct || cuda::ByWarp(products)) {
      return false;
    }
  }
  return std::all_of(products.begin(), products.end(), [&](const LinearArgs& p) {
    const WeightFormat format = p.weight->format;
    return p.x.data == x.data && p.x.rows == x.rows && p.x.cols == x.cols &&
           p.x.stride == x.stride && p.numerics == Numerics::kProduct && p.weight->out >= 1 &&
           (format == WeightFormat::kFp8Block128 || format == WeightFormat::kBF16);
  });
}

void LinearsCuda(std::span<const LinearArgs> products, CudaStream stream,
                 const CudaThenNorm* then) {
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
    if (then != nullptr) {
      // The first product's tiles are the first ones of their format, and each the first job of a
      // block, as far as there are blocks.
      const bool fp8 = products[0].weight->format == Format::kFp8Block128;
      const int of_format = fp8 ? p.fp8_blocks : static_cast<int>(blocks) - p.fp8_blocks;
      const auto tiles = static_cast<int>(CudaTiles(products[0].weight->out));
      p.norm = {.x = static_cast<const __nv_bfloat16*>(then->norm.x.data),
                .x_stride = then->norm.x.stride,
                .n = static_cast<int>(then->norm.x.cols),
                .weight = then->norm.weight,
                .y = static_cast<__nv_bfloat16*>(then->norm.y.data),
                .y_stride = then->norm.y.stride,
                .first_block = fp8 ? 0 : p.fp8_blocks,
                .blocks = std::min(of_format, tiles),
                .arrived = then->arrived};
    }
    const auto kernel = TogetherKernel<decltype(by_warp)::value>;
    const int64_t shared = SharedBytes(x.rows, CudaDepth(x.cols));
    AllowShared(kernel, shared);
    LaunchOverlapped(kernel, blocks, kSkinnyThreads, shared, stream, 1, p);
  };
  if (ByWarp(products)) {
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
