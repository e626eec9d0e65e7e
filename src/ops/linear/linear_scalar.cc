// The panel kernels in portable C++: what a CPU without AVX2 runs, and the readable form of the
// two vector sets.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/dtype.h"
#include "ops/linear/linear_kernels.h"
#include "ops/quantise/quantise.h"

namespace fathom::ops {
namespace {

constexpr int kN = kPanelOutputs;
constexpr int64_t kRowBlock = 64;  // rows that share one expansion of a chunk

// Inputs k0..k1-1 of the panel as f32 [k][32], without scales.
void Expand(const PanelJob& job, int64_t k0, int64_t k1, float* tile) {
  for (int64_t k = k0; k < k1; ++k, tile += kN) {
    const int odd = static_cast<int>(k & 1);
    for (int o = 0; o < kN; ++o) {
      switch (job.format) {
        case WeightFormat::kF32:
          std::memcpy(tile + o, job.weights + (k * kN + o) * 4, sizeof(float));
          break;
        case WeightFormat::kBF16: {
          uint16_t bits;
          std::memcpy(&bits, job.weights + ((k / 2) * 64 + 2 * o + odd) * 2, sizeof(bits));
          tile[o] = Bf16ToF32(bits);
          break;
        }
        case WeightFormat::kFp8Block128:
          tile[o] = E4m3ToF32(
              job.weights[(k / 2) * 64 + (o & 15) / 4 * 16 + (o >> 4) * 8 + (o & 3) * 2 + odd]);
          break;
        case WeightFormat::kFp4Block32: {
          const int nibble = static_cast<int>((k / 2) & 1) * 2 + o / 16;
          const uint8_t byte = job.weights[(k / 4) * 64 + (2 * (o & 15) + odd) * 2 + nibble / 2];
          tile[o] = E2m1ToF32((byte >> (4 * (nibble & 1))) & 15);
          break;
        }
      }
    }
  }
}

void ChunkScales(const PanelJob& job, int64_t k, float* scale) {
  for (int o = 0; o < kN; ++o) {
    switch (job.format) {
      case WeightFormat::kFp8Block128: scale[o] = E8m0ToF32(job.scales[k / 128]); break;
      case WeightFormat::kFp4Block32: scale[o] = E8m0ToF32(job.scales[k / 32 * kN + o]); break;
      default: scale[o] = 1.0f;
    }
  }
}

void OnePanel(const PanelJob& job) {
  const int64_t chunk = job.format == WeightFormat::kFp4Block32 ? 32 : 64;
  float total[kRowBlock][kN];
  float scale[kN];
  for (int64_t r0 = 0; r0 < job.rows; r0 += kRowBlock) {
    const int64_t rows = std::min(kRowBlock, job.rows - r0);
    std::memset(total, 0, sizeof(total));
    for (int64_t k0 = 0; k0 < job.depth; k0 += chunk) {
      const int64_t k1 = std::min(job.depth, k0 + chunk);
      Expand(job, k0, k1, job.tile);
      ChunkScales(job, k0, scale);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = job.row_index ? job.row_index[r0 + r] : r0 + r;
        const float* x = job.x + row * job.x_stride;
        float partial[kN] = {};
        for (int64_t k = k0; k < k1; ++k) {
          const float* w = job.tile + (k - k0) * kN;
          for (int o = 0; o < kN; ++o) partial[o] += x[k] * w[o];
        }
        for (int o = 0; o < kN; ++o) total[r][o] += partial[o] * scale[o];
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* y = job.y + (r0 + r) * job.y_stride;
      for (int o = 0; o < job.cols; ++o) y[o] = job.round ? RoundBf16(total[r][o]) : total[r][o];
    }
  }
}

void Panel(const PanelJob& job) {
  for (int64_t p = 0; p < job.panels; ++p) {
    PanelJob one = job;
    one.weights += p * job.panel_bytes;
    one.scales += p * job.panel_scales;
    one.y += p * kN;
    one.cols = std::min<int64_t>(kN, job.cols - p * kN);
    OnePanel(one);
  }
}

void Quantise(const float* x, int64_t channels, int64_t padded, float* out) {
  if (out != x) std::memcpy(out, x, channels * sizeof(float));
  QuantiseActivationRow(out, channels);
  std::fill(out + channels, out + padded, 0.0f);
}

void Round(const float* x, int64_t channels, int64_t padded, float* out) {
  for (int64_t i = 0; i < channels; ++i) out[i] = RoundBf16(x[i]);
  std::fill(out + channels, out + padded, 0.0f);
}

}  // namespace

const LinearKernels kLinearScalar = {Panel, Quantise, Round};

}  // namespace fathom::ops
