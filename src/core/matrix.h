// The one tensor view: a row-major matrix in memory owned by someone else (host or device).
// Tensors of higher rank are matrices whose rows are the flattened trailing dimensions; the op
// contract names them: q [T, H*512] is head-major within a row.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace fathom {

struct MatrixView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // elements from one row to the next, >= cols

  float* f32() const { return static_cast<float*>(data); }
  float* f32_row(int64_t row) const { return f32() + row * stride; }
  bool empty() const { return data == nullptr; }
};

inline MatrixView F32Matrix(float* data, int64_t rows, int64_t cols) {
  return {data, DType::kF32, rows, cols, cols};
}

// The first `rows` rows.
inline MatrixView TopRows(MatrixView m, int64_t rows) {
  m.rows = rows;
  return m;
}

}  // namespace fathom
