// Where cache rows lie: pages of N rows, planar (all data, then all scales), read and written in
// place by every op. One PagedRows describes one cache kind of one layer; the same struct describes
// a window ring (block = slot, one page of ring rows) and a step's own window rows (one page).
//
//   const std::byte* row = rows.data(block_table[r / rows.rows_per_page], r % rows.rows_per_page);
//
// Byte layouts: design model.md 11.3 and 11.4.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fathom::ops {

enum class RowFormat : uint8_t {
  kF32,       // channels x 4 bytes; --numerics reference
  kBf16,      // channels x 2 bytes
  kFp8Main,   // 512 channels: 448 e4m3 + 64 bf16 = 576 data bytes; 7 ue8m0 + 1 zero = 8 scale bytes
  kFp8Index,  // 128 channels: 128 e4m3 data bytes; one float32 scale
  kFp4Index,  // 128 channels: 64 data bytes (even channel in the low nibble); 4 ue8m0 scale bytes
};

constexpr int64_t RowDataBytes(RowFormat format, int channels) {
  switch (format) {
    case RowFormat::kF32: return int64_t{channels} * 4;
    case RowFormat::kBf16: return int64_t{channels} * 2;
    case RowFormat::kFp8Main: return 576;
    case RowFormat::kFp8Index: return 128;
    case RowFormat::kFp4Index: return 64;
  }
  return 0;
}

constexpr int64_t RowScaleBytes(RowFormat format) {
  switch (format) {
    case RowFormat::kFp8Main: return 8;
    case RowFormat::kFp8Index:
    case RowFormat::kFp4Index: return 4;
    default: return 0;
  }
}

struct PagedRows {
  std::byte* base = nullptr;  // this layer's page within block 0
  int64_t block_stride = 0;   // bytes from a block (slab, slot) to the next
  int32_t rows_per_page = 0;  // N
  int32_t channels = 0;       // 512 or 128
  RowFormat format = RowFormat::kBf16;

  std::byte* data(int32_t block, int32_t row) const {
    return base + block * block_stride + row * RowDataBytes(format, channels);
  }
  std::byte* scale(int32_t block, int32_t row) const {
    return base + block * block_stride + rows_per_page * RowDataBytes(format, channels) +
           row * RowScaleBytes(format);
  }
};

}  // namespace fathom::ops
