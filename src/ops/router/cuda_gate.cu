// The gate product and the choice of experts of few tokens, by one cluster of 16 blocks.
//
// The product is that of linear/cuda_skinny.cuh, bit by bit: a warp has one of the eight segments
// of a tile of 16 outputs, its chain of mma, and the segments are added in ascending order. That
// chain (4 units of 8 mma each for 4,096 inputs, some 1,050 cycles) is the shortest the sum can be;
// everything else runs beside it or before it: weights come to shared memory, Flash's 2 MiB as a
// whole, 128 KiB a block, while the kernel in front still runs, and all activations of a segment
// are asked for at once. Blocks turn their logits into scores and keys, and store them in the first
// block's shared memory, where a warp per token chooses. Nothing passes through global memory:
// several clusters would have to meet there, which takes two trips to L2 and a fence (some 1,500
// cycles; a store to a neighbour and its barrier about 300).
//
// Gates of more than 256 experts have half tiles as well: block b has tile b and 8 outputs of tile
// 16 + b / 2, so that 384 experts are 24 outputs in every block. An output's sum does not depend on
// what else is in its tile. What does not fit in shared memory is brought to L2 meanwhile.
#include <algorithm>

#include "ops/linear/cuda_skinny.cuh"
#include "ops/router/cuda.h"
#include "ops/router/cuda_choose.cuh"

namespace fathom::ops {
namespace {

using namespace router;
using cuda::kSegments;
using cuda::kTile;
using cuda::kUnit;

constexpr int kCluster = 16;
constexpr int kRows = cuda::kSkinnyRows;
constexpr int kOutputs = kTile + kTile / 2;  // of a block
constexpr int kMostExperts = kCluster * kOutputs;
constexpr int kMostStages = 8;
constexpr int kUnitCodes = kTile * cuda::kUnitBytes<WeightFormat::kBF16>;  // bytes of a tile's unit
constexpr int kMostShared = 227 << 10;

struct GateParams {
  const uint8_t* data;  // CudaWeightView's
  int experts, units;
  const __nv_bfloat16* x;
  int64_t x_stride;
  int rows, in;
  const float* bias;
  const int64_t* tid2eid;
  const int32_t* token;
  int top_k;
  float scale;
  int32_t* chosen;
  float* weights;
  int stages;  // units of a warp that fit in shared memory
};

// Dynamic shared memory: GateShared; scores [rows][padded experts] f64 and keys u32 likewise, which
// the cluster stores in the first block; the weights, for each warp [stages] units.
struct alignas(128) GateShared {
  float part[kSegments][kRows][kOutputs];
  uint64_t here[2 * kSegments][kMostStages];  // barriers of the stages
  uint64_t arrived;                           // of scores and keys
};

__host__ __device__ constexpr int Padded(int experts) {
  return (experts + 31) / 32 * 32;
}
constexpr int IncomingBytes(int rows, int experts) {
  return rows * Padded(experts) * static_cast<int>(sizeof(double) + sizeof(unsigned));
}

// FenceBarrierInit has made the barriers ready for the cluster.
__device__ inline void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Brings `bytes`, a multiple of 16, to the L2 cache.
__device__ inline void PrefetchBulk(const void* at, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
}

// Stores a value in the first block's shared memory, at the place of this block's `to`, and counts
// its bytes at the place of `barrier`.
__device__ inline void SendToFirst(double* to, double value, uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 at, bar;\n"
      "mapa.shared::cluster.u32 at, %0, 0;\n"
      "mapa.shared::cluster.u32 bar, %1, 0;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [at], %2, [bar];\n"
      "}" ::"r"(cuda::SharedAddress(to)),
      "r"(cuda::SharedAddress(barrier)), "l"(__double_as_longlong(value))
      : "memory");
}
__device__ inline void SendToFirst(unsigned* to, unsigned value, uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 at, bar;\n"
      "mapa.shared::cluster.u32 at, %0, 0;\n"
      "mapa.shared::cluster.u32 bar, %1, 0;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [at], %2, [bar];\n"
      "}" ::"r"(cuda::SharedAddress(to)),
      "r"(cuda::SharedAddress(barrier)), "r"(value)
      : "memory");
}

