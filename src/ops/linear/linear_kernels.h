// The panel kernels under LinearCpu, ExpertsCpu and OutputProjectionCpu, one set per ISA.
//
// Plain structs and declarations only: the per-ISA files include this header.
//
// A panel is 32 consecutive outputs of a weight over its whole padded depth (packed_weight.h).
// Every kernel computes, for each row and each output of the panel,
//
//   total = 0
//   for each chunk of `ChunkDepth(format)` inputs, ascending:
//     partial = 0; for k in chunk, ascending: partial = fma(x[k], w[k], partial)
//     total = fma(partial, scale(chunk), total)
//
// with w the stored value without its scale. The order is the same for one row and for many, so
// the result depends on neither T nor the row's place in the batch. The scalar set multiplies and
// adds without fusing; the two vector sets agree with each other to the bit.
#pragma once

#include <cstdint>

#include "ops/linear/weight_format.h"

namespace fathom::ops {

inline constexpr int kPanelOutputs = 32;
inline constexpr int kPanelTileDepth = 256;  // inputs expanded to f32 at a time: 32 KiB, in L1
inline constexpr int kPanelTileBytes = kPanelTileDepth * kPanelOutputs * 4;

struct PanelJob {
  WeightFormat format = WeightFormat::kBF16;
  const uint8_t* weights = nullptr;  // the first packed panel
  const uint8_t* scales = nullptr;   // its ue8m0: FP8 [ceil(depth/128)], FP4 [depth/32][32]
  int64_t panels = 1;                // consecutive panels; the next one's operands lie
  int64_t panel_bytes = 0;           //   panel_bytes and panel_scales further on
  int64_t panel_scales = 0;
  int64_t depth = 0;         // padded inputs; x is zero beyond the real ones
  const float* x = nullptr;  // row r at x + (row_index ? row_index[r] : r) * x_stride
  int64_t x_stride = 0;
  const int32_t* row_index = nullptr;
  int64_t rows = 0;
  float* y = nullptr;  // [rows, cols], also holds the running totals
  int64_t y_stride = 0;
  int cols = 0;           // outputs that exist, 1..32; no other column is written
  bool round = false;     // totals -> bf16 at the end
  float* tile = nullptr;  // kPanelTileBytes of scratch, 64-byte aligned
};

struct LinearKernels {
  void (*panel)(const PanelJob& job);
  // One row of `channels` f32 to `padded` f32, zero-filled: as it is, rounded to bf16, or quantised
  // as QuantiseActivationRow does (bit-equal). x and out may be the same.
  void (*quantise)(const float* x, int64_t channels, int64_t padded, float* out);
  void (*round)(const float* x, int64_t channels, int64_t padded, float* out);
};

extern const LinearKernels kLinearScalar;
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx512;

}  // namespace fathom::ops
