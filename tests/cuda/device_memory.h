// Device memory for tests: arrays that upload and download, and a StepView whose arrays are on the
// device.
//
//   DeviceArray<float> x(host);                 // uploads a vector
//   DeviceArray<float> y(n);                    // n elements of 0xff bytes
//   XCuda({.x = F32Matrix(x.data(), rows, cols), .y = F32Matrix(y.data(), rows, cols)}, nullptr);
//   std::vector<float> got = y.Download();      // waits for the device
//
//   DeviceMatrix q(values, rows, cols, DType::kBF16);   // activations of either type
//   XCuda({.q = q.view()}, nullptr);
//   std::vector<float> got = q.Download();
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "core/matrix.h"
#include "ops/cuda/device.h"
#include "ops/numerics.h"
#include "ops/step_view.h"

namespace fathom::ops {

// True when a device can be used. Tests of a machine without one are skipped, never passed.
inline bool HaveDevice() {
  int count = 0;
  const bool have = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
  (void)cudaGetLastError();
  return have;
}

#define FATHOM_NEEDS_DEVICE() \
  if (!::fathom::ops::HaveDevice()) GTEST_SKIP() << "no CUDA device"

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t size) : size_(size) {
    const size_t bytes = static_cast<size_t>(size > 0 ? size : 1) * sizeof(T);
    FATHOM_CUDA_CHECK(cudaMalloc(&data_, bytes));
    FATHOM_CUDA_CHECK(cudaMemset(data_, 0xff, bytes));
  }
  explicit DeviceArray(const std::vector<T>& host)
      : DeviceArray(static_cast<int64_t>(host.size())) {
    Upload(host);
  }
  DeviceArray(DeviceArray&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = nullptr;
    other.size_ = 0;
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  DeviceArray& operator=(DeviceArray&&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return static_cast<T*>(data_); }
  int64_t size() const { return size_; }

  void Upload(const std::vector<T>& host) {
    ASSERT_EQ(static_cast<int64_t>(host.size()), size_);
    FATHOM_CUDA_CHECK(
        cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  // Everything launched before is finished afterwards; a failed kernel ends the test program here.
  std::vector<T> Download() const {
    FATHOM_CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<T> host(static_cast<size_t>(size_));
    FATHOM_CUDA_CHECK(
        cudaMemcpy(host.data(), data_, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

// The type activations have on the device (ops/cuda/device.h).
inline DType DeviceActivationType(Numerics numerics) {
  return numerics == Numerics::kProduct ? DType::kBF16 : DType::kF32;
}

// A float matrix stored as float32 or bfloat16; values are rounded at upload.
class DeviceMatrix {
 public:
  DeviceMatrix(int64_t rows, int64_t cols, DType type)
      : rows_(rows), cols_(cols), type_(type), bytes_(rows * cols * ElementBytes(type)) {}
  DeviceMatrix(const std::vector<float>& values, int64_t rows, int64_t cols, DType type)
      : DeviceMatrix(rows, cols, type) {
    Upload(values);
  }

  MatrixView view() const { return {bytes_.data(), type_, rows_, cols_, cols_}; }

  void Upload(const std::vector<float>& values) {
    ASSERT_EQ(static_cast<int64_t>(values.size()), rows_ * cols_);
    std::vector<uint8_t> host(static_cast<size_t>(bytes_.size()));
    if (type_ == DType::kF32) {
      std::copy_n(reinterpret_cast<const uint8_t*>(values.data()), host.size(), host.data());
    } else {
      auto* out = reinterpret_cast<bf16_t*>(host.data());
      for (size_t i = 0; i < values.size(); ++i) out[i] = F32ToBf16(values[i]);
    }
    bytes_.Upload(host);
  }
  std::vector<float> Download() const {
    const std::vector<uint8_t> host = bytes_.Download();
    std::vector<float> values(static_cast<size_t>(rows_ * cols_));
    if (type_ == DType::kF32) {
      std::copy_n(host.data(), host.size(), reinterpret_cast<uint8_t*>(values.data()));
    } else {
      const auto* in = reinterpret_cast<const bf16_t*>(host.data());
      for (size_t i = 0; i < values.size(); ++i) values[i] = Bf16ToF32(in[i]);
    }
    return values;
  }

 private:
  int64_t rows_, cols_;
  DType type_;
  DeviceArray<uint8_t> bytes_;
};

// A step's arrays on the device; null arrays stay null. view() lives as long as this object.
class DeviceStep {
 public:
  explicit DeviceStep(const StepView& host)
      : token_(Copy(host.token, host.num_tokens)),
        position_(Copy(host.position, host.num_tokens)),
        sequence_(Copy(host.sequence, host.num_tokens)),
        query_start_(Copy(host.query_start, host.num_sequences + 1)),
        slot_(Copy(host.slot, host.num_sequences)),
        block_table_(Copy(host.block_table, int64_t{host.num_sequences} * host.max_blocks)),
        emit_from_(Copy(host.emit_from, host.num_sequences)),
        view_(host) {
    if (host.token != nullptr) view_.token = token_.data();
    if (host.position != nullptr) view_.position = position_.data();
    if (host.sequence != nullptr) view_.sequence = sequence_.data();
    if (host.query_start != nullptr) view_.query_start = query_start_.data();
    if (host.slot != nullptr) view_.slot = slot_.data();
    if (host.block_table != nullptr) view_.block_table = block_table_.data();
    if (host.emit_from != nullptr) view_.emit_from = emit_from_.data();
  }

  const StepView& view() const { return view_; }

 private:
  static std::vector<int32_t> Copy(const int32_t* data, int64_t n) {
    return data == nullptr ? std::vector<int32_t>() : std::vector<int32_t>(data, data + n);
  }

  DeviceArray<int32_t> token_, position_, sequence_, query_start_, slot_, block_table_, emit_from_;
  StepView view_;
};

}  // namespace fathom::ops
