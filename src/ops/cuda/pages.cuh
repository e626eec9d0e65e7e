// PagedRows for kernels: the sizes that a format implies are worked out on the host once.
#pragma once

#include "ops/paged_rows.h"

namespace fathom::ops::cuda {

struct Pages {
  char* base = nullptr;
  int64_t block_stride = 0;
  int32_t rows_per_page = 1;
  int32_t data_bytes = 0;   // of a row
  int32_t scale_bytes = 0;  // of a row
  RowFormat format = RowFormat::kBf16;

  Pages() = default;
  explicit Pages(const PagedRows& rows)
      : base(reinterpret_cast<char*>(rows.base)),
        block_stride(rows.block_stride),
        rows_per_page(rows.rows_per_page > 0 ? rows.rows_per_page : 1),
        data_bytes(static_cast<int32_t>(RowDataBytes(rows.format, rows.channels))),
        scale_bytes(static_cast<int32_t>(RowScaleBytes(rows.format))),
        format(rows.format) {}

  __device__ char* Data(int32_t block, int32_t row) const {
    return base + block * block_stride + int64_t{row} * data_bytes;
  }
  __device__ char* Scale(int32_t block, int32_t row) const {
    return base + block * block_stride + int64_t{rows_per_page} * data_bytes +
           int64_t{row} * scale_bytes;
  }
};

}  // namespace fathom::ops::cuda
