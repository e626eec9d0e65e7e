// The experts of a single token in two launches: gate and up products with SwiGLU, then down
// products with the sum over slots. Every slot is a tile of its own, so nothing is sorted; both
// kernels quantise activations for themselves while their first weights come. The same bits as the
// launches for more tokens.
#pragma once

#include "ops/linear/cuda_prepare.cuh"
#include "ops/linear/cuda_skinny.cuh"

namespace fathom::ops::cuda {

struct SingleToken {
  const CudaWeightView* table;  // [num_experts + 1][w1, w2, w3]
  const int32_t* chosen;        // [top_k]
  const float* weights;         // [top_k]
  int num_experts, top_k;
  int hidden, inner;
  float limit, shared_limit;
};

// What w2 takes of a gate and an up product, of any number of tokens (experts.h).
__device__ inline float Swiglu(float gate, float up, float limit, float weight) {
  const float g = fminf(gate, limit), u = fminf(fmaxf(up, -limit), limit);
  return g / (1.0f + expf(-g)) * u * weight;
}

inline constexpr int kMostSingleSlots = kSegments - 2;  // routed ones: a warp each, the shared two

// Blocks of SingleUp for so many slots with `width` warps a tile.
__host__ __device__ constexpr int SingleUpBlocks(int inner, int slots, int width) {
  const int warps = (inner + kTile - 1) / kTile * slots * width;
  return (warps + kSegments - 1) / kSegments;
}

// Expert number `slot` of the token; from L2, since it may be read before WaitForPrevious.
__device__ inline int SingleExpert(const SingleToken& p, int slot) {
  return slot == p.top_k ? p.num_experts : __ldcg(p.chosen + slot);
}

// A warp's only job, or jobs of one slot: tiles of 16 outputs of a weight, every step-th one.
template <Format F>
struct SingleCursor {
  const uint8_t* data;
  const uint8_t* scale;
  bool wide;
  int out0, step;
  FreshRow<F> x[1];

  __device__ SingleCursor(const CudaWeightView& w, FreshRow<F> row, int tile, int by)
      : data(w.data), scale(w.scale), wide(w.wide), out0(tile * kTile), step(by), x{row} {}
  __device__ void Next() { out0 += step * kTile; }
};

// What a warp does of the sum over a tile's inputs: everything, or the lower or the upper half of
// the segments. Sums are added up in the order of SkinnyByBlock: those of the upper half are kept
// one by one until the lower half's sum is known.
enum class Part : uint8_t { kAll, kLower, kUpper };
inline constexpr int kHalf = kSegments / 2;
struct PartSums {
  float value[kHalf][kTile];  // [0]: of kAll and kLower; each segment's of kUpper
};

__device__ inline float TotalOf(const PartSums& all, int output) {
  return all.value[0][output];
}
__device__ inline float TotalOf(const PartSums& lower, const PartSums& upper, int output) {
  float total = lower.value[0][output];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) total += upper.value[i][output];
  return total;
}

// Units [begin, end) of a tile's inputs.
struct PartUnits {
  int begin, end;

  __device__ PartUnits(Part part, int units)
      : begin(part == Part::kUpper ? SegmentBegin(kHalf, units) : 0),
        end(part == Part::kLower ? SegmentBegin(kHalf, units) : units) {}
};

// Adds up what StreamRuns gives, segment by segment, row 0 alone: lanes 0, 4, ... hold its outputs
// lane / 4 and 8 more. kWhole: of kAll, else of a half.
template <bool kWhole>
struct PartRuns {
  static constexpr int kCount = kWhole ? kSegments : kHalf;
  int first;  // segment
  int kept = 0;
  float total[2] = {};

  __device__ explicit PartRuns(Part part) : first(part == Part::kUpper ? kHalf : 0) {}

  // At the end of a segment, the last one of a tile's when `last`: `sums` is then complete.
  __device__ void Add(float (&sum)[1][4], bool last, PartSums& sums) {
    total[0] += sum[0][0], total[1] += sum[0][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[0][i] = 0;
    if (kWhole || first == 0) {
      if (last) Keep(0, sums);
      return;
    }
    Keep(kept++, sums);
    if (!last) return;
    // Empty segments have no place of their own: zeros after the others add nothing.
    while (kept < kHalf) Keep(kept++, sums);
    kept = 0;
  }

 private:
  __device__ void Keep(int i, PartSums& sums) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane % 4 == 0) sums.value[i][lane / 4] = total[0], sums.value[i][lane / 4 + 8] = total[1];
    total[0] = total[1] = 0;
  }
};

struct SingleUpShared {
  SkinnyRing ring[kSegments];
  PartSums part[kSegments];
};

