// indexer on CUDA: queries are prepared in place, then blocks scan ranges of a token's rows, each
// keeping the best k of its range in shared memory, and the ranges are merged. No score reaches
// memory (unless `scores` asks), and the number of ranges depends on the number of tokens alone.
// Neither ranges nor merging change a selection (top.cuh).
#include <algorithm>
#include <cmath>

#include "ops/indexer/cuda.h"
#include "ops/indexer/score.cuh"

namespace fathom::ops {
namespace cuda {
namespace {

constexpr int kWantedBlocks = 264;  // two on every multiprocessor of an H200
constexpr int kMaxRanges = 132;
constexpr int kMergedLists = 16;  // lists that one block merges
constexpr int kMinRangeRows = 512;

int RangesOf(int64_t tokens) {
  return static_cast<int>(
      std::min<int64_t>((kWantedBlocks + tokens - 1) / std::max<int64_t>(tokens, 1), kMaxRanges));
}

int MergesOf(int ranges) {
  return ranges <= kMergedLists ? 1 : (ranges + kMergedLists - 1) / kMergedLists;
}

struct IndexerParams {
  StepView step;
  int heads, top_k;
  void* q;
  void* w;
  int64_t q_stride, w_stride;
  bool q_bf16, w_bf16;
  const float* rope;
  PagedRows keys;
  int32_t* selected;
  int32_t* counts;
  float* scores;
  int64_t scores_stride;
  bool product;
  float weight_scale;
};

// Best rows of ranges: entries [T, lists, top_k] and how many of each.
struct Lists {
  Entry* entries;
  int32_t* counts;
  int lists;  // per token

