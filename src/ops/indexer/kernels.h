// The inner loops of the indexer, one set per instruction set, all giving the same bits
// (indexer.h: "the exact expression").
//
// Rows are scored 16 at a time, one row per vector lane. A tile holds 16 rows transposed, so that
// one load brings the same channels of all of them; it is made once and used for every token of a
// group and every head. Heads come in groups of eight, the last one padded with zero weights.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fathom::ops {

inline constexpr int kTileRows = 16;
inline constexpr int kBatchTiles = 4;  // tiles expanded together
inline constexpr int kBatchRows = kTileRows * kBatchTiles;
inline constexpr int kHeadGroup = 8;

// kFp4Index. Twice an e2m1 value is an integer of magnitude at most 12, so products of a block are
// integers and their sum is exact. Where the four block scales of every row of the tile lie within
// a factor of 8, the integers are shifted to the row's smallest scale: then a whole dot product is
// one integer sum, still exact in f32 (below 2^24), hence equal to the sum of rounded block sums.
struct Fp4Tile {
  static constexpr int kOffset = 96;  // 12 << 3: makes the integers unsigned bytes
  // Quad 2i is bytes 8i, 8i+2, 8i+4, 8i+6 of each row (the low nibbles of four bytes), quad 2i+1
  // the odd channels; value << shift, + kOffset.
  alignas(64) uint8_t quad[32][4 * kTileRows];
  float block_scale[4][kTileRows];  // aligned: 1; else half the block's scale
  float row_scale[kTileRows];       // aligned: half the smallest scale; else 1
  int32_t aligned;
};

// Eight heads of one query, same idea: aligned when the scales of the non-zero blocks of every head
// lie within a factor of 2^shift limit; then the common scale is folded into w.
struct Fp4Heads {
  alignas(64) int8_t q[kHeadGroup][128];  // channels in the order of the tile's quads
  int32_t block_bias[kHeadGroup][4];      // -kOffset * sum of q over the block
  int32_t bias[kHeadGroup];               // their sum
  float block_scale[kHeadGroup][4];       // aligned: 1; else half the block's scale
  float w[kHeadGroup];
  int32_t aligned;
};

// The other formats: keys as f32, scale included.
struct FloatTile {
  alignas(64) float key[128][kTileRows];
};

struct FloatHeads {
  alignas(64) float q[kHeadGroup][128];
  float w[kHeadGroup];
};

// Which of the query's roundings apply; the sizes of a head are fixed (128 channels, 64 rotate).
enum class QueryRounding : int32_t { kNone, kFp4, kFp8 };

struct IndexerKernels {
  // q [heads, 128] in place: RoPE, Hadamard, rounding. bf16: round where the contract says so.
  void (*prepare)(float* q, int heads, const float* rope, QueryRounding rounding, bool bf16);
  // Prepared q and w of one token to ceil(heads / 8) groups.
  void (*pack_fp4)(const float* q, const float* w, int heads, Fp4Heads* out);
  // 16 rows of 64 data bytes and of 4 scale bytes.
  void (*expand_fp4)(const uint8_t* data, const uint8_t* scale, Fp4Tile* out);
  // 16 rows: 128 e4m3 bytes with one f32 scale; 128 bf16; 128 f32.
  void (*expand_fp8)(const uint8_t* data, const uint8_t* scale, FloatTile* out);
  void (*expand_bf16)(const uint8_t* data, const uint8_t* scale, FloatTile* out);
  void (*expand_f32)(const uint8_t* data, const uint8_t* scale, FloatTile* out);
  // scores [tiles * 16] of one token.
  void (*score_fp4)(const Fp4Tile* tiles, int count, const Fp4Heads* heads, int groups,
                    float* scores);
  void (*score_float)(const FloatTile* tiles, int count, const FloatHeads* heads, int groups,
                      float* scores);
  // Appends (sort key, first_row + i) of the n <= 64 scores whose key is >= floor, in order, and
  // returns the new count. Writes up to 15 elements beyond it.
  int32_t (*append)(const float* scores, int32_t n, int32_t first_row, int32_t floor, int32_t* keys,
                    int32_t* rows, int32_t count);
  // The k-th largest of n keys (1 <= k <= n).
  int32_t (*kth_largest)(const int32_t* keys, int32_t n, int32_t k);
  // Keeps, in order and in place, the keys above `bar` and the first `equal` ones at it; returns
  // how many.
  int32_t (*keep)(int32_t* keys, int32_t* rows, int32_t n, int32_t bar, int32_t equal);
};

extern const IndexerKernels kIndexerScalar;
extern const IndexerKernels kIndexerAvx2;
extern const IndexerKernels kIndexerAvx512;

// IndexerKernels::keep in plain form.
static inline int32_t KeepPlain(int32_t* keys, int32_t* rows, int32_t n, int32_t bar,
                                int32_t equal) {
  int32_t kept = 0;
  for (int32_t i = 0; i < n; ++i) {
    const int32_t key = keys[i];
    const int32_t row = rows[i];
    const bool keep = key > bar || (key == bar && equal > 0);
    equal -= key == bar;
    keys[kept] = key;
    rows[kept] = row;
    kept += keep;
  }
  return kept;
}

// Sorts like the score, -0 as +0; NaN is INT32_MIN, below -inf.
static inline int32_t ScoreKey(float score) {
  const int32_t bits = __builtin_bit_cast(int32_t, score);
  const int32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return INT32_MIN;
  return bits < 0 ? -magnitude : magnitude;
}

}  // namespace fathom::ops