// a [top_k + 1, inner] = silu(min(g, limit)) * clamp(u, +-limit) * weight, not quantised. Two warps
// share 16 channels of a routed slot, one for w1 and one for w3; four those of the shared expert,
// whose inputs they halve: every warp reads about as many bytes. The first blocks are the routed
// slots'. Dynamic shared memory: SingleUpShared, then z.
template <Format kRouted, Format kShared, class Z, class T>
__global__ void __launch_bounds__(kSkinnyThreads, 2)
    SingleUp(const __grid_constant__ SingleToken p, Preparation<Z> z, T* a) {
  auto& s = SharedOf<SingleUpShared>();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int tiles = (p.inner + kTile - 1) / kTile;
  const int routed_blocks = SingleUpBlocks(p.inner, p.top_k, 2);
  const auto block = static_cast<int>(blockIdx.x);
  const bool routed = block < routed_blocks;
  const int width = routed ? 2 : 4;  // warps of a job
  const int member = warp % width, matrix = member * 2 / width;
  const Part part = routed ? Part::kAll : member % 2 == 0 ? Part::kLower : Part::kUpper;
  const int job = (routed ? block : block - routed_blocks) * (kSegments / width) + warp / width;
  const int jobs = routed ? tiles * p.top_k : tiles;
  const int slot = routed ? min(job, jobs - 1) / tiles : p.top_k;
  const int tile = min(job, jobs - 1) % tiles;
  // The warp's activations, of which the first are asked for before the expert is known.
  FourUnits<Z> four;
  const auto wait = [&] {
    WaitForPrevious();
    LetNextStart();
    four.Load(z.x, z.in, z.vector, 4 * warp, z.units);
  };
  if (routed) {
    // Which experts, is new; all that may be looked up then comes to L2.
    if (block == 0) {
      const auto* const first = reinterpret_cast<const char*>(p.table);
      const int bytes = p.num_experts * 3 * static_cast<int>(sizeof(CudaWeightView));
      for (int i = 128 * thread; i < bytes; i += 128 * kSkinnyThreads) {
        PrefetchToL2(first + i);
      }
    }
    wait();
  }
  const CudaWeightView& w = p.table[SingleExpert(p, slot) * 3 + 2 * matrix];
  const auto run = [&]<Format F, bool kWhole>() {
    const FreshRow<F> fresh{SharedAddress(&s + 1)};
    const auto ready = [&] {
      if (!routed) wait();
      for (int unit = 4 * warp; unit < z.units; unit += 4 * kSegments) {
        if (unit > 4 * warp) four.Load(z.x, z.in, z.vector, unit, z.units);
        four.Store(unit, z.units, fresh);
      }
      __syncthreads();
    };
    const PartUnits mine(part, z.units);
    const SingleCursor<F> cursor(w, fresh, tile, 0);
    PartRuns<kWhole> sums(part);
    StreamRuns<F, 1, PartRuns<kWhole>::kCount>(
        s.ring[warp], 1, z.units, sums.first, cursor, ready,
        [&](const auto&, float(&sum)[1][4], bool last) { sums.Add(sum, last, s.part[warp]); });
    if (mine.begin == mine.end && lane < kTile) {  // the lower half of a single unit
      for (int i = 0; i < kHalf; ++i) s.part[warp].value[i][lane] = 0;
    }
  };
  if (routed) {
    run.template operator()<kRouted, true>();
  } else {
    run.template operator()<kShared, false>();
  }
  SyncNamed(1 + warp / width, 32 * width);
  const int o = tile * kTile + lane;
  if (member != 0 || lane >= kTile || o >= p.inner || job >= jobs) return;
  const PartSums* const of = s.part + warp;
  const float gate = routed ? TotalOf(of[0], lane) : TotalOf(of[0], of[1], lane);
  const float up = routed ? TotalOf(of[1], lane) : TotalOf(of[2], of[3], lane);
  const float limit = routed ? p.limit : p.shared_limit;
  const float weight = routed ? p.weights[slot] : 1.0f;
  a[slot * p.inner + o] =
      FromFloat<T>(RoundBf16(Swiglu(RoundBf16(gate), RoundBf16(up), limit, weight)));
}

struct SingleDownShared {
  SkinnyRing ring[kSegments];
  PartSums part[2][kSegments];  // two tiles in turn: one barrier a tile
};