// A warp's segment of a tile, or of half of one.
template <bool kResident>
struct Segment {
  // Units whose activations are in registers or on their way: a unit's chain takes some 260 cycles,
  // a load from L2 some 700.
  static constexpr int kHeld = kResident ? 4 : 3;

  const uint8_t* weights;  // of the first unit
  uint8_t* ring;
  uint64_t* here;
  const __nv_bfloat16* x;  // the lane's row at its quarter of the segment's first unit
  int left;                // inputs of the row from there on
  int count;               // units
  int stages;
  bool half;
  bool whole;  // all inputs of all units exist

  __device__ int StageBytes() const { return half ? kUnitCodes / 2 : kUnitCodes; }

  // Asks for a unit's weights. One lane.
  __device__ void Ask(int unit, int slot) const {
    const uint8_t* from = weights + int64_t{unit} * kUnitCodes;
    uint8_t* const to = ring + slot * StageBytes();
    cuda::BarrierArriveExpecting(&here[slot], static_cast<uint32_t>(StageBytes()));
    if (kResident || !half) return cuda::CopyBulkOnce(to, from, kUnitCodes, &here[slot]);
    constexpr int kPiece = cuda::kTilePieceBytes;
    for (int i = 0; i < kUnitCodes / kPiece; ++i) {
      cuda::CopyBulkOnce(to + i * kPiece / 2, from + i * kPiece, kPiece / 2, &here[slot]);
    }
  }

  // One lane. prefetch: what does not fit yet comes to L2.
  __device__ void Begin(bool prefetch) const {
    for (int i = 0; i < min(stages, count); ++i) cuda::BarrierInit(&here[i], 1);
    cuda::FenceBarrierInit();
    for (int i = 0; i < min(stages, count); ++i) Ask(i, i);
    if (kResident || !prefetch || count <= stages) return;
    PrefetchBulk(weights + int64_t{stages} * kUnitCodes,
                 static_cast<uint32_t>((count - stages) * kUnitCodes));
  }

  // Zeros beyond the row's end.
  __device__ void LoadActivations(int unit, uint4 (&v)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = unit * kUnit + cuda::UnitChunk<WeightFormat::kBF16>(0, e);
      v[e] = unit < count && at < left ? cuda::LoadChunk(x + at) : uint4{};
    }
  }
  __device__ void LoadActivations(int first, uint4 (&v)[kHeld][4]) const {
    if (whole && first + kHeld <= count) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          v[i][e] =
              cuda::LoadChunk(x + (first + i) * kUnit + cuda::UnitChunk<WeightFormat::kBF16>(0, e));
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) LoadActivations(first + i, v[i]);
    }
  }

  __device__ void Multiply(int slot, const uint4 (&v)[4], float (&sum)[4]) const {
    constexpr int kPiece = cuda::kTilePieceBytes;
    const int piece = kResident || !half ? kPiece : kPiece / 2;
    const uint32_t at = cuda::SharedAddress(ring) + static_cast<uint32_t>(slot * StageBytes()) +
                        threadIdx.x % 32 * 16;
    uint4 a[4], b[4];  // of the lane's two outputs
#pragma unroll
    for (int e = 0; e < 4; ++e) a[e] = cuda::SharedAt<uint4>(at + e * piece);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      b[e] = kResident || !half ? cuda::SharedAt<uint4>(at + e * piece + kPiece / 2) : uint4{};
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      cuda::Mma(sum, a[e].x, b[e].x, a[e].y, b[e].y, v[e].x, v[e].y);
      cuda::Mma(sum, a[e].z, b[e].z, a[e].w, b[e].w, v[e].z, v[e].w);
    }
  }

  // meanwhile() is called when the first activations have been asked for.
  template <class Meanwhile>
  __device__ void Run(float (&sum)[4], Meanwhile&& meanwhile) const {
    uint4 v[kHeld][4];
    LoadActivations(0, v);
    if (count > 0) cuda::BarrierWait(&here[0], 0);
    meanwhile();
    if constexpr (kResident) {
      for (int first = 0; first < count;) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          if (first + i < count) cuda::BarrierWait(&here[first + i], 0);
        }
        if (first + kHeld <= count) {  // no branches between products
#pragma unroll
          for (int i = 0; i < kHeld; ++i) Multiply(first + i, v[i], sum);
        } else {
#pragma unroll
          for (int i = 0; i < kHeld; ++i) {
            if (first + i < count) Multiply(first + i, v[i], sum);
          }
        }
        first += kHeld;
        if (first < count) LoadActivations(first, v);
      }
    } else {
      int slot = 0;
      uint32_t phase = 0;
      for (int first = 0; first < count; first += kHeld) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          const int unit = first + i;
          if (unit >= count) break;
          cuda::BarrierWait(&here[slot], phase);
          Multiply(slot, v[i], sum);
          LoadActivations(unit + kHeld, v[i]);
          __syncwarp();  // all lanes have read the stage
          if (threadIdx.x % 32 == 0 && unit + stages < count) Ask(unit + stages, slot);
          if (++slot == stages) slot = 0, phase ^= 1;
        }
      }
    }
  }
};