  __device__ Entry* EntriesOf(int64_t token, int list, int top_k) const {
    return entries + (token * lists + list) * top_k;
  }
  __device__ int32_t& CountOf(int64_t token, int list) const {
    return counts[token * lists + list];
  }
};

// Tokens that only fill up a captured batch have a position below 0 and see nothing.
__device__ int32_t VisibleRows(const IndexerParams& p, int64_t token) {
  return max(p.step.position[token] + 1, 0) / 4;
}

__device__ bool IsScored(const IndexerParams& p, int32_t visible) {
  return p.top_k > 0 && (visible > p.top_k || (p.scores != nullptr && visible > 0));
}

// Queries are prepared where rows are scored, and all of them where scores are asked for.
__device__ bool IsPrepared(const IndexerParams& p, int64_t token) {
  return p.scores != nullptr || IsScored(p, VisibleRows(p, token));
}

// A warp per head: RoPE, then what the format of the keys asks for, and the head's weight.
template <class T>
__global__ void __launch_bounds__(256) PrepareQuery(const IndexerParams p) {
  const int64_t index = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  const int64_t token = index / p.heads;
  const int head = static_cast<int>(index % p.heads), lane = threadIdx.x % 32;
  if (token >= p.step.num_tokens || !IsPrepared(p, token)) return;
  T* q = static_cast<T*>(p.q) + token * p.q_stride + head * kIndexDim;
  float v[4];
  LoadWarpRow(q, v, lane);
  if (lane >= 16) {
    const auto table =
        reinterpret_cast<const float4*>(p.rope + token * kRopeDim)[lane - 16];  // cos, sin twice
    const float c[2] = {table.x, table.z}, s[2] = {table.y, table.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float a = v[2 * i], b = v[2 * i + 1];
      v[2 * i] = RoundIf(__fsub_rn(__fmul_rn(a, c[i]), __fmul_rn(b, s[i])), p.product);
      v[2 * i + 1] = RoundIf(__fadd_rn(__fmul_rn(a, s[i]), __fmul_rn(b, c[i])), p.product);
    }
  }
  if (p.keys.format == RowFormat::kFp4Index) {
    HadamardWarpRow(v, lane, p.product);
    RoundFp4WarpRow(v);
  } else if (p.keys.format == RowFormat::kFp8Index) {
    RoundFp8WarpBlock(v);
  }
  StoreWarpRow(v, q, lane);
  if (lane == 0) {
    const int64_t at = token * p.w_stride + head;
    const float w = RoundIf(__fmul_rn(LoadFloat(p.w, p.w_bf16, at), p.weight_scale), p.product);
    if (p.w_bf16) {
      static_cast<__nv_bfloat16*>(p.w)[at] = __float2bfloat16_rn(w);
    } else {
      static_cast<float*>(p.w)[at] = w;
    }
  }
}

__device__ void WriteSelection(const IndexerParams& p, int64_t token, Top& top) {
  const int n = top.Keep();
  const int32_t* rows = top.SortedRows(n);
  int32_t* out = p.selected + token * p.top_k;
  for (int i = threadIdx.x; i < p.top_k; i += kTopThreads) out[i] = i < n ? rows[i] : -1;
  if (threadIdx.x == 0) p.counts[token] = n;
}

__device__ void WriteList(const Lists& out, int64_t token, int list, int top_k, Top& top) {
  const int n = top.Keep();
  Entry* entries = out.EntriesOf(token, list, top_k);
  for (int i = threadIdx.x; i < n; i += kTopThreads) entries[i] = top.entries()[i];
  if (threadIdx.x == 0) out.CountOf(token, list) = n;
}

// grid (tokens, ranges).
template <class Scorer>
__global__ void __launch_bounds__(kTopThreads) ScanRows(const IndexerParams p, const Lists lists) {
  static_assert(Scorer::kRows <= kTopTile);
  extern __shared__ __align__(16) char shared[];
  __shared__ Top::Shared top_shared;
  const int64_t token = blockIdx.x;
  const int32_t visible = VisibleRows(p, token);
  const int ranges = gridDim.y;
  if (!IsScored(p, visible)) {
    if (blockIdx.y != 0) return;
    int32_t* out = p.selected + token * p.top_k;
    for (int i = threadIdx.x; i < p.top_k; i += kTopThreads) out[i] = i < visible ? i : -1;
    if (threadIdx.x == 0) p.counts[token] = min(visible, p.top_k);
    return;
  }
  const int32_t tiles = (visible + Scorer::kRows - 1) / Scorer::kRows;
  const int32_t range_rows =
      max((tiles + ranges - 1) / ranges * Scorer::kRows, ranges == 1 ? 0 : kMinRangeRows);
  const int32_t first =
      static_cast<int32_t>(min(int64_t{blockIdx.y} * range_rows, int64_t{visible}));
  const int32_t last = min(first + range_rows, visible);
  if (first == last) {
    if (threadIdx.x == 0) lists.CountOf(token, blockIdx.y) = 0;
    return;
  }
  QueryView query;
  const int64_t q_bytes = p.q_bf16 ? 2 : 4, w_bytes = p.w_bf16 ? 2 : 4;
  query.q = static_cast<const char*>(p.q) + token * p.q_stride * q_bytes;
  query.w = static_cast<const char*>(p.w) + token * p.w_stride * w_bytes;
  query.q_bf16 = p.q_bf16;
  query.w_bf16 = p.w_bf16;
  query.heads = p.heads;
  auto* buffer = reinterpret_cast<Entry*>(shared);
  const Scorer scorer(query, shared + TopCapacity(p.top_k) * sizeof(Entry));
  Top top(&top_shared, buffer, p.top_k);
  KeyRows keys;
  keys.pages = p.keys;
  keys.blocks = p.step.block_table + int64_t{p.step.sequence[token]} * p.step.max_blocks;
  float* scores = p.scores == nullptr ? nullptr : p.scores + token * p.scores_stride;
  for (int32_t row = first; row < last; row += Scorer::kRows) {
    scorer.Score(keys, row, last, [&](bool valid, int32_t r, float score) {
      if (scores != nullptr && valid) scores[r] = score;
      top.Offer(valid, MakeEntry(score, r));
    });
    top.Flush();
  }
  if (ranges == 1) {
    WriteSelection(p, token, top);
  } else {
    WriteList(lists, token, blockIdx.y, p.top_k, top);
  }
}

// grid (tokens, merges): block m of a token merges lists [16 m, 16 m + 16).
__global__ void __launch_bounds__(kTopThreads)
    MergeRanges(const IndexerParams p, const Lists in, const Lists out) {
  extern __shared__ __align__(16) char shared[];
  __shared__ Top::Shared top_shared;
  const int64_t token = blockIdx.x;
  if (!IsScored(p, VisibleRows(p, token))) return;
  Top top(&top_shared, reinterpret_cast<Entry*>(shared), p.top_k);
  const int first = blockIdx.y * kMergedLists, last = min(first + kMergedLists, in.lists);
  for (int list = first; list < last; ++list) {
    const Entry* entries = in.EntriesOf(token, list, p.top_k);
    const int n = in.CountOf(token, list);
    for (int base = 0; base < n; base += kTopThreads) {
      const int i = base + threadIdx.x;
      top.Offer(i < n, i < n ? entries[i] : 0);
      top.Flush();
    }
  }
  if (gridDim.y == 1) {
    WriteSelection(p, token, top);
  } else {
    WriteList(out, token, blockIdx.y, p.top_k, top);
  }
}

// Kernels that need more shared memory than the default have to say so.
template <class Kernel>
void AllowShared(Kernel kernel, int64_t bytes) {
  if (bytes <= 48 * 1024) return;
  FATHOM_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(bytes)));
}

template <class Scorer>
void LaunchScan(const IndexerParams& p, const Lists& lists, int64_t query_bytes,
                CudaStream stream) {
  const int64_t bytes = TopCapacity(p.top_k) * int64_t{sizeof(Entry)} + query_bytes;
  AllowShared(ScanRows<Scorer>, bytes);
  ScanRows<Scorer><<<dim3(p.step.num_tokens, lists.lists), kTopThreads, bytes, stream>>>(p, lists);
}

template <template <int> class Scorer>
void LaunchTiles(const IndexerParams& p, const Lists& lists, CudaStream stream) {
  const auto launch = [&]<int kTiles>() {
    LaunchScan<Scorer<kTiles>>(p, lists, Scorer<kTiles>::kSharedBytes, stream);
  };
  if (p.heads <= 8) launch.template operator()<1>();
  else if (p.heads <= 16) launch.template operator()<2>();
  else if (p.heads <= 32) launch.template operator()<4>();
  else if (p.heads <= 64) launch.template operator()<8>();
  else launch.template operator()<16>();
}

// The lists of `tokens` tokens lie behind each other: entries of ranges, of merges, then counts.
int64_t ListsOf(int64_t tokens) {
  const int ranges = RangesOf(tokens);
  if (ranges == 1) return 0;
  const int merges = MergesOf(ranges);
  return tokens * (ranges + (merges > 1 ? merges : 0));
}

}  // namespace
}  // namespace cuda

