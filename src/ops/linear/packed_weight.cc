#include "ops/linear/packed_weight.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/cpu_features.h"
#include "core/status.h"

namespace fathom::ops {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

std::unique_ptr<uint8_t[], CpuPackedWeight::Free> Allocate(int64_t bytes) {
  const size_t align = static_cast<size_t>(bytes) >= 2 * kHugePage ? kHugePage : 64;
  const size_t size = (std::max<size_t>(bytes, 1) + align - 1) / align * align;
  void* data = std::aligned_alloc(align, size);
  FATHOM_CHECK(data != nullptr);
  // Decode streams whole weights: 4 KiB pages would miss the TLB every 64 cache lines.
  if (align == kHugePage) madvise(data, size, MADV_HUGEPAGE);
  return std::unique_ptr<uint8_t[], CpuPackedWeight::Free>(static_cast<uint8_t*>(data));
}

// Byte of (output o, input k & 1) within the 64 bytes of an FP8 pair.
constexpr int Fp8Slot(int o, int odd) {
  const int lane = (o & 15) / 4;
  return lane * 16 + (o >> 4) * 8 + (o & 3) * 2 + odd;
}

void PackF32(const LinearWeight& w, int64_t o0, int rows, uint8_t* panel) {
  float* out = reinterpret_cast<float*>(panel);
  for (int o = 0; o < rows; ++o) {
    const float* row = static_cast<const float*>(w.data) + (o0 + o) * w.in;
    for (int64_t k = 0; k < w.in; ++k) out[k * kPanelOutputs + o] = row[k];
  }
}

void PackBf16(const LinearWeight& w, int64_t o0, int rows, uint8_t* panel) {
  uint16_t* out = reinterpret_cast<uint16_t*>(panel);
  for (int o = 0; o < rows; ++o) {
    const uint16_t* row = static_cast<const uint16_t*>(w.data) + (o0 + o) * w.in;
    for (int64_t k = 0; k < w.in; ++k) out[(k / 2) * 64 + 2 * o + (k & 1)] = row[k];
  }
}

void PackFp8(const LinearWeight& w, int64_t o0, int rows, uint8_t* panel) {
  for (int o = 0; o < rows; ++o) {
    const uint8_t* row = static_cast<const uint8_t*>(w.data) + (o0 + o) * w.in;
    for (int64_t k = 0; k < w.in; ++k) panel[(k / 2) * 64 + Fp8Slot(o, k & 1)] = row[k];
  }
}

void PackFp4(const LinearWeight& w, int64_t o0, int rows, uint8_t* panel) {
  for (int o = 0; o < rows; ++o) {
    const uint8_t* row = static_cast<const uint8_t*>(w.data) + (o0 + o) * (w.in / 2);
    for (int64_t k = 0; k < w.in; ++k) {
      const uint8_t code = (row[k / 2] >> (4 * (k & 1))) & 15;
      const int nibble = static_cast<int>((k / 2) & 1) * 2 + o / 16;
      const int word = 2 * (o & 15) + static_cast<int>(k & 1);
      panel[(k / 4) * 64 + word * 2 + nibble / 2] |= code << (4 * (nibble & 1));
    }
  }
}

}  // namespace

void CpuPackedWeight::Free::operator()(uint8_t* p) const {
  std::free(p);
}

PanelJob CpuPackedWeight::Job(int64_t p, int64_t count) const {
  PanelJob job;
  job.format = format;
  job.weights = data.get() + p * panel_bytes;
  job.scales = scale.get() + p * panel_scales;
  job.panels = count;
  job.panel_bytes = panel_bytes;
  job.panel_scales = panel_scales;
  job.depth = depth;
  job.cols = std::min<int64_t>(count * kPanelOutputs, out - p * kPanelOutputs);
  return job;
}

