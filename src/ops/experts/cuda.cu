#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "ops/experts/cuda.h"
#include "ops/experts/cuda_groups.cuh"
#include "ops/experts/cuda_single.cuh"
#include "ops/linear/cuda_float.cuh"
#include "ops/linear/cuda_prepare.cuh"
#include "ops/linear/cuda_skinny.cuh"
#include "ops/linear/cuda_tile.cuh"
#include "ops/linear/cuda_wide.cuh"

namespace fathom::ops {
namespace cuda {
namespace {

// Pairs of an expert that one block works on: 8 stream its weights, once for every 8 of them; more
// share their expansion.
int TileRows(int64_t tokens, int top_k, int num_experts) {
  const int64_t routed = tokens * top_k;
  if (routed <= 64 || routed <= int64_t{16} * num_experts) return kSkinnyRows;
  return routed <= int64_t{128} * num_experts ? 64 : 128;
}

// One of the two products of every pair: w1 and w3 side by side, or w2.
struct GroupedProduct {
  Groups groups;
  const CudaWeightView* table;  // [num_experts + 1][w1, w2, w3]
  int num_experts;
  bool up;         // w1 and w3 of a token's row, else w2 of a pair's row
  bool all_float;  // kReference
  int slots;       // top_k + 1
  int tokens;
  const char* x[2];     // activations for routed experts and for the shared one
  int64_t x_stride[2];  // bytes
  int out;              // outputs of one matrix
  int64_t y_stride;     // elements; up: w1's outputs, then w3's
  bool round;
};

// What a block works on.
struct Block {
  GroupTile tile;
  CudaWeightView w;
  int out0;
  int matrix;  // 0, or 1 for w3
  bool is_float;
};

// False for blocks beyond the last tile.
__device__ bool FindBlock(const GroupedProduct& p, int outputs_per_block, Block& block) {
  const int index = static_cast<int>(blockIdx.x);
  if (index >= *p.groups.num_tiles) return false;
  block.tile = p.groups.tiles[index];
  const int per_matrix = (p.out + outputs_per_block - 1) / outputs_per_block;
  block.matrix = static_cast<int>(blockIdx.y) / per_matrix;
  block.out0 = static_cast<int>(blockIdx.y) % per_matrix * outputs_per_block;
  block.w = p.table[block.tile.expert * 3 + (p.up ? 2 * block.matrix : 1)];
  block.is_float = p.all_float || block.w.format == Format::kF32;
  return true;
}

__device__ int64_t PairOf(const GroupedProduct& p, const Block& block, int r) {
  return p.groups.pairs[block.tile.first + r];
}
__device__ const char* InputOf(const GroupedProduct& p, const Block& block, int r) {
  const int64_t pair = PairOf(p, block, r);
  const int shared = block.tile.expert == p.num_experts ? 1 : 0;
  return p.x[shared] + (p.up ? pair / p.slots : pair) * p.x_stride[shared];
}
template <class T>
__device__ T* OutputOf(const GroupedProduct& p, const Block& block, int r, T* y) {
  return y + PairOf(p, block, r) * p.y_stride + int64_t{block.matrix} * p.out;
}

// Jobs of the tiles of the sorted list from one on: 16 outputs of a matrix each, matrices of a tile
// in a row, every step-th one.
struct GroupedCursor {
  const uint8_t* data;
  const uint8_t* scale;
  bool wide;
  int out0, out_end;
  static constexpr int out_begin = 0;
  int rows;
  const __nv_bfloat16* x[1];
  const GroupedProduct* p;
  Block block;
  int index, matrix, out_step;

  // job: counted from the tile on.
  __device__ GroupedCursor(const GroupedProduct& product, int first_tile, int job, int step)
      : out_end(product.out), p(&product), out_step(step * kTile) {
    const int per_matrix = (p->out + kTile - 1) / kTile;
    const int matrices = p->up ? 2 : 1;
    index = first_tile + job / (per_matrix * matrices);
    matrix = job / per_matrix % matrices;
    out0 = job % per_matrix * kTile;
    Enter();
  }

