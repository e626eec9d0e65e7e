// Shared by the tests of linear, experts and output_projection on the device: weights packed for
// CUDA, and matrices of either type with guarded padding.
#pragma once

#include <algorithm>
#include <thread>
#include <vector>

#include "cuda/device_memory.h"
#include "ops/linear/cuda.h"
#include "ops/linear/linear_testing.h"

namespace fathom::ops {

// The device form of a host weight that OwnedWeight keeps alive.
inline LinearWeight OnDevice(const LinearWeight& host) {
  LinearWeight weight = host;
  PackLinearCuda(weight);
  return weight;
}

// Calls fn(first, count) for slices of `rows` rows, one on each core: references are slow, and a
// device waits for them.
template <class Fn>
void ForRowSlices(int64_t rows, const Fn& fn) {
  const auto slices =
      std::clamp<int64_t>(static_cast<int64_t>(std::thread::hardware_concurrency()), 1, rows);
  std::vector<std::jthread> threads;
  for (int64_t i = 0; i < slices; ++i) {
    const int64_t first = rows * i / slices, count = rows * (i + 1) / slices - first;
    threads.emplace_back([&fn, first, count] { fn(first, count); });
  }
}
inline MatrixView RowsOf(MatrixView m, int64_t first, int64_t count) {
  m.data = static_cast<char*>(m.data) + first * m.stride * ElementBytes(m.dtype);
  m.rows = count;
  return m;
}

// A strided matrix on the device; all bytes 0xff (NaN) until written.
class GuardedMatrix {
 public:
  GuardedMatrix(int64_t rows, int64_t cols, int64_t stride, DType type)
      : view_{nullptr, type, rows, cols, stride}, bytes_(rows * stride * ElementBytes(type)) {
    view_.data = bytes_.data();
  }
  // The values of `host`, in rows of `stride` elements.
  GuardedMatrix(const testing::PaddedMatrix& host, int64_t stride, DType type)
      : GuardedMatrix(host.rows, host.cols, stride, type) {
    std::vector<uint8_t> raw(static_cast<size_t>(bytes_.size()), 0xff);
    for (int64_t t = 0; t < host.rows; ++t) {
      for (int64_t i = 0; i < host.cols; ++i) {
        const float value = host.data[t * host.stride + i];
        const bf16_t half = F32ToBf16(value);
        uint8_t* at = raw.data() + (t * stride + i) * ElementBytes(type);
        if (type == DType::kBF16) std::memcpy(at, &half, sizeof(half));
        else std::memcpy(at, &value, sizeof(value));
      }
    }
    bytes_.Upload(raw);
  }

  MatrixView view() const { return view_; }

  // The values in dense rows; the padding must still be 0xff.
  testing::PaddedMatrix Download() const {
    const std::vector<uint8_t> raw = bytes_.Download();
    testing::PaddedMatrix host(view_.rows, view_.cols, 0);
    const int64_t size = ElementBytes(view_.dtype);
    bool untouched = true;
    for (int64_t t = 0; t < view_.rows; ++t) {
      const uint8_t* row = raw.data() + t * view_.stride * size;
      for (int64_t i = 0; i < view_.cols; ++i) {
        bf16_t half = 0;
        if (view_.dtype == DType::kBF16) {
          std::memcpy(&half, row + i * size, sizeof(half));
          host.data[t * view_.cols + i] = Bf16ToF32(half);
        } else {
          std::memcpy(&host.data[t * view_.cols + i], row + i * size, sizeof(float));
        }
      }
      for (int64_t b = view_.cols * size; b < view_.stride * size; ++b) untouched &= row[b] == 0xff;
    }
    EXPECT_TRUE(untouched) << "something was written between rows";
    return host;
  }

 private:
  MatrixView view_;
  DeviceArray<uint8_t> bytes_;
};

// Rows [first, first + rows) as a matrix of their own.
inline testing::PaddedMatrix Slice(const testing::PaddedMatrix& m, int64_t first, int64_t rows) {
  testing::PaddedMatrix out(rows, m.cols, m.stride - m.cols);
  std::copy_n(m.data.begin() + first * m.stride, rows * m.stride, out.data.begin());
  return out;
}

// True when the dense matrices hold the same bits.
inline bool SameBits(const testing::PaddedMatrix& a, const testing::PaddedMatrix& b) {
  return a.data.size() == b.data.size() &&
         std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(float)) == 0;
}

}  // namespace fathom::ops