// kResident: up to 256 experts whose weights fit in shared memory. 8 warps, or 16, of which the
// upper 8 have the half tile.
template <bool kResident>
__global__ void __launch_bounds__(32 * kSegments * (kResident ? 1 : 2), 1) Gate(GateParams p) {
  constexpr int kSlots = kResident ? 8 : kMostExperts / 32;
  GateShared& shared = cuda::SharedOf<GateShared>();
  const int padded = Padded(p.experts);
  auto* const scores = reinterpret_cast<double*>(&shared + 1);
  auto* const keys = reinterpret_cast<unsigned*>(scores + p.rows * padded);
  auto* const ring = reinterpret_cast<uint8_t*>(keys + p.rows * padded);
  const auto thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const auto rank = static_cast<int>(blockIdx.x);  // in the cluster
  const bool learned = p.tid2eid == nullptr;

  const bool half = !kResident && warp >= kSegments;
  const int index = warp % kSegments, tile = half ? kCluster + rank / 2 : rank;
  const bool has_tile = tile * kTile < p.experts;
  const int begin = cuda::SegmentBegin(index, p.units);
  const int count = has_tile ? cuda::SegmentBegin(index + 1, p.units) - begin : 0;
  const int input = begin * kUnit + 8 * (lane & 3);
  const Segment<kResident> segment = {
      .weights = p.data + (int64_t{tile} * p.units + begin) * kUnitCodes +
                 (half ? rank % 2 * (cuda::kTilePieceBytes / 2) : 0),
      .ring = ring + (half ? kSegments * p.stages * kUnitCodes : 0) +
              index * p.stages * (half ? kUnitCodes / 2 : kUnitCodes),
      .here = shared.here[warp],
      .x = p.x + min(lane / 4, p.rows - 1) * p.x_stride + input,
      .left = p.in - input,
      .count = count,
      .stages = p.stages,
      .half = half,
      .whole = p.in >= (begin + count) * kUnit};
  // The neighbour's half tile lies between the pieces of this one.
  if (lane == 0) segment.Begin(!half || rank % 2 == 0);
  cuda::LetNextStart();
  if (rank == 0 && thread == 0) {
    cuda::BarrierInit(&shared.arrived, 1);
    cuda::BarrierArriveExpecting(&shared.arrived,
                                 static_cast<uint32_t>(p.rows * p.experts) *
                                     (sizeof(double) + (learned ? sizeof(unsigned) : 0)));
    cuda::FenceBarrierInit();
  }

  // The logit whose segments the thread adds: row, place in the block, expert.
  const int of_tile = kTile * p.rows, of_half = kResident ? 0 : kTile / 2 * p.rows;
  const bool second = thread >= of_tile;
  const int at = second ? thread - of_tile : thread, width = second ? kTile / 2 : kTile;
  const int row = at / width, output = at % width;
  int expert = second ? (kCluster + rank / 2) * kTile + rank % 2 * (kTile / 2) + output
                      : rank * kTile + output;
  if (thread >= of_tile + of_half || expert >= p.experts) expert = -1;
  const float bias = learned && expert >= 0 ? p.bias[expert] : 0.0f;

  __syncwarp();
  ClusterArrive();
  cuda::WaitForPrevious();
  int mine = -1;
  float sum[4] = {};
  segment.Run(sum, [&] {
    if (rank != 0 || learned || warp >= p.rows || lane >= p.top_k) return;
    mine = static_cast<int>(p.tid2eid[int64_t{p.token[warp]} * p.top_k + lane]);
  });
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int t = cuda::MmaRow(i), o = cuda::MmaOutput(i);
    if (t >= p.rows || (half && o >= kTile / 2)) continue;
    shared.part[index][t][half ? kTile + o : o] = sum[i];
  }
  ClusterWait();
  __syncthreads();
  if (expert >= 0) {
    float logit = 0;
#pragma unroll
    for (int s = 0; s < kSegments; ++s)
      logit += shared.part[s][row][second ? kTile + output : output];
    const double score = Score(logit);
    SendToFirst(scores + row * padded + expert, score, &shared.arrived);
    if (learned) {
      const unsigned key = Key(static_cast<float>(score) + bias);
      SendToFirst(keys + row * padded + expert, key, &shared.arrived);
    }
  }
  if (rank != 0 || warp >= p.rows) return;
  // Nobody stores in a block that has ended: this warp waits for everything that comes.
  cuda::BarrierWaitCluster(&shared.arrived, 0);
  if (learned) {
    unsigned key[kSlots];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const int e = 32 * j + lane;
      key[j] = e < p.experts ? keys[warp * padded + e] : 0;
    }
    mine = Choose(key, p.experts, p.top_k);
  }
  const double score = lane < p.top_k ? scores[warp * padded + mine] : 0.0;
  WriteRoute(mine, score, p.top_k, p.scale, p.chosen + warp * p.top_k, p.weights + warp * p.top_k);
}

}  // namespace