  __device__ void Next() {
    out0 += out_step;
    if (out0 < p->out) return;
    const int padded = (p->out + kTile - 1) / kTile * kTile;
    do {
      out0 -= padded;
      if (p->up && matrix == 0) {
        matrix = 1;
      } else {
        matrix = 0;
        ++index;
      }
    } while (out0 >= p->out);
    Enter();
  }

 private:
  __device__ void Enter() {
    block.tile = p->groups.tiles[index];
    block.matrix = matrix;
    const CudaWeightView& w = p->table[block.tile.expert * 3 + (p->up ? 2 * matrix : 1)];
    data = w.data;
    scale = w.scale;
    wide = w.wide;
    rows = block.tile.rows;
    const int lane_row = static_cast<int>(threadIdx.x) % 32 / 4;
    x[0] = reinterpret_cast<const __nv_bfloat16*>(InputOf(*p, block, min(lane_row, rows - 1)));
  }
};

// Tiles [first, end) of the sorted list, for blocks [0, blocks), of which this is number `block`.
struct GroupedShare {
  int first, end;
  int block, blocks;
};

// The jobs of the tiles that fall to this block: neighbours, so that its warps share their rows.
template <Format F, class T>
__device__ void GroupedSkinny(const GroupedProduct& p, const GroupedShare& share, int depth,
                              SkinnyShared<1>& shared, T* y) {
  constexpr int kWarps = kSkinnyThreads / 32;
  const int per_matrix = (p.out + kTile - 1) / kTile;
  const int first = share.first, blocks = share.blocks;
  const int jobs = (share.end - first) * per_matrix * (p.up ? 2 : 1);
  const int begin = static_cast<int>(int64_t{jobs} * share.block / blocks);
  const int count = static_cast<int>(int64_t{jobs} * (share.block + 1) / blocks) - begin;
  const auto store = [&](const GroupedCursor& at, int r, int o, float v) {
    OutputOf(p, at.block, r, y)[o] = FromFloat<T>(RoundIf(v, p.round));
  };
  // By warp where that keeps the warps about equally busy.
  const int warps = kWarps * blocks;
  if (jobs >= 2 * warps || (jobs <= warps && 8 * jobs >= 7 * warps)) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp >= count) return;
    SkinnyByWarp<F, 1>((count - warp + kWarps - 1) / kWarps, depth, shared,
                       GroupedCursor(p, first, begin + warp, kWarps), [] {}, store);
  } else if (count > 0) {
    SkinnyByBlock<F, 1>(
        count, depth, shared, GroupedCursor(p, first, begin, 1), [](int, int) {}, store);
  }
}

__device__ constexpr int UnitBytesOf(Format format) {
  return format == Format::kFp4Block32    ? kUnitBytes<Format::kFp4Block32>
         : format == Format::kFp8Block128 ? kUnitBytes<Format::kFp8Block128>
                                          : kUnitBytes<Format::kBF16>;
}

// One-dimensional grid. The first blocks work on the routed experts' tiles, the others on the
// shared expert's, which may differ in format, in proportion to the bytes of their weights.
template <class T>
__global__ void __launch_bounds__(kSkinnyThreads, 2)
    GroupedSkinnyKernel(const __grid_constant__ GroupedProduct p, T* y) {
  auto& shared = SharedOf<SkinnyShared<1>>();
  const auto blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  LetNextStart();
  WaitForPrevious();  // the list is new
  const int tiles = *p.groups.num_tiles;
  const int routed_tiles = tiles - (p.tokens + kSkinnyRows - 1) / kSkinnyRows;
  const CudaWeightView* const routed = p.table + (p.up ? 0 : 1);
  const CudaWeightView* const common = routed + p.num_experts * 3;
  const int64_t routed_bytes = int64_t{routed_tiles} * UnitBytesOf(routed->format);
  const int64_t all_bytes =
      routed_bytes + int64_t{tiles - routed_tiles} * UnitBytesOf(common->format);
  const int split = max(1, min(blocks - 1, static_cast<int>(blocks * routed_bytes / all_bytes)));
  const bool is_routed = block < split;
  const GroupedShare share = is_routed
                                 ? GroupedShare{0, routed_tiles, block, split}
                                 : GroupedShare{routed_tiles, tiles, block - split, blocks - split};
  const CudaWeightView& w = is_routed ? *routed : *common;
  switch (w.format) {
    case Format::kFp8Block128:
      GroupedSkinny<Format::kFp8Block128>(p, share, w.depth, shared, y);
      break;
    case Format::kFp4Block32:
      GroupedSkinny<Format::kFp4Block32>(p, share, w.depth, shared, y);
      break;
    case Format::kBF16: GroupedSkinny<Format::kBF16>(p, share, w.depth, shared, y); break;
    case Format::kF32: break;  // GroupedFloatKernel
  }
}

// kRows pairs of an expert and kWideOutputs outputs a block.
template <int kRows, class T>
__global__ void __launch_bounds__(kWideThreads, 1)
    GroupedWideKernel(const __grid_constant__ GroupedProduct p, T* y) {
  extern __shared__ __align__(16) unsigned char shared[];
  Block block;
  if (!FindBlock(p, kWideOutputs, block) || block.is_float) return;
  const auto row_of = [&](int r) {
    return r < block.tile.rows ? reinterpret_cast<const __nv_bfloat16*>(InputOf(p, block, r))
                               : nullptr;
  };
  const auto* any = reinterpret_cast<const __nv_bfloat16*>(p.x[0]);
  const bool vector = p.out % 4 == 0;
  const auto store = [&](int r, int o, const float4& v, int n) {
    StoreResults(OutputOf(p, block, r, y) + o, v, n, p.round, vector);
  };
  if (block.w.format == Format::kFp8Block128) {
    WideProduct<Format::kFp8Block128, kRows>(block.w, block.out0, p.out, any, row_of,
                                             block.tile.rows, shared, store);
  } else if (block.w.format == Format::kFp4Block32) {
    WideProduct<Format::kFp4Block32, kRows>(block.w, block.out0, p.out, any, row_of,
                                            block.tile.rows, shared, store);
  }
}

// The same with BF16 weights.
template <int kRows, class T>
__global__ void __launch_bounds__(kTileThreads, 1)
    GroupedTileKernel(const __grid_constant__ GroupedProduct p, T* y) {
  extern __shared__ __align__(16) unsigned char shared[];
  Block block;
  if (!FindBlock(p, kTileOutputs, block) || block.is_float) return;
  if (block.w.format != Format::kBF16) return;
  const bool vector = p.out % 4 == 0;
  TileProduct<kRows>(
      block.w, block.out0, p.out, reinterpret_cast<const __nv_bfloat16*>(p.x[0]),
      [&](int r) {
        return r < block.tile.rows ? reinterpret_cast<const __nv_bfloat16*>(InputOf(p, block, r))
                                   : nullptr;
      },
      block.tile.rows, shared,
      [&](int r, int o, const float4& v, int n) {
        StoreResults(OutputOf(p, block, r, y) + o, v, n, p.round, vector);
      });
}

template <class T>
__global__ void __launch_bounds__(kFloatThreads)
    GroupedFloatKernel(const __grid_constant__ GroupedProduct p, T* y) {
  __shared__ FloatShared shared;
  Block block;
  if (!FindBlock(p, kFloatOutputs, block) || !block.is_float) return;
  for (int first = 0; first < block.tile.rows; first += kFloatRows) {
    FloatProduct(
        block.w, block.out0, p.out, min(kFloatRows, block.tile.rows - first), shared,
        [&](int r, int k) {
          return reinterpret_cast<const float*>(InputOf(p, block, first + r))[k];
        },
        [&](int r, int o, float v) {
          OutputOf(p, block, first + r, y)[o] = FromFloat<T>(RoundIf(v, p.round));
        });
  }
}

// The first block makes the groups, the others prepare z.
template <class T>
__global__ void __launch_bounds__(kGroupThreads)
    GroupKernel(const int32_t* chosen, int tokens, int top_k, int num_experts, int tile_rows,
                Groups groups, Preparation<T> z) {
  LetNextStart();
  WaitForPrevious();
  if (blockIdx.x == 0) {
    MakeGroups(chosen, tokens, top_k, num_experts, tile_rows, groups);
  } else {
    z.Run(int64_t{blockIdx.x - 1} * (kGroupThreads / 32) + threadIdx.x / 32);
  }
}

struct Activation {
  const float* weights;  // [tokens, slots - 1]
  int slots;
  float limit, shared_limit;
  Form form, shared_form;
  int64_t pairs;
  int inner;
  int units;
  int64_t a_stride;  // bytes
  bool round;
};

// a = silu(min(g, limit)) * clamp(u, +-limit) * weight, in w2's form; a warp per unit of a pair.
template <class T>
__global__ void __launch_bounds__(256) SwigluKernel(Activation p, const T* gate_up, char* a) {
  LetNextStart();
  WaitForPrevious();
  const int64_t job = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  if (job >= p.pairs * p.units) return;
  const int64_t pair = job / p.units;
  const int unit = static_cast<int>(job % p.units);
  const int64_t token = pair / p.slots;
  const int slot = static_cast<int>(pair % p.slots);
  const bool shared = slot == p.slots - 1;
  const float limit = shared ? p.shared_limit : p.limit;
  const float weight = shared ? 1.0f : p.weights[token * (p.slots - 1) + slot];
  const T* g = gate_up + pair * 2 * p.inner;
  const T* u = g + p.inner;
  const int k = unit * kUnit + 4 * static_cast<int>(threadIdx.x % 32);
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = 0.0f;
    if (k + i >= p.inner) continue;
    v[i] = RoundIf(Swiglu(ToFloat(g[k + i]), ToFloat(u[k + i]), limit, weight), p.round);
  }
  StoreUnit(shared ? p.shared_form : p.form, v, unit, a + pair * p.a_stride);
}

