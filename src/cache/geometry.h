// Geometry: the one table every part of Fathom computes cache layouts from (design: kv-cache.md).
//
// A *block* covers block_tokens native tokens (256) and is one contiguous slab: a page of every
// block kind of every layer that has it, layer after layer. A *slot* is the fixed-size state of one
// running sequence: window rings and compressor states of all layers. No constant of these layouts
// is written anywhere else.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/status.h"
#include "model/config.h"
#include "model/kv_view.h"
#include "ops/paged_rows.h"

namespace fathom {

enum class CacheKind : uint8_t {
  kCsaKv,       // c4a rows (block kind)
  kHcaKv,       // c128a rows (block kind)
  kIndexK,      // c4a indexer rows (block kind)
  kWindowKv,    // sliding window, every layer (window kind)
  kCsaState,    // unfinished and previous c4 group (window kind)
  kIndexState,  // the same of the indexer (window kind)
  kHcaState,    // unfinished c128 group, online record (window kind)
};
inline constexpr int kCacheKinds = 7;
std::string_view CacheKindName(CacheKind kind);  // "csa_kv", ...

enum class KvDType : uint8_t { kF32, kBf16, kFp8 };             // main rows and windows
enum class IndexDType : uint8_t { kF32, kBf16, kFp8, kMxfp4 };  // indexer rows

struct CacheOptions {
  KvDType kv = KvDType::kFp8;
  IndexDType index = IndexDType::kMxfp4;
  int block_tokens = 256;  // any multiple of 128
  int draft_depth = 0;     // extra ring rows for speculation
};

// One cache kind over the whole model.
struct KindGeometry {
  CacheKind kind{};
  bool block_kind = false;
  ops::RowFormat format{};  // of states: kF32
  int channels = 0;
  std::vector<int> layers;  // model layers that have it, ascending
  int tokens_per_row = 0;   // 4, 128 or 1; 0 for states
  int64_t row_bytes = 0;    // data + scales
  int rows_per_page = 0;    // block kinds: rows per block; window_kv: ring rows; states: rows
  int64_t page_bytes = 0;  // padded to 576 for block kinds; window kinds: bytes per layer in a slot
  int64_t offset = 0;      // of the first layer's page in the slab (or slot)
  int64_t padding_bytes = 0;  // per page
};

struct Geometry {
  CacheOptions options;
  std::array<KindGeometry, kCacheKinds> kinds;
  int64_t block_bytes = 0;  // slab
  int64_t slot_bytes = 0;

  int64_t max_positions = 0;  // the model's max_position_embeddings

  const KindGeometry& of(CacheKind kind) const { return kinds[static_cast<int>(kind)]; }
  int64_t blocks_for(int64_t tokens) const {
    return (tokens + options.block_tokens - 1) / options.block_tokens;
  }
  // Bytes of the complete compressed rows of one sequence of `tokens` tokens, without page padding
  // (the published "KV size of a context", kv-cache.md 4).
  int64_t row_bytes(int64_t tokens) const;
  // Bytes of one sequence's windows of 128 rows, without the ring's draft rows.
  int64_t window_bytes() const;
};

// Refuses block sizes that are no positive multiple of 128 (the error lists legal ones) and draft
// depths outside [0, 128].
Expected<Geometry> MakeGeometry(const ModelConfig& config, const CacheOptions& options);

// Views of every layer into the two pools' memory: `blocks` is block 0 of BlockPool, `slots` slot 0
// of SlotPool. Both must be 64-byte aligned. State strides count floats.
KvView MakeKvView(const Geometry& geometry, int num_layers, std::byte* blocks, std::byte* slots);

}  // namespace fathom
