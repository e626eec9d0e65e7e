#include <cstdlib>
#include <cstring>
#include <new>

#include "core/status.h"
#include "ops/backend.h"

namespace fathom::ops {

void HostBackend::Free::operator()(std::byte* memory) const {
  std::free(memory);
}

std::byte* HostBackend::Allocate(int64_t bytes) {
  const size_t size = (static_cast<size_t>(bytes) + 63) / 64 * 64;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(64, size == 0 ? 64 : size));
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, size);
  memory_.emplace_back(memory);
  return memory;
}

void HostBackend::ToHost(void* host, const void* data, int64_t bytes) {
  std::memcpy(host, data, static_cast<size_t>(bytes));
}

void HostBackend::FromHost(void* data, const void* host, int64_t bytes) {
  std::memcpy(data, host, static_cast<size_t>(bytes));
}

void HostBackend::Copy(void* to, const void* from, int64_t bytes) {
  std::memmove(to, from, static_cast<size_t>(bytes));
}

void HostBackend::Fill(void* data, uint8_t value, int64_t bytes) {
  std::memset(data, value, static_cast<size_t>(bytes));
}

std::vector<float> ToHostFloats(Backend& backend, const MatrixView& matrix) {
  FATHOM_CHECK(matrix.dtype == DType::kF32 || matrix.dtype == DType::kBF16);
  const int64_t element = ElementBytes(matrix.dtype);
  const int64_t spanned = matrix.rows > 0 ? (matrix.rows - 1) * matrix.stride + matrix.cols : 0;
  std::vector<std::byte> raw(static_cast<size_t>(spanned * element));
  backend.ToHost(raw.data(), matrix.data, spanned * element);
  std::vector<float> values;
  values.reserve(static_cast<size_t>(matrix.rows * matrix.cols));
  for (int64_t r = 0; r < matrix.rows; ++r) {
    const std::byte* row = raw.data() + r * matrix.stride * element;
    for (int64_t i = 0; i < matrix.cols; ++i) {
      float value = 0;
      if (matrix.dtype == DType::kF32) {
        std::memcpy(&value, row + i * element, sizeof(value));
      } else {
        bf16_t bits = 0;
        std::memcpy(&bits, row + i * element, sizeof(bits));
        value = Bf16ToF32(bits);
      }
      values.push_back(value);
    }
  }
  return values;
}

}  // namespace fathom::ops