// y[t] = the token's pairs, ascending slot, shared last. Block (channels, token).
template <class T>
__global__ void __launch_bounds__(256)
    CombineKernel(const T* parts, int slots, int hidden, bool round, T* y, int64_t y_stride) {
  LetNextStart();
  WaitForPrevious();
  const int channel = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  if (channel >= hidden) return;
  const int64_t token = blockIdx.y;
  const T* part = parts + token * slots * hidden + channel;
  float sum = 0;
  for (int s = 0; s < slots; ++s) sum += ToFloat(part[int64_t{s} * hidden]);
  y[token * y_stride + channel] = FromFloat<T>(RoundIf(sum, round));
}

constexpr int64_t FormBytes(Form form) {
  return form == Form::kFloat ? 4 : 2;
}

// Where everything lies in the scratch.
struct Plan {
  Form z_form[2], a_form[2];  // routed, shared
  int hidden, inner, slots;
  int64_t z_stride, a_stride;  // bytes
  int64_t element;             // of gate_up and parts
  int64_t num_tiles, tiles, pairs, z[2], gate_up, a, parts, bytes;

  Plan(const ExpertsArgs& args, int64_t rows) {
    const ExpertWeights& routed = args.experts[0];
    hidden = static_cast<int>(routed.w1.in);
    inner = static_cast<int>(routed.w1.out);
    slots = args.top_k + 1;
    const bool wide = TileRows(rows, args.top_k, args.num_experts) != kSkinnyRows;
    const auto form_of = [&](const LinearWeight& weight) {
      const Form form = FormOf(weight.format, args.numerics);
      return wide ? WideForm(form, weight.format) : form;
    };
    z_form[0] = form_of(routed.w1);
    z_form[1] = form_of(args.shared->w1);
    a_form[0] = form_of(routed.w2);
    a_form[1] = form_of(args.shared->w2);
    const auto widest = [](const Form* form) {
      return FormBytes(form[0]) > FormBytes(form[1]) ? FormBytes(form[0]) : FormBytes(form[1]);
    };
    z_stride = CudaDepth(hidden) * widest(z_form);
    a_stride = CudaDepth(inner) * widest(a_form);
    element = args.numerics == Numerics::kProduct ? 2 : 4;  // rounded to bf16 by the contract
    const int64_t count = rows * slots;
    int64_t at = 0;
    const auto take = [&](int64_t size) {
      const int64_t begin = at;
      at += (size + 255) / 256 * 256;
      return begin;
    };
    num_tiles = take(sizeof(int32_t));
    tiles = take(MaxTiles(rows, args.top_k, args.num_experts, kSkinnyRows) *
                 static_cast<int64_t>(sizeof(GroupTile)));
    pairs = take(count * static_cast<int64_t>(sizeof(int32_t)));
    z[0] = take(rows * z_stride);
    z[1] = z_form[0] == z_form[1] ? z[0] : take(rows * z_stride);
    gate_up = take(count * 2 * inner * element);
    a = take(count * a_stride);
    parts = take(count * hidden * element);
    bytes = at;
  }
};

