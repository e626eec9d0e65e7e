#include "cache/geometry.h"

#include "ops/compressor/compressor.h"
#include "ops/numerics.h"

namespace fathom {
namespace {

// FlashMLA's page alignment (model.md 11.3). 576 = 9 * 64, so pages are 64-byte aligned too.
constexpr int64_t kPageAlignment = 576;
// A cache line and an AVX-512 register.
constexpr int64_t kSlotAlignment = 64;

constexpr int kCsaRatio = 4;
constexpr int kHcaRatio = 128;

int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

ops::RowFormat MainFormat(KvDType type) {
  switch (type) {
    case KvDType::kF32: return ops::RowFormat::kF32;
    case KvDType::kBf16: return ops::RowFormat::kBf16;
    case KvDType::kFp8: return ops::RowFormat::kFp8Main;
  }
  return ops::RowFormat::kBf16;
}

ops::RowFormat IndexFormat(IndexDType type) {
  switch (type) {
    case IndexDType::kF32: return ops::RowFormat::kF32;
    case IndexDType::kBf16: return ops::RowFormat::kBf16;
    case IndexDType::kFp8: return ops::RowFormat::kFp8Index;
    case IndexDType::kMxfp4: return ops::RowFormat::kFp4Index;
  }
  return ops::RowFormat::kBf16;
}

void SetRows(KindGeometry& kind, ops::RowFormat format, int channels) {
  kind.format = format;
  kind.channels = channels;
  kind.row_bytes = ops::RowDataBytes(format, channels) + ops::RowScaleBytes(format);
}

// A page of every block: block_tokens / ratio rows.
KindGeometry BlockKind(CacheKind name, std::vector<int> layers, ops::RowFormat format, int channels,
                       int ratio, int block_tokens) {
  KindGeometry kind{.kind = name, .block_kind = true, .layers = std::move(layers)};
  SetRows(kind, format, channels);
  kind.tokens_per_row = ratio;
  kind.rows_per_page = block_tokens / ratio;
  const int64_t used = kind.rows_per_page * kind.row_bytes;
  kind.page_bytes = RoundUp(used, kPageAlignment);
  kind.padding_bytes = kind.page_bytes - used;
  return kind;
}

// The ring of one layer in a slot; a page like any other, of as many rows as the ring has.
KindGeometry WindowKind(std::vector<int> layers, ops::RowFormat format, int ring_rows) {
  KindGeometry kind{.kind = CacheKind::kWindowKv, .layers = std::move(layers)};
  SetRows(kind, format, ops::kHeadDim);
  kind.tokens_per_row = 1;
  kind.rows_per_page = ring_rows;
  const int64_t used = kind.rows_per_page * kind.row_bytes;
  kind.page_bytes = RoundUp(used, kSlotAlignment);
  kind.padding_bytes = kind.page_bytes - used;
  return kind;
}

// The float32 state of one compressor in a slot. Ratio 4: 8 rows of [c (2e) | g (2e)]; ratio 128:
// the online record, 3 rows of e (compressor.h).
KindGeometry StateKind(CacheKind name, std::vector<int> layers, int ratio, int channels) {
  KindGeometry kind{.kind = name, .layers = std::move(layers)};
  kind.rows_per_page = ratio == kCsaRatio ? 8 : 3;
  const int64_t floats = ops::CompressorStateFloats(ratio, channels);
  SetRows(kind, ops::RowFormat::kF32, static_cast<int>(floats / kind.rows_per_page));
  const int64_t used = floats * int64_t{sizeof(float)};
  kind.page_bytes = RoundUp(used, kSlotAlignment);
  kind.padding_bytes = kind.page_bytes - used;
  return kind;
}

// View of the layer that is `ordinal`-th among those that have the kind.
ops::PagedRows Rows(const KindGeometry& kind, int ordinal, std::byte* base, int64_t unit_bytes) {
  return {.base = base + kind.offset + ordinal * kind.page_bytes,
          .block_stride = unit_bytes,
          .rows_per_page = kind.rows_per_page,
          .channels = kind.channels,
          .format = kind.format};
}

}  // namespace

std::string_view CacheKindName(CacheKind kind) {
  switch (kind) {
    case CacheKind::kCsaKv: return "csa_kv";
    case CacheKind::kHcaKv: return "hca_kv";
    case CacheKind::kIndexK: return "index_k";
    case CacheKind::kWindowKv: return "window_kv";
    case CacheKind::kCsaState: return "csa_state";
    case CacheKind::kIndexState: return "index_state";
    case CacheKind::kHcaState: return "hca_state";
  }
  return "unknown";
}

int64_t Geometry::row_bytes(int64_t tokens) const {
  int64_t bytes = 0;
  for (const KindGeometry& kind : kinds) {
    if (!kind.block_kind) continue;
    bytes +=
        static_cast<int64_t>(kind.layers.size()) * (tokens / kind.tokens_per_row) * kind.row_bytes;
  }
  return bytes;
}

int64_t Geometry::window_bytes() const {
  const KindGeometry& window = of(CacheKind::kWindowKv);
  return static_cast<int64_t>(window.layers.size()) * ops::kWindow * window.row_bytes;
}

Expected<Geometry> MakeGeometry(const ModelConfig& config, const CacheOptions& options) {
  if (options.block_tokens <= 0 || options.block_tokens % kHcaRatio != 0) {
    return FailParam(Code::kInvalidArgument, "block-size",
                     "--block-size {} is not a positive multiple of 128; legal are 128, 256 "
                     "(default), 384, 512, 640, ...",
                     options.block_tokens);
  }
  if (options.draft_depth < 0 || options.draft_depth > ops::kWindow) {
    return FailParam(Code::kInvalidArgument, "speculative-config",
                     "draft depth {} is outside [0, {}]", options.draft_depth, ops::kWindow);
  }
  if (config.num_layers <= 0 ||
      config.compress_ratios.size() < static_cast<size_t>(config.num_layers)) {
    return FailParam(Code::kInvalidArgument, "compress_ratios",
                     "compress_ratios has {} entries for {} layers", config.compress_ratios.size(),
                     config.num_layers);
  }

  std::vector<int> all, csa, hca;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    all.push_back(layer);
    if (config.kind(layer) == LayerKind::kCsa) csa.push_back(layer);
    if (config.kind(layer) == LayerKind::kHca) hca.push_back(layer);
  }