bool GateAndRouteCudaTakes(const LinearArgs& gate, const RouterArgs& route) {
  const LinearWeight& w = *gate.weight;
  const MatrixView& x = gate.x;
  return gate.numerics == Numerics::kProduct && w.format == WeightFormat::kBF16 &&
         !gate.round_output && w.out <= kMostExperts && x.rows >= 1 && x.rows <= kRows &&
         x.dtype == DType::kBF16 && x.cols % 8 == 0 && x.stride % 8 == 0 &&
         reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && route.top_k <= kRouterCudaChosen &&
         route.logits.dtype == DType::kF32;
}

void GateAndRouteCuda(const LinearArgs& gate, const RouterArgs& route, CudaStream stream) {
  const CudaWeightView& w = PackedCuda(*gate.weight).view;
  GateParams params = {.data = w.data,
                       .experts = w.out,
                       .units = w.depth / kUnit,
                       .x = static_cast<const __nv_bfloat16*>(gate.x.data),
                       .x_stride = gate.x.stride,
                       .rows = static_cast<int>(gate.x.rows),
                       .in = w.in,
                       .bias = route.bias,
                       .tid2eid = route.tid2eid,
                       .token = route.token,
                       .top_k = route.top_k,
                       .scale = route.scale,
                       .chosen = route.experts,
                       .weights = route.weights,
                       .stages = 0};
  const int fixed = static_cast<int>(sizeof(GateShared)) + IncomingBytes(params.rows, w.out);
  const bool halves = w.out > kCluster * kTile;
  const int of_stage = kSegments * kUnitCodes * (halves ? 3 : 2) / 2;
  const int count = (params.units + kSegments - 1) / kSegments;  // of the longest segment
  params.stages = std::max(1, std::min({count, kMostStages, (kMostShared - fixed) / of_stage}));
  const auto launch = [&](auto kernel, unsigned threads) {
    const int64_t shared = fixed + int64_t{params.stages} * of_stage;
    cuda::AllowShared(kernel, shared);
    FATHOM_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    cuda::LaunchOverlapped(kernel, kCluster, threads, shared, stream, kCluster, params);
  };
  if (!halves && params.stages == count) {
    launch(Gate<true>, 32 * kSegments);
  } else {
    launch(Gate<false>, 32 * kSegments * (halves ? 2 : 1));
  }
}

}  // namespace fathom::ops