// y = the slots' w2 a, ascending slot, shared last. A warp per routed slot, two for the shared
// one's halves; a block works on one tile of 16 outputs after the other. Dynamic shared memory:
// SingleDownShared, then a [kSegments - 1][units * 128].
template <Format kRouted, Format kShared, class T>
__global__ void __launch_bounds__(kSkinnyThreads, 2)
    SingleDown(const __grid_constant__ SingleToken p, const T* a, T* y) {
  auto& s = SharedOf<SingleDownShared>();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  constexpr int kLower = kSegments - 2, kUpper = kSegments - 1;  // warps of the shared expert
  const bool routed = warp < kLower;
  const Part part = routed ? Part::kAll : warp == kLower ? Part::kLower : Part::kUpper;
  const int slot = routed ? warp : p.top_k;
  const int units = (p.inner + kUnit - 1) / kUnit;
  const PartUnits mine(part, units);
  const bool works = mine.begin < mine.end && (!routed || warp < p.top_k);
  // The kernel in front lets this one start when the choice of experts is complete.
  const CudaWeightView& w = p.table[(works ? SingleExpert(p, slot) : p.num_experts) * 3 + 1];
  const int tiles = (p.hidden + kTile - 1) / kTile, step = static_cast<int>(gridDim.x);
  const int jobs = (tiles - static_cast<int>(blockIdx.x) + step - 1) / step;

  LetNextStart();
  int tile = static_cast<int>(blockIdx.x), index = 0;
  const auto finish = [&] {
    const PartSums* const sums = s.part[index++ % 2];
    __syncthreads();
    const int o = tile * kTile + thread;
    if (thread < kTile && o < p.hidden) {
      float sum = 0;
      for (int i = 0; i < p.top_k; ++i) sum += RoundBf16(TotalOf(sums[i], thread));
      y[o] = FromFloat<T>(RoundBf16(sum + RoundBf16(TotalOf(sums[kLower], sums[kUpper], thread))));
    }
    tile += step;
  };
  const auto run = [&]<Format F, bool kWhole>() {
    const FreshRow<F> fresh{SharedAddress(&s + 1) +
                            static_cast<uint32_t>((routed ? warp : kLower) * units * kUnit * 2)};
    const auto ready = [&] {
      WaitForPrevious();
      const T* const row = a + slot * p.inner;
      constexpr int kBatch = 4;  // of loads at once
      for (int first = mine.begin; first < mine.end; first += 4 * kBatch) {
        FourUnits<T> four[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          four[i].Load(row, p.inner, p.inner % 8 == 0, first + 4 * i, mine.end);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) four[i].Store(first + 4 * i, mine.end, fresh);
      }
      __syncwarp();
    };
    const SingleCursor<F> cursor(w, fresh, tile, step);
    PartRuns<kWhole> sums(part);
    StreamRuns<F, 1, PartRuns<kWhole>::kCount>(s.ring[warp], jobs, units, sums.first, cursor, ready,
                                               [&](const auto&, float(&sum)[1][4], bool last) {
                                                 sums.Add(sum, last, s.part[index % 2][warp]);
                                                 if (last) finish();
                                               });
  };
  if (!works) {
    WaitForPrevious();
    if (lane < kTile) {
      for (int i = 0; i < 2 * kHalf; ++i) s.part[i / kHalf][warp].value[i % kHalf][lane] = 0;
    }
    for (int i = 0; i < jobs; ++i) finish();
  } else if (routed) {
    run.template operator()<kRouted, true>();
  } else {
    run.template operator()<kShared, false>();
  }
}

// Bytes of shared memory of the two kernels.
inline int64_t SingleUpBytes(int hidden) {
  return static_cast<int64_t>(sizeof(SingleUpShared)) + CudaDepth(hidden) * 2;
}
inline int64_t SingleDownBytes(int inner) {
  return static_cast<int64_t>(sizeof(SingleDownShared)) + (kSegments - 1) * CudaDepth(inner) * 2;
}
inline bool SingleFits(int hidden, int inner) {
  constexpr int64_t kMost = 227 << 10;  // of a block of an H200
  return SingleUpBytes(hidden) <= kMost && SingleDownBytes(inner) <= kMost;
}

// a: scratch, [top_k + 1, inner].
template <Format kRouted, Format kShared, class Z, class T>
void LaunchSingle(const SingleToken& p, const MatrixView& z, T* a, T* y, cudaStream_t stream) {
  const auto up = SingleUp<kRouted, kShared, Z, T>;
  const int64_t up_bytes = SingleUpBytes(p.hidden);
  AllowShared(up, up_bytes);
  LaunchOverlapped(up, SingleUpBlocks(p.inner, p.top_k, 2) + SingleUpBlocks(p.inner, 1, 4),
                   kSkinnyThreads, up_bytes, stream, 1, p,
                   MakePreparation<Z>(z, Form::kQuantised, nullptr), a);
  const auto down = SingleDown<kRouted, kShared, T>;
  const int64_t down_bytes = SingleDownBytes(p.inner);
  AllowShared(down, down_bytes);
  const auto tiles = static_cast<int>(Blocks(p.hidden, kTile));
  LaunchOverlapped(down, Blocks(tiles, Blocks(tiles, kSkinnyBlocks)), kSkinnyThreads, down_bytes,
                   stream, 1, p, static_cast<const T*>(a), y);
}

}  // namespace fathom::ops::cuda