// Tiles of kRows pairs. form: of the routed experts and of the shared one.
template <int kRows, class T>
void LaunchTiles(const GroupedProduct& p, const Form form[2], int64_t max_tiles, T* y,
                 cudaStream_t stream) {
  const auto launch = [&](auto kernel, int outputs, int threads, int bytes) {
    AllowShared(kernel, bytes);
    const dim3 grid(static_cast<unsigned>(max_tiles), (p.up ? 2 : 1) * Blocks(p.out, outputs));
    kernel<<<grid, threads, bytes, stream>>>(p, y);
  };
  const auto some = [&](Form f) { return form[0] == f || form[1] == f; };
  if (some(Form::kWideFp8) || some(Form::kWideFp4)) {
    launch(GroupedWideKernel<kRows, T>, kWideOutputs, kWideThreads, kWideSharedBytes<kRows>);
  }
  if (some(Form::kPlain)) {
    launch(GroupedTileKernel<kRows, T>, kTileOutputs, kTileThreads, kTileSharedBytes<kRows>);
  }
}

template <class T>
void LaunchProduct(const GroupedProduct& p, const Form form[2], int tile_rows, int64_t max_tiles,
                   T* y, cudaStream_t stream) {
  if (form[0] != Form::kFloat || form[1] != Form::kFloat) {
    if (tile_rows == kSkinnyRows) {
      constexpr auto kShared = static_cast<int64_t>(sizeof(SkinnyShared<1>));
      AllowShared(GroupedSkinnyKernel<T>, kShared);
      LaunchOverlapped(GroupedSkinnyKernel<T>, kSkinnyBlocks, kSkinnyThreads, kShared, stream, 1, p,
                       y);
    } else if (tile_rows == 64) {
      LaunchTiles<64>(p, form, max_tiles, y, stream);
    } else {
      LaunchTiles<128>(p, form, max_tiles, y, stream);
    }
  }
  if (form[0] == Form::kFloat || form[1] == Form::kFloat) {
    const dim3 grid(static_cast<unsigned>(max_tiles),
                    (p.up ? 2 : 1) * Blocks(p.out, kFloatOutputs));
    GroupedFloatKernel<T><<<grid, kFloatThreads, 0, stream>>>(p, y);
  }
  FATHOM_CUDA_CHECK(cudaGetLastError());
}

