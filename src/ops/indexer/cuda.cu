// indexer on CUDA, in three launches: queries are prepared and packed, blocks score ranges of rows
// into a tile of bounded size (in decode they share all rows of all tokens: cuda_ring.cuh), and a
// block per token selects. A step with more tokens than the tile holds takes several passes.
// Neither passes nor ranges change a score or a selection. Few tokens of short contexts can do
// everything in one launch (cuda_short.cuh).
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "ops/indexer/cuda.h"
#include "ops/indexer/cuda_ring.cuh"
#include "ops/indexer/cuda_scan.cuh"
#include "ops/indexer/cuda_select.cuh"
#include "ops/indexer/cuda_short.cuh"

namespace fathom::ops {
namespace cuda {
namespace {

constexpr int kWantedBlocks = 264;  // two on every multiprocessor of an H200
constexpr int kTilesPerBlock = 16;  // of 64 rows, where there are many

int PaddedHeads(int heads) {
  int padded = 8;
  while (padded < heads) padded *= 2;
  return padded;
}

// Ranges of rows for `units` blocks along the other axis: enough to fill the device, more where the
// ranges stay long.
int RangesOf(int64_t units, int64_t rows) {
  const int64_t tiles = (rows + kScanRows - 1) / kScanRows;
  const auto at_most = [&](int64_t blocks, int64_t tiles_each) {
    return std::min((blocks + units - 1) / units, (tiles + tiles_each - 1) / tiles_each);
  };
  return static_cast<int>(std::max<int64_t>(
      1, std::max(at_most(4 * kWantedBlocks, kTilesPerBlock), at_most(kWantedBlocks, 2))));
}

template <class Keys, int kHeads>
void LaunchTokens(const IndexerParams& p, int64_t rows, CudaStream stream) {
  const unsigned units = Blocks(p.num_tokens, kScanTokens);
  constexpr int64_t kBytes = ScanSharedBytes<Keys, kHeads>();
  AllowShared(ScanRows<Keys, kHeads>, kBytes);
  LaunchOverlapped(ScanRows<Keys, kHeads>, dim3(RangesOf(units, rows), units), kScanThreads, kBytes,
                   stream, 1, p);
}

// Whether tiles of 64 rows lie each in one page, where bulk copies can fetch them.
bool HasPagesOfTiles(const IndexerParams& p) {
  return p.page_shift >= 6 && p.keys.block_stride % 16 == 0 &&
         reinterpret_cast<uintptr_t>(p.keys.base) % 16 == 0;
}

template <class Keys, int kHeads>
void LaunchRing(const IndexerParams& p, int64_t rows, CudaStream stream) {
  constexpr int64_t kBytes = RingSharedBytes<Keys, kHeads>();
  AllowShared(ScanRing<Keys, kHeads>, kBytes);
  const int64_t tiles = std::max<int64_t>(1, p.num_tokens * Blocks(rows, kScanRows));
  LaunchOverlapped(ScanRing<Keys, kHeads>,
                   dim3(static_cast<unsigned>(std::min<int64_t>(tiles, kWantedBlocks))),
                   RingShape<Keys, kHeads>::kThreads, kBytes, stream, 1, p);
}

// Tokens of a prompt share the decoding of keys; a sequence's single token has nothing to share.
bool IsDecode(const IndexerParams& p) {
  return p.step.num_tokens <= p.step.num_sequences && HasPagesOfTiles(p);
}

template <class Keys, int kHeads>
void LaunchScanHeads(const IndexerParams& p, int64_t rows, CudaStream stream) {
  IsDecode(p) ? LaunchRing<Keys, kHeads>(p, rows, stream)
              : LaunchTokens<Keys, kHeads>(p, rows, stream);
}

template <class Keys>
void LaunchScan(const IndexerParams& p, int64_t rows, CudaStream stream) {
  switch (p.padded_heads) {
    case 8: return LaunchScanHeads<Keys, 8>(p, rows, stream);
    case 16: return LaunchScanHeads<Keys, 16>(p, rows, stream);
    case 32: return LaunchScanHeads<Keys, 32>(p, rows, stream);
    case 64: return LaunchScanHeads<Keys, 64>(p, rows, stream);
    default: return LaunchScanHeads<Keys, 128>(p, rows, stream);
  }
}

template <class Keys, int kHeads>
void LaunchShortHeads(const IndexerParams& p, CudaStream stream) {
  constexpr int64_t kBytes = ShortLayout<Keys, kHeads>::kBytes;
  AllowShared(IndexShort<Keys, kHeads>, kBytes);
  LaunchOverlapped(IndexShort<Keys, kHeads>,
                   dim3(static_cast<unsigned>(kShortCluster * p.num_tokens)), kShortThreads, kBytes,
                   stream, kShortCluster, p);
}

template <class Keys>
void LaunchShort(const IndexerParams& p, CudaStream stream) {
  switch (p.padded_heads) {
    case 8: return LaunchShortHeads<Keys, 8>(p, stream);
    case 16: return LaunchShortHeads<Keys, 16>(p, stream);
    case 32: return LaunchShortHeads<Keys, 32>(p, stream);
    case 64: return LaunchShortHeads<Keys, 64>(p, stream);
    default: return LaunchShortHeads<Keys, 128>(p, stream);
  }
}

void LaunchSelect(const IndexerParams& p, CudaStream stream) {
  const int64_t bytes = SelectSharedBytes(p.top_k);
  AllowShared(SelectRows, bytes);
  LaunchOverlapped(SelectRows, dim3(p.num_tokens), kSelectThreads, bytes, stream, 1, p);
}

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fathom: indexer on CUDA: %s\n", what);
  std::abort();
}

}  // namespace
}  // namespace cuda

