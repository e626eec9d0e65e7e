#include "ops/indexer/scan.h"

#include <algorithm>
#include <cstring>

#include "core/status.h"

namespace fathom::ops {
namespace {

constexpr int64_t Align(int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

constexpr int TilesOf(int32_t rows) {
  return (rows + kTileRows - 1) / kTileRows;
}

}  // namespace

IndexerScan::IndexerScan(const IndexerArgs& args, const IndexerKernels& kernels, int max_tokens)
    : args_(args),
      kernels_(kernels),
      fp4_(args.keys.format == RowFormat::kFp4Index),
      head_groups_((args.heads + kHeadGroup - 1) / kHeadGroup),
      capacity_(TopRows::Capacity(args.top_k)),
      data_bytes_(RowDataBytes(args.keys.format, kIndexDim)),
      scale_bytes_(RowScaleBytes(args.keys.format)) {
  query_bytes_ = head_groups_ * static_cast<int64_t>(fp4_ ? sizeof(Fp4Heads) : sizeof(FloatHeads));
  tile_bytes_ = fp4_ ? sizeof(Fp4Tile) : sizeof(FloatTile);
  queries_at_ = Align(kBatchTiles * tile_bytes_);
  stage_at_ = queries_at_ + Align(max_tokens * query_bytes_);
  buffers_at_ = stage_at_ + Align(kTileRows * (data_bytes_ + scale_bytes_));
  total_bytes_ = buffers_at_ + Align(max_tokens * 2 * capacity_ * 4);
}

void IndexerScan::Run(int64_t begin, int64_t end, int32_t first, int32_t last, std::byte* scratch,
                      TopRows* tops) const {
  const int tokens = static_cast<int>(end - begin);
  auto* buffers = reinterpret_cast<int32_t*>(scratch + buffers_at_);
  for (int i = 0; i < tokens; ++i) {
    int32_t* keys = buffers + 2 * i * capacity_;
    tops[i].Start(args_.top_k, keys, keys + capacity_);
    PackQuery(begin + i, scratch + queries_at_ + i * query_bytes_);
  }
  const StepView& step = *args_.step;
  const int32_t* blocks = step.blocks_of(step.sequence[begin]);
  alignas(64) float scores[kBatchRows];
  for (int32_t row = first; row < last; row += kBatchRows) {
    if (row + kBatchRows < last) Prefetch(blocks, row + kBatchRows, last);
    const int count = TilesOf(std::min(kBatchRows, last - row));
    for (int i = 0; i < count; ++i) {
      Expand(blocks, row + i * kTileRows, last, scratch + stage_at_, scratch + i * tile_bytes_);
    }
    for (int i = 0; i < tokens; ++i) {
      const int64_t token = begin + i;
      const int32_t n =
          std::min(std::min(kBatchRows, last - row), (step.position[token] + 1) / 4 - row);
      if (n <= 0) continue;
      Score(scratch, TilesOf(n), scratch + queries_at_ + i * query_bytes_, scores);
      if (args_.scores != nullptr) {
        std::copy(scores, scores + n, args_.scores + token * args_.scores_stride + row);
      }
      tops[i].Offer(kernels_, scores, n, row);
    }
  }
  for (int i = 0; i < tokens; ++i) tops[i].Keep(kernels_);
}

void IndexerScan::PackQuery(int64_t token, std::byte* out) const {
  const float* q = args_.q.f32_row(token);
  const float* w = args_.w.f32_row(token);
  if (fp4_) {
    kernels_.pack_fp4(q, w, args_.heads, reinterpret_cast<Fp4Heads*>(out));
    return;
  }
  auto* heads = reinterpret_cast<FloatHeads*>(out);
  for (int first = 0; first < args_.heads; first += kHeadGroup, ++heads) {
    const int count = std::min(kHeadGroup, args_.heads - first);
    if (count < kHeadGroup) std::memset(heads, 0, sizeof(*heads));
    std::memcpy(heads->q, q + first * kIndexDim, sizeof(float) * kIndexDim * count);
    std::memcpy(heads->w, w + first, sizeof(float) * count);
  }
}

void IndexerScan::Expand(const int32_t* blocks, int32_t row, int32_t last, std::byte* stage_bytes,
                         std::byte* tile) const {
  const PagedRows& keys = args_.keys;
  const int32_t in_page = row % keys.rows_per_page;
  const int32_t block = blocks[row / keys.rows_per_page];
  const auto* data = reinterpret_cast<const uint8_t*>(keys.data(block, in_page));
  const auto* scale = reinterpret_cast<const uint8_t*>(keys.scale(block, in_page));
  if (in_page + kTileRows > keys.rows_per_page) {
    auto* stage = reinterpret_cast<uint8_t*>(stage_bytes);
    for (int i = 0; i < kTileRows; ++i) {
      const int32_t r = std::min(row + i, last - 1);
      const int32_t b = blocks[r / keys.rows_per_page];
      std::memcpy(stage + i * data_bytes_, keys.data(b, r % keys.rows_per_page), data_bytes_);
      std::memcpy(stage + kTileRows * data_bytes_ + i * scale_bytes_,
                  keys.scale(b, r % keys.rows_per_page), scale_bytes_);
    }
    data = stage;
    scale = stage + kTileRows * data_bytes_;
  }
  switch (keys.format) {
    case RowFormat::kFp4Index:
      return kernels_.expand_fp4(data, scale, reinterpret_cast<Fp4Tile*>(tile));
    case RowFormat::kFp8Index:
      return kernels_.expand_fp8(data, scale, reinterpret_cast<FloatTile*>(tile));
    case RowFormat::kBf16:
      return kernels_.expand_bf16(data, scale, reinterpret_cast<FloatTile*>(tile));
    case RowFormat::kF32:
      return kernels_.expand_f32(data, scale, reinterpret_cast<FloatTile*>(tile));
    case RowFormat::kFp8Main: break;
  }
  FATHOM_CHECK(false);
}

void IndexerScan::Score(const std::byte* tiles, int count, const std::byte* query,
                        float* scores) const {
  if (fp4_) {
    kernels_.score_fp4(reinterpret_cast<const Fp4Tile*>(tiles), count,
                       reinterpret_cast<const Fp4Heads*>(query), head_groups_, scores);
  } else {
    kernels_.score_float(reinterpret_cast<const FloatTile*>(tiles), count,
                         reinterpret_cast<const FloatHeads*>(query), head_groups_, scores);
  }
}

// Pages lie a block apart, so the hardware's prefetcher starts anew on each.
void IndexerScan::Prefetch(const int32_t* blocks, int32_t row, int32_t last) const {
  const PagedRows& keys = args_.keys;
  const int32_t end = std::min(row + kBatchRows, last);
  for (; row < end; row += kTileRows) {
    const int32_t block = blocks[row / keys.rows_per_page];
    const int32_t in_page = row % keys.rows_per_page;
    const std::byte* data = keys.data(block, in_page);
    for (int64_t i = 0; i < kTileRows * data_bytes_; i += 64) __builtin_prefetch(data + i, 0, 2);
    __builtin_prefetch(keys.scale(block, in_page), 0, 2);
  }
}

}  // namespace fathom::ops
