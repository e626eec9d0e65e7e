// sparse_attention on CUDA. The product's rows go through tensor cores (cuda_rows.cuh), float32
// ones through multiply-adds: there a block attends with 16 heads of one token. Either it runs
// through all segments of the token, or, when there are too few tokens to fill the device, it
// computes one segment and a second kernel merges them in order. Rows are read where they lie.
#include <algorithm>
#include <cmath>

#include "ops/sparse_attention/cores.cuh"
#include "ops/sparse_attention/cuda.h"
#include "ops/sparse_attention/cuda_rows.cuh"

namespace fathom::ops {
namespace cuda {
namespace {

constexpr int64_t kWantedBlocks = 264;  // two on every multiprocessor of an H200
constexpr int64_t kMaxPartials = 2112;
constexpr int kMergeThreads = kHeadDim / 4;

// acc[i] belongs to two channels of head Core::Head(i); the softmax of head h is known to threads
// 16h .. 16h+15, which hand it to the others through shared memory.
template <class Core>
struct AttendShared {
  typename Core::Shared core;
  RowRef rows[kCudaSegment];
  MergeWeights weights[kGroupHeads];
};

// grid (tokens * groups, kSplit ? max_segments : 1).
template <class Core, bool kSplit>
__global__ void __launch_bounds__(kAttendThreads, 2) Attend(const AttentionParams p) {
  extern __shared__ __align__(16) char memory[];
  auto& shared = *reinterpret_cast<AttendShared<Core>*>(memory);
  const auto token = static_cast<int32_t>(blockIdx.x / p.groups);
  const int group = blockIdx.x % p.groups, first_head = group * kGroupHeads;
  Entries entries;
  if (!EntriesOf(p, token, &entries)) return;
  const int segments = entries.Segments();
  const int begin = kSplit ? blockIdx.y : 0;
  if (begin >= segments) return;
  const int end = kSplit ? begin + 1 : segments;

  const Core core(&shared.core);
  core.LoadQuery(p, token, first_head);
  float total[kPairs][2];
  Softmax total_state;
  for (int segment = begin; segment < end; ++segment) {
    const int count = entries.Count(segment);
    __syncthreads();
    if (threadIdx.x < count) {
      shared.rows[threadIdx.x] = EntryRow(p, entries, segment, threadIdx.x);
    }
    float acc[kPairs][2] = {};
    Softmax state = {-INFINITY, 0};
    for (int row = 0; row < count; row += Core::kTile) {
      core.Tile(shared.rows + row, min(count - row, Core::kTile), p.product, acc, &state);
    }
    if constexpr (kSplit) {
      float* part = p.partials + (int64_t{blockIdx.x} * p.max_segments + segment) * kPartialFloats;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        *reinterpret_cast<float2*>(part + Core::Head(i) * kHeadDim + Core::Channel(i)) = {
            acc[i][0], acc[i][1]};
      }
      if (threadIdx.x % 16 == 0) {
        part[kGroupHeads * kHeadDim + threadIdx.x / 16] = state.max;
        part[kGroupHeads * (kHeadDim + 1) + threadIdx.x / 16] = state.sum;
      }
    } else if (segment == 0) {
      total_state = state;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        total[i][0] = acc[i][0];
        total[i][1] = acc[i][1];
      }
    } else {
      const MergeWeights mine = Merge(&total_state, state);
      if (threadIdx.x % 16 == 0) shared.weights[threadIdx.x / 16] = mine;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const MergeWeights w = shared.weights[Core::Head(i)];
        total[i][0] = MergeValue(total[i][0], acc[i][0], w);
        total[i][1] = MergeValue(total[i][1], acc[i][1], w);
      }
    }
  }
  if constexpr (!kSplit) {
    const int head = first_head + threadIdx.x / 16;
    __syncthreads();
    if (threadIdx.x % 16 == 0 && head < p.heads) {
      shared.weights[threadIdx.x / 16].older = InverseOf(total_state, p.sink[head]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (first_head + Core::Head(i) >= p.heads) continue;
      const float inverse = shared.weights[Core::Head(i)].older;
      StoreOutput(p, token, first_head + Core::Head(i), Core::Channel(i),
                  __fmul_rn(total[i][0], inverse), __fmul_rn(total[i][1], inverse));
    }
  }
}

// grid (tokens, heads), four channels a thread.
__global__ void __launch_bounds__(kMergeThreads) MergeSegments(const AttentionParams p) {
  const auto token = static_cast<int32_t>(blockIdx.x);
  const int head = blockIdx.y, channel = threadIdx.x * 4;
  Entries entries;
  if (!EntriesOf(p, token, &entries)) return;
  const int segments = entries.Segments();
  const int in_group = head % kGroupHeads;
  const float* part = p.partials + (int64_t{token} * p.groups + head / kGroupHeads) *
                                       p.max_segments * kPartialFloats;
  const auto value = [&](int segment) {
    return *reinterpret_cast<const float4*>(part + int64_t{segment} * kPartialFloats +
                                            in_group * kHeadDim + channel);
  };
  const auto state = [&](int segment) {
    const float* at = part + int64_t{segment} * kPartialFloats + kGroupHeads * kHeadDim + in_group;
    return Softmax{at[0], at[kGroupHeads]};
  };
  float4 total = value(0);
  Softmax total_state = state(0);
#pragma unroll 4
  for (int segment = 1; segment < segments; ++segment) {
    const float4 next = value(segment);
    const MergeWeights w = Merge(&total_state, state(segment));
    total.x = MergeValue(total.x, next.x, w);
    total.y = MergeValue(total.y, next.y, w);
    total.z = MergeValue(total.z, next.z, w);
    total.w = MergeValue(total.w, next.w, w);
  }
  const float inverse = InverseOf(total_state, p.sink[head]);
  StoreOutput(p, token, head, channel, __fmul_rn(total.x, inverse), __fmul_rn(total.y, inverse));
  StoreOutput(p, token, head, channel + 2, __fmul_rn(total.z, inverse),
              __fmul_rn(total.w, inverse));
}

template <class Core, bool kSplit>
void LaunchAttend(const AttentionParams& p, CudaStream stream) {
  constexpr int kBytes = sizeof(AttendShared<Core>);
  FATHOM_CUDA_CHECK(cudaFuncSetAttribute(Attend<Core, kSplit>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  const dim3 grid(static_cast<unsigned>(p.step.num_tokens) * p.groups, kSplit ? p.max_segments : 1);
  Attend<Core, kSplit><<<grid, kAttendThreads, kBytes, stream>>>(p);
}

template <class Core>
void Launch(const AttentionParams& p, CudaStream stream) {
  const int64_t blocks = int64_t{p.step.num_tokens} * p.groups;
  const bool split =
      p.max_segments > 1 && blocks < kWantedBlocks && blocks * p.max_segments <= kMaxPartials;
  if (!split) return LaunchAttend<Core, false>(p, stream);
  LaunchAttend<Core, true>(p, stream);
  MergeSegments<<<dim3(p.step.num_tokens, p.heads), kMergeThreads, 0, stream>>>(p);
}

// The most compressed entries any token of the step can have.
int64_t CompressedEntries(const SparseAttentionArgs& args) {
  if (args.compressed.base == nullptr) return 0;
  return args.selected != nullptr ? args.top_k
                                  : int64_t{args.step->max_blocks} * args.compressed.rows_per_page;
}

int SegmentsOf(const SparseAttentionArgs& args) {
  return static_cast<int>(1 + (CompressedEntries(args) + kCudaSegment - 1) / kCudaSegment);
}

// Ranges that the tokens of a launch may keep in memory.
constexpr int64_t kKeptRanges = 2560;

// Tokens and groups of heads whose ranges are fetched before it is known how many they have.
constexpr int64_t kEagerPairs = 16;

// How many blocks share the ranges of `pairs` tokens and groups of 64 heads, by their estimated
// time in tiles of 2.4 us (measured on an H200): a block spends 4.5 on its beginning and its end
// and 1 on a range that it keeps. Adding up takes a block that has all ranges 0.6 for each; a
// launch of its own 1.2 and the time in which all ranges cross the memory bus.
int ChooseBlocks(int64_t pairs, int tiles, int ranges) {
  constexpr double kEnds = 4.5, kKept = 1, kAdded = 0.6, kLaunch = 1.2, kRangeOfBus = 0.0068;
  if (ranges == 1) return 1;
  static const int multiprocessors = [] {
    int device = 0, count = 0;
    FATHOM_CUDA_CHECK(cudaGetDevice(&device));
    FATHOM_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
  }();
  const auto per = [](int64_t n, int64_t of) { return static_cast<double>((n + of - 1) / of); };
  const double range_tiles = static_cast<double>(tiles) / ranges;
  int best = 1;
  double least = INFINITY;
  for (int blocks = 1; blocks <= ranges; ++blocks) {
    const double of_block = per(ranges, blocks);
    const double attending = std::ceil(of_block * range_tiles) + kEnds + kKept * of_block;
    const double waves = per(pairs * blocks, multiprocessors);
    const double time =
        blocks == 1 ? waves * (attending + kAdded * ranges)
                    : waves * attending + kLaunch +
                          kRangeOfBus * static_cast<double>(pairs) * static_cast<double>(ranges);
    if (time < least) {
      least = time;
      best = blocks;
    }
  }
  return best;
}

template <bool kFp8>
void LaunchRows(const SparseAttentionArgs& args, AttentionParams p, void* scratch, int blocks,
                CudaStream stream) {
  constexpr int64_t kMostTokens = 65'535;  // of a grid
  p.groups = (p.heads + kBlockHeads - 1) / kBlockHeads;
  const int64_t pairs = int64_t{p.step.num_tokens} * p.groups;
  const int tiles = TilesOf(static_cast<int>(kWindow + CompressedEntries(args)));
  p.kept = scratch;
  p.max_ranges = AttentionRanges(tiles, p.groups);
  p.blocks = std::min(blocks > 0 ? blocks : ChooseBlocks(pairs, tiles, p.max_ranges), p.max_ranges);
  p.eager = pairs <= kEagerPairs;
  const int64_t at_once =
      p.max_ranges == 1 ? kMostTokens : kKeptRanges / (int64_t{p.max_ranges} * p.groups);
  const auto groups = static_cast<unsigned>(p.groups);
  static const bool ready = [] {
    AllowShared(AttendRows<kFp8>, kAttendRowsBytes);
    AllowShared(MergeApart, sizeof(MergeApartShared));
    return true;
  }();
  (void)ready;
  for (int64_t first = 0; first < p.step.num_tokens; first += at_once) {
    p.first_token = static_cast<int32_t>(first);
    const auto tokens = static_cast<unsigned>(std::min(p.step.num_tokens - first, at_once));
    LaunchOverlapped(AttendRows<kFp8>, dim3(static_cast<unsigned>(p.blocks), groups, tokens),
                     kAttendRowsThreads, kAttendRowsBytes, stream, 1, p);
    if (p.blocks == 1) continue;
    LaunchOverlapped(MergeApart, dim3(kUnits, groups, tokens), kConsumerThreads,
                     sizeof(MergeApartShared), stream, 1, p);
  }
}

}  // namespace
}  // namespace cuda

static_assert(kSparseAttentionCudaScratchBytes ==
              cuda::kKeptRanges * int64_t{sizeof(cuda::KeptRange)});
static_assert(kSparseAttentionCudaScratchBytes >=
              cuda::kMaxPartials * cuda::kPartialFloats * int64_t{sizeof(float)});

void SparseAttentionCuda(const SparseAttentionArgs& args, void* scratch, CudaStream stream,
                         int blocks) {
  if (args.step->num_tokens == 0) return;
  cuda::AttentionParams p;
  p.step = *args.step;
  p.heads = args.heads;
  p.groups = (args.heads + cuda::kGroupHeads - 1) / cuda::kGroupHeads;
  p.q = args.q.data;
  p.out = args.out.data;
  p.q_stride = args.q.stride;
  p.out_stride = args.out.stride;
  p.q_bf16 = args.q.dtype == DType::kBF16;
  p.out_bf16 = args.out.dtype == DType::kBF16;
  p.step_rows = args.step_rows;
  p.ring = args.ring;
  p.compressed = args.compressed;
  p.page_factor =
      args.compressed.base == nullptr ? 0 : cuda::PageFactor(args.compressed.rows_per_page);
  p.selected = args.selected;
  p.counts = args.counts;
  p.top_k = args.top_k;
  p.sink = args.sink;
  p.product = args.numerics == Numerics::kProduct;
  p.partials = static_cast<float*>(scratch);
  p.max_segments = cuda::SegmentsOf(args);
  const auto all_rows_are = [&](RowFormat format) {
    return args.step_rows.format == format && args.ring.format == format &&
           (args.compressed.base == nullptr || args.compressed.format == format);
  };
  const bool on_tensor_cores = args.numerics == Numerics::kProduct &&
                               args.q.dtype == DType::kBF16 && args.out.dtype == DType::kBF16;
  if (on_tensor_cores && all_rows_are(RowFormat::kFp8Main)) {
    cuda::LaunchRows<true>(args, p, scratch, blocks, stream);
  } else if (on_tensor_cores && all_rows_are(RowFormat::kBf16)) {
    cuda::LaunchRows<false>(args, p, scratch, blocks, stream);
  } else {
    cuda::Launch<cuda::F32Core>(p, stream);
  }
  FATHOM_CUDA_CHECK(cudaGetLastError());
}

}  // namespace fathom::ops