void IndexerCuda(const IndexerArgs& args, void* scratch, CudaStream stream, bool one_launch) {
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
  const auto page_rows = static_cast<uint32_t>(args.keys.rows_per_page);
  p.page_shift = std::has_single_bit(page_rows) ? std::countr_zero(page_rows) : -1;
  p.selected = args.selected;
  p.counts = args.counts;
  p.wanted_scores = args.scores;
  p.wanted_stride = args.scores_stride;
  p.product = product;
  p.weight_scale = static_cast<float>(1.0 / std::sqrt(double{kIndexDim} * args.heads));
  if (product) p.weight_scale = RoundBf16(p.weight_scale);

  const bool fp4 = args.keys.format == RowFormat::kFp4Index;
  const bool packs = fp4 || (p.q_bf16 && args.keys.format != RowFormat::kF32);
  p.padded_heads = packs ? cuda::PaddedHeads(args.heads) : args.heads;
  cuda::Require(!packs || p.padded_heads <= 128, "more than 128 heads");
  p.packed_stride = cuda::PackedLayout{p.padded_heads, fp4}.Bytes();
  const int64_t rows = int64_t{args.step->max_blocks} * args.keys.rows_per_page;
  p.scores_stride = std::max<int64_t>(64, (rows + 63) / 64 * 64);
  cuda::Require(p.scores_stride * 4 <= kIndexerScoreBytes,
                "a context of more than 16M compressed rows");
  const int64_t pass =
      std::min({tokens, kIndexerScoreBytes / (4 * p.scores_stride),
                std::min(kIndexerPackedBytes, tokens * kIndexerPackedQuery) / p.packed_stride,
                packs && cuda::IsDecode(p) ? int64_t{cuda::kRingTokens} : tokens});
  auto* const groups = static_cast<char*>(scratch) + kIndexerScoreBytes;
  char* const packed = groups + kIndexerGroupBytes;

  if (one_launch && product && packs && p.q_bf16 && p.w_bf16 && args.scores == nullptr &&
      p.top_k > 0 && tokens <= cuda::kShortTokens && rows <= cuda::kShortRows &&
      cuda::HasPagesOfTiles(p)) {
    p.first_token = 0;
    p.num_tokens = static_cast<int>(tokens);
    p.packed = nullptr;
    p.scores = nullptr;
    p.groups = nullptr;
    switch (args.keys.format) {
      case RowFormat::kFp4Index: return cuda::LaunchShort<cuda::Fp4Keys>(p, stream);
      case RowFormat::kFp8Index: return cuda::LaunchShort<cuda::Fp8Keys>(p, stream);
      default: return cuda::LaunchShort<cuda::Bf16Keys>(p, stream);
    }
  }
  for (int64_t first = 0; first < tokens; first += pass) {
    p.first_token = static_cast<int>(first);
    p.num_tokens = static_cast<int>(std::min(pass, tokens - first));
    p.packed = packs ? packed : nullptr;
    p.scores = static_cast<float*>(scratch);
    p.groups = reinterpret_cast<uint32_t*>(groups);
    cuda::WithActivationType(args.q.dtype, [&](auto type) {
      cuda::LaunchOverlapped(cuda::PrepareQuery<decltype(type)>,
                             cuda::Blocks(int64_t{p.num_tokens} * p.padded_heads, 8), 256, 0,
                             stream, 1, p);
    });
    if (fp4) {
      cuda::LaunchScan<cuda::Fp4Keys>(p, rows, stream);
    } else if (packs && args.keys.format == RowFormat::kFp8Index) {
      cuda::LaunchScan<cuda::Fp8Keys>(p, rows, stream);
    } else if (packs) {
      cuda::LaunchScan<cuda::Bf16Keys>(p, rows, stream);
    } else {
      const int64_t bytes = cuda::ScanFloatSharedBytes(args.heads);
      cuda::AllowShared(cuda::ScanFloat, bytes);
      cuda::LaunchOverlapped(cuda::ScanFloat,
                             dim3(cuda::RangesOf(p.num_tokens, rows), p.num_tokens),
                             cuda::kScanThreads, bytes, stream, 1, p);
    }
    if (args.scores != nullptr) {
      cuda::LaunchOverlapped(cuda::CopyScores, dim3(cuda::Blocks(rows, 4096), p.num_tokens), 256, 0,
                             stream, 1, p);
    }
    cuda::LaunchSelect(p, stream);
  }
}

}  // namespace fathom::ops