int64_t IndexerCudaScratchBytes(int64_t max_tokens, int top_k) {
  int64_t lists = 0;
  for (int64_t tokens = 1; tokens <= std::min<int64_t>(max_tokens, cuda::kWantedBlocks); ++tokens) {
    lists = std::max(lists, cuda::ListsOf(tokens));
  }
  return lists * (top_k * int64_t{sizeof(cuda::Entry)} + int64_t{sizeof(int32_t)});
}

void IndexerCuda(const IndexerArgs& args, void* scratch, CudaStream stream) {
  const int64_t tokens = args.step->num_tokens;
  if (tokens == 0) return;
  const bool product = args.numerics == Numerics::kProduct;
  cuda::IndexerParams p;
  p.step = *args.step;
  p.heads = args.heads;
  p.top_k = args.top_k;
  p.q = args.q.data;
  p.w = args.w.data;
  p.q_stride = args.q.stride;
  p.w_stride = args.w.stride;
  p.q_bf16 = args.q.dtype == DType::kBF16;
  p.w_bf16 = args.w.dtype == DType::kBF16;
  p.rope = args.rope;
  p.keys = args.keys;
  p.selected = args.selected;
  p.counts = args.counts;
  p.scores = args.scores;
  p.scores_stride = args.scores_stride;
  p.product = product;
  p.weight_scale = static_cast<float>(1.0 / std::sqrt(double{kIndexDim} * args.heads));
  if (product) p.weight_scale = RoundBf16(p.weight_scale);

  cuda::WithActivationType(args.q.dtype, [&](auto type) {
    cuda::PrepareQuery<decltype(type)><<<cuda::Blocks(tokens * args.heads, 8), 256, 0, stream>>>(p);
  });

  const int ranges = cuda::RangesOf(tokens);
  const int merges = cuda::MergesOf(ranges);
  auto* entries = static_cast<cuda::Entry*>(scratch);
  auto* counts = reinterpret_cast<int32_t*>(entries + cuda::ListsOf(tokens) * args.top_k);
  const cuda::Lists of_ranges{entries, counts, ranges};
  const cuda::Lists of_merges{entries + tokens * ranges * args.top_k, counts + tokens * ranges,
                              merges};
  if (args.keys.format == RowFormat::kFp4Index) {
    cuda::LaunchTiles<cuda::Fp4Scorer>(p, of_ranges, stream);
  } else if (p.q_bf16 && args.keys.format != RowFormat::kF32) {
    cuda::LaunchTiles<cuda::Bf16Scorer>(p, of_ranges, stream);
  } else {
    cuda::LaunchScan<cuda::FmaScorer>(p, of_ranges, cuda::FmaScorer::SharedBytes(args.heads),
                                      stream);
  }
  if (ranges > 1) {
    const int64_t bytes = cuda::TopCapacity(args.top_k) * int64_t{sizeof(cuda::Entry)};
    cuda::AllowShared(cuda::MergeRanges, bytes);
    cuda::MergeRanges<<<dim3(tokens, merges), cuda::kTopThreads, bytes, stream>>>(p, of_ranges,
                                                                                  of_merges);
    if (merges > 1) {
      cuda::MergeRanges<<<dim3(tokens, 1), cuda::kTopThreads, bytes, stream>>>(p, of_merges,
                                                                               of_merges);
    }
  }
  FATHOM_CUDA_CHECK(cudaGetLastError());
}

}  // namespace fathom::ops