// Whether the launches for a single token do: of a checkpoint's formats.
bool IsSingle(const ExpertsArgs& args) {
  const auto both = [](const ExpertWeights& e, WeightFormat format) {
    return e.w1.format == format && e.w2.format == format;
  };
  return args.z.rows == 1 && args.numerics == Numerics::kProduct &&
         args.top_k <= kMostSingleSlots &&
         SingleFits(static_cast<int>(args.experts[0].w1.in),
                    static_cast<int>(args.experts[0].w1.out)) &&
         both(args.experts[0], WeightFormat::kFp4Block32) &&
         both(*args.shared, WeightFormat::kFp8Block128);
}

template <class T>
void Run(const ExpertsArgs& args, char* scratch, cudaStream_t stream) {
  const int64_t rows = args.z.rows;
  const Plan plan(args, rows);
  const bool product = args.numerics == Numerics::kProduct;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (IsSingle(args)) {
      const SingleToken p = {.table = PackedCuda(args.experts[0].w1).experts,
                             .chosen = args.chosen,
                             .weights = args.weights,
                             .num_experts = args.num_experts,
                             .top_k = args.top_k,
                             .hidden = plan.hidden,
                             .inner = plan.inner,
                             .limit = args.limit,
                             .shared_limit = args.shared_limit};
      WithActivationType(args.z.dtype, [&]<class Z>(Z) {
        LaunchSingle<Format::kFp4Block32, Format::kFp8Block128, Z>(
            p, args.z, reinterpret_cast<T*>(scratch + plan.a), static_cast<T*>(args.y.data),
            stream);
      });
      return;
    }
  }
  const int tile_rows = TileRows(rows, args.top_k, args.num_experts);
  const Groups groups{reinterpret_cast<int32_t*>(scratch + plan.num_tiles),
                      reinterpret_cast<GroupTile*>(scratch + plan.tiles),
                      reinterpret_cast<int32_t*>(scratch + plan.pairs)};
  WithActivationType(args.z.dtype, [&]<class Z>(Z) {
    const auto z = MakePreparation<Z>(args.z, plan.z_form[0], scratch + plan.z[0]);
    LaunchOverlapped(GroupKernel<Z>, 1 + Blocks(rows * z.units, kGroupThreads / 32), kGroupThreads,
                     2 * (args.num_experts + 1) * static_cast<int64_t>(sizeof(int32_t)), stream, 1,
                     args.chosen, static_cast<int>(rows), args.top_k, args.num_experts, tile_rows,
                     groups, z);
  });
  if (plan.z_form[0] != plan.z_form[1]) {
    Prepare(args.z, plan.z_form[1], scratch + plan.z[1], stream);
  }

  GroupedProduct p;
  p.groups = groups;
  p.table = PackedCuda(args.experts[0].w1).experts;
  p.num_experts = args.num_experts;
  p.all_float = !product;
  p.slots = plan.slots;
  p.tokens = static_cast<int>(rows);
  p.round = product;
  const int64_t max_tiles = MaxTiles(rows, args.top_k, args.num_experts, tile_rows);
  const auto launch = [&](const Form form[2], T* y) {
    LaunchProduct<T>(p, form, tile_rows, max_tiles, y, stream);
  };

  auto* gate_up = reinterpret_cast<T*>(scratch + plan.gate_up);
  p.up = true;
  p.x[0] = scratch + plan.z[0];
  p.x[1] = scratch + plan.z[1];
  p.x_stride[0] = CudaDepth(plan.hidden) * FormBytes(plan.z_form[0]);
  p.x_stride[1] = CudaDepth(plan.hidden) * FormBytes(plan.z_form[1]);
  p.out = plan.inner;
  p.y_stride = 2 * int64_t{plan.inner};
  launch(plan.z_form, gate_up);

  const Activation activation{.weights = args.weights,
                              .slots = plan.slots,
                              .limit = args.limit,
                              .shared_limit = args.shared_limit,
                              .form = plan.a_form[0],
                              .shared_form = plan.a_form[1],
                              .pairs = rows * plan.slots,
                              .inner = plan.inner,
                              .units = static_cast<int>(CudaDepth(plan.inner) / kUnit),
                              .a_stride = plan.a_stride,
                              .round = product};
  LaunchOverlapped(SwigluKernel<T>, Blocks(activation.pairs * activation.units, 8), 256, 0, stream,
                   1, activation, static_cast<const T*>(gate_up), scratch + plan.a);

  auto* parts = reinterpret_cast<T*>(scratch + plan.parts);
  p.up = false;
  p.x[0] = p.x[1] = scratch + plan.a;
  p.x_stride[0] = p.x_stride[1] = plan.a_stride;
  p.out = plan.hidden;
  p.y_stride = plan.hidden;
  launch(plan.a_form, parts);

  LaunchOverlapped(CombineKernel<T>, dim3(Blocks(plan.hidden, 256), static_cast<unsigned>(rows)),
                   256, 0, stream, 1, static_cast<const T*>(parts), plan.slots, plan.hidden,
                   product, static_cast<T*>(args.y.data), args.y.stride);
}

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fathom: experts on CUDA: %s\n", what);
  std::abort();
}

}  // namespace
}  // namespace cuda