int64_t PanelBytes(WeightFormat format, int64_t depth) {
  switch (format) {
    case WeightFormat::kF32: return depth * kPanelOutputs * 4;
    case WeightFormat::kBF16: return depth * kPanelOutputs * 2;
    case WeightFormat::kFp8Block128: return depth * kPanelOutputs;
    case WeightFormat::kFp4Block32: return depth * kPanelOutputs / 2;
  }
  return 0;
}

void PackLinearCpu(LinearWeight& weight) {
  FATHOM_CHECK(weight.data != nullptr && weight.out >= 1 && weight.in >= 1);
  const bool fp8 = weight.format == WeightFormat::kFp8Block128;
  const bool fp4 = weight.format == WeightFormat::kFp4Block32;
  FATHOM_CHECK(!fp4 || weight.in % 32 == 0);
  FATHOM_CHECK(!(fp8 || fp4) || weight.scale != nullptr);
  auto packed = std::make_shared<CpuPackedWeight>();
  packed->format = weight.format;
  packed->out = weight.out;
  packed->in = weight.in;
  packed->depth = (weight.in + 3) / 4 * 4;
  packed->panels = (weight.out + kPanelOutputs - 1) / kPanelOutputs;
  packed->panel_bytes = PanelBytes(weight.format, packed->depth);
  const int64_t tiles = (weight.in + 127) / 128;
  packed->panel_scales = fp8 ? tiles : fp4 ? packed->depth : 0;
  packed->data = Allocate(packed->panels * packed->panel_bytes);
  packed->scale = Allocate(packed->panels * packed->panel_scales);
  for (int64_t p = 0; p < packed->panels; ++p) {
    const int64_t o0 = p * kPanelOutputs;
    const int rows = static_cast<int>(std::min<int64_t>(kPanelOutputs, weight.out - o0));
    uint8_t* panel = packed->data.get() + p * packed->panel_bytes;
    uint8_t* scale = packed->scale.get() + p * packed->panel_scales;
    if (rows < kPanelOutputs || packed->depth != weight.in || fp4) {
      std::memset(panel, 0, packed->panel_bytes);
    }
    switch (weight.format) {
      case WeightFormat::kF32: PackF32(weight, o0, rows, panel); break;
      case WeightFormat::kBF16: PackBf16(weight, o0, rows, panel); break;
      case WeightFormat::kFp8Block128:
        PackFp8(weight, o0, rows, panel);
        std::memcpy(scale, weight.scale + o0 / 128 * tiles, tiles);
        break;
      case WeightFormat::kFp4Block32:
        PackFp4(weight, o0, rows, panel);
        for (int64_t block = 0; block < weight.in / 32; ++block) {
          for (int o = 0; o < kPanelOutputs; ++o) {
            scale[block * kPanelOutputs + o] =
                o < rows ? weight.scale[(o0 + o) * (weight.in / 32) + block] : 127;
          }
        }
        break;
    }
  }
  weight.packed = std::move(packed);
}

const CpuPackedWeight& Packed(const LinearWeight& weight) {
  FATHOM_CHECK(weight.packed != nullptr);
  return static_cast<const CpuPackedWeight&>(*weight.packed);
}

const LinearKernels& CurrentLinearKernels() {
  switch (CpuIsa()) {
    case Isa::kAvx512: return kLinearAvx512;
    case Isa::kAvx2: return kLinearAvx2;
    case Isa::kScalar: break;
  }
  return kLinearScalar;
}

void PrepareRow(const LinearKernels& kernels, WeightFormat format, Numerics numerics,
                const float* x, int64_t channels, int64_t padded, float* out) {
  if (numerics == Numerics::kReference || format == WeightFormat::kF32) {
    if (out != x) std::memcpy(out, x, channels * sizeof(float));
    std::fill(out + channels, out + padded, 0.0f);
  } else if (format == WeightFormat::kBF16) {
    kernels.round(x, channels, padded, out);
  } else {
    kernels.quantise(x, channels, padded, out);
  }
}

}  // namespace fathom::ops
