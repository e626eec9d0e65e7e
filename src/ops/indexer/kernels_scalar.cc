// Plain forms of the kernels: what runs without AVX2, and what the others are checked against.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "core/dtype.h"
#include "ops/indexer/kernels.h"
#include "ops/norm_rope_insert/rope.h"
#include "ops/numerics.h"
#include "ops/paged_rows.h"
#include "ops/quantise/quantise.h"

namespace fathom::ops {
namespace {

void Prepare(float* q, int heads, const float* rope, QueryRounding rounding, bool bf16) {
  for (int h = 0; h < heads; ++h, q += kIndexDim) {
    float* tail = q + kIndexDim - kRopeDim;
    RotateRow(tail, rope, /*inverse=*/false);
    if (bf16) {
      for (int i = 0; i < kRopeDim; ++i) tail[i] = RoundBf16(tail[i]);
    }
    if (rounding == QueryRounding::kFp4) {
      HadamardRow(q, bf16);
      RoundFp4Row(q);
    } else if (rounding == QueryRounding::kFp8) {
      RoundFp8IndexRow(q);
    }
  }
}

// Position of a channel in the tile's order: quads of four even, then four odd channels.
int Place(int channel) {
  return channel / 8 * 8 + (channel & 1) * 4 + channel % 8 / 2;
}

// Blocks keep their own scales here: every head counts as unaligned.
void PackFp4(const float* q, const float* w, int heads, Fp4Heads* out) {
  for (int first = 0; first < heads; first += kHeadGroup, ++out) {
    std::memset(out, 0, sizeof(*out));
    for (int h = 0; h < std::min(kHeadGroup, heads - first); ++h) {
      const float* x = q + (first + h) * kIndexDim;
      for (int b = 0; b < 4; ++b) {
        float amax = 0.0f;
        for (int c = 32 * b; c < 32 * b + 32; ++c) amax = std::max(amax, std::fabs(x[c]));
        const float half = PowerOfTwoUp(std::max(amax, 6 * 0x1p-126f) * (1.0f / 6.0f)) * 0.5f;
        int32_t sum = 0;
        for (int c = 32 * b; c < 32 * b + 32; ++c) {
          const auto value = static_cast<int8_t>(x[c] / half);
          out->q[h][Place(c)] = value;
          sum += value;
        }
        out->block_bias[h][b] = -Fp4Tile::kOffset * sum;
        out->block_scale[h][b] = half;
      }
      out->w[h] = w[first + h];
    }
  }
}

void ExpandFp4(const uint8_t* data, const uint8_t* scale, Fp4Tile* out) {
  for (int r = 0; r < kTileRows; ++r) {
    for (int c = 0; c < kIndexDim; ++c) {
      const uint8_t byte = data[r * 64 + c / 2];
      const float value = E2m1ToF32((c & 1) ? byte >> 4 : byte & 15);
      const int place = Place(c);
      out->quad[place / 4][4 * r + place % 4] =
          static_cast<uint8_t>(static_cast<int>(2 * value) + Fp4Tile::kOffset);
    }
    for (int b = 0; b < 4; ++b) out->block_scale[b][r] = E8m0ToF32(scale[4 * r + b]) * 0.5f;
    out->row_scale[r] = 1.0f;
  }
  out->aligned = 0;
}

template <RowFormat format>
void ExpandFloat(const uint8_t* data, const uint8_t* scale, FloatTile* out) {
  float row[kIndexDim];
  for (int r = 0; r < kTileRows; ++r) {
    DecodeRow(format, kIndexDim,
              reinterpret_cast<const std::byte*>(data + r * RowDataBytes(format, kIndexDim)),
              reinterpret_cast<const std::byte*>(scale + r * RowScaleBytes(format)), row);
    for (int c = 0; c < kIndexDim; ++c) out->key[c][r] = row[c];
  }
}

void ScoreFp4(const Fp4Tile* tiles, int count, const Fp4Heads* heads, int groups, float* scores) {
  for (const Fp4Tile* tile = tiles; tile < tiles + count; ++tile, scores += kTileRows) {
    std::fill(scores, scores + kTileRows, 0.0f);
    for (int h = 0; h < groups * kHeadGroup; ++h) {
      const Fp4Heads& group = heads[h / kHeadGroup];
      const int lane = h % kHeadGroup;
      float dot[kTileRows];
      for (int b = 0; b < 4; ++b) {
        int32_t sum[kTileRows];
        std::fill(sum, sum + kTileRows, group.block_bias[lane][b]);
        for (int quad = 8 * b; quad < 8 * b + 8; ++quad) {
          for (int i = 0; i < 4 * kTileRows; ++i) {
            sum[i / 4] += tile->quad[quad][i] * group.q[lane][4 * quad + i % 4];
          }
        }
        for (int r = 0; r < kTileRows; ++r) {
          const float block =
              static_cast<float>(sum[r]) * tile->block_scale[b][r] * group.block_scale[lane][b];
          dot[r] = b == 0 ? block : dot[r] + block;
        }
      }
      for (int r = 0; r < kTileRows; ++r) {
        scores[r] = std::fma(group.w[lane], dot[r] > 0.0f ? dot[r] : 0.0f, scores[r]);
      }
    }
    for (int r = 0; r < kTileRows; ++r) scores[r] *= tile->row_scale[r];
  }
}

void ScoreFloat(const FloatTile* tiles, int count, const FloatHeads* heads, int groups,
                float* scores) {
  for (const FloatTile* tile = tiles; tile < tiles + count; ++tile, scores += kTileRows) {
    std::fill(scores, scores + kTileRows, 0.0f);
    for (int h = 0; h < groups * kHeadGroup; ++h) {
      const FloatHeads& group = heads[h / kHeadGroup];
      const int lane = h % kHeadGroup;
      float dot[kTileRows] = {};
      for (int c = 0; c < kIndexDim; ++c) {
        for (int r = 0; r < kTileRows; ++r) {
          dot[r] = std::fma(group.q[lane][c], tile->key[c][r], dot[r]);
        }
      }
      for (int r = 0; r < kTileRows; ++r) {
        scores[r] = std::fma(group.w[lane], dot[r] > 0.0f ? dot[r] : 0.0f, scores[r]);
      }
    }
  }
}

int32_t Append(const float* scores, int32_t n, int32_t first_row, int32_t floor, int32_t* keys,
               int32_t* rows, int32_t count) {
  for (int32_t i = 0; i < n; ++i) {
    const int32_t key = ScoreKey(scores[i]);
    keys[count] = key;
    rows[count] = first_row + i;
    count += key >= floor;
  }
  return count;
}

int32_t KthLargest(const int32_t* keys, int32_t n, int32_t k) {
  std::vector<int32_t> copy(keys, keys + n);
  std::nth_element(copy.begin(), copy.begin() + (k - 1), copy.end(), std::greater<>());
  return copy[k - 1];
}

}  // namespace

constinit const IndexerKernels kIndexerScalar{Prepare,
                                              PackFp4,
                                              ExpandFp4,
                                              ExpandFloat<RowFormat::kFp8Index>,
                                              ExpandFloat<RowFormat::kBf16>,
                                              ExpandFloat<RowFormat::kF32>,
                                              ScoreFp4,
                                              ScoreFloat,
                                              Append,
                                              KthLargest,
                                              KeepPlain};

}  // namespace fathom::ops