int64_t CudaExpertsBytes(const ExpertWeights* experts, int num_experts,
                         const ExpertWeights& shared) {
  const auto of = [](const ExpertWeights& e) {
    return CudaWeightBytes(e.w1) + CudaWeightBytes(e.w2) + CudaWeightBytes(e.w3);
  };
  int64_t bytes = of(shared);
  for (int e = 0; e < num_experts; ++e) bytes += of(experts[e]);
  return bytes +
         (3 * (num_experts + 1) * static_cast<int64_t>(sizeof(CudaWeightView)) + 255) / 256 * 256;
}

void PackExpertsCuda(ExpertWeights* experts, int num_experts, ExpertWeights& shared,
                     const CudaAllocate& allocate) {
  std::vector<CudaWeightView> table;
  table.reserve(3 * (num_experts + 1));
  const auto pack = [&](ExpertWeights& e, const ExpertWeights& like) {
    cuda::Require(e.w1.format == like.w1.format && e.w3.format == like.w1.format &&
                      e.w2.format == like.w2.format,
                  "the experts of a layer differ in format");
    cuda::Require(e.w1.out == experts[0].w1.out && e.w1.in == experts[0].w1.in &&
                      e.w3.out == e.w1.out && e.w3.in == e.w1.in && e.w2.out == e.w1.in &&
                      e.w2.in == e.w1.out,
                  "the experts of a layer differ in shape");
    for (LinearWeight* w : {&e.w1, &e.w2, &e.w3}) {
      PackLinearCuda(*w, allocate);
      table.push_back(PackedCuda(*w).view);
    }
  };
  for (int e = 0; e < num_experts; ++e) pack(experts[e], experts[0]);
  pack(shared, shared);
  auto* first = static_cast<CudaWeight*>(experts[0].w1.packed.get());
  const size_t bytes = table.size() * sizeof(CudaWeightView);
  void* memory = nullptr;
  if (allocate) {
    memory = allocate(static_cast<int64_t>(bytes));
  } else {
    FATHOM_CUDA_CHECK(cudaMalloc(&memory, bytes));
    first->owned[1] = memory;
  }
  FATHOM_CUDA_CHECK(cudaMemcpy(memory, table.data(), bytes, cudaMemcpyHostToDevice));
  first->experts = static_cast<const CudaWeightView*>(memory);
}

int64_t ExpertsCudaScratchBytes(const ExpertsArgs& args, int64_t rows) {
  return cuda::Plan(args, rows).bytes;
}

void ExpertsCuda(const ExpertsArgs& args, void* scratch, CudaStream stream) {
  const bool product = args.numerics == Numerics::kProduct;
  cuda::Require(PackedCuda(args.experts[0].w1).experts != nullptr, "PackExpertsCuda has not run");
  cuda::Require(args.y.dtype == (product ? DType::kBF16 : DType::kF32),
                "y has another type than activations");
  if (product) {
    cuda::Run<__nv_bfloat16>(args, static_cast<char*>(scratch), stream);
  } else {
    cuda::Run<float>(args, static_cast<char*>(scratch), stream);
  }
}

}  // namespace fathom::ops