  Geometry geometry;
  geometry.options = options;
  geometry.max_positions = config.max_position_embeddings;
  const ops::RowFormat main = MainFormat(options.kv);
  geometry.kinds = {
      BlockKind(CacheKind::kCsaKv, csa, main, ops::kHeadDim, kCsaRatio, options.block_tokens),
      BlockKind(CacheKind::kHcaKv, hca, main, ops::kHeadDim, kHcaRatio, options.block_tokens),
      BlockKind(CacheKind::kIndexK, csa, IndexFormat(options.index), ops::kIndexDim, kCsaRatio,
                options.block_tokens),
      WindowKind(all, main, ops::kWindow + options.draft_depth),
      StateKind(CacheKind::kCsaState, csa, kCsaRatio, ops::kHeadDim),
      StateKind(CacheKind::kIndexState, csa, kCsaRatio, ops::kIndexDim),
      StateKind(CacheKind::kHcaState, hca, kHcaRatio, ops::kHeadDim),
  };
  for (KindGeometry& kind : geometry.kinds) {
    int64_t& total = kind.block_kind ? geometry.block_bytes : geometry.slot_bytes;
    kind.offset = total;
    total += static_cast<int64_t>(kind.layers.size()) * kind.page_bytes;
  }
  return geometry;
}

KvView MakeKvView(const Geometry& geometry, int num_layers, std::byte* blocks, std::byte* slots) {
  KvView view;
  view.layers.resize(static_cast<size_t>(num_layers));
  for (const KindGeometry& kind : geometry.kinds) {
    for (size_t i = 0; i < kind.layers.size(); ++i) {
      FATHOM_CHECK(kind.layers[i] < num_layers);
      LayerKv& layer = view.layers[static_cast<size_t>(kind.layers[i])];
      const int ordinal = static_cast<int>(i);
      const ops::PagedRows rows = kind.block_kind
                                      ? Rows(kind, ordinal, blocks, geometry.block_bytes)
                                      : Rows(kind, ordinal, slots, geometry.slot_bytes);
      float* state = reinterpret_cast<float*>(rows.base);
      const int64_t stride = rows.block_stride / int64_t{sizeof(float)};
      switch (kind.kind) {
        case CacheKind::kCsaKv:
        case CacheKind::kHcaKv: layer.compressed = rows; break;
        case CacheKind::kIndexK: layer.index_keys = rows; break;
        case CacheKind::kWindowKv: layer.ring = rows; break;
        case CacheKind::kCsaState:
        case CacheKind::kHcaState:
          layer.state = state;
          layer.state_stride = stride;
          break;
        case CacheKind::kIndexState:
          layer.index_state = state;
          layer.index_state_stride = stride;
          break;
      }
    }
  }
  return view;
}

}  // namespace fathom
