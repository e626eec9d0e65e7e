// Any bytes as a safetensors file: accepted tensors tile the payload exactly.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "model/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  const auto tensors = fathom::ParseSafeTensors(file, "fuzz");
  if (!tensors) {
    if (tensors.error().message.empty()) std::abort();
    return 0;
  }
  int64_t bytes = 0;
  unsigned sum = 0;
  for (const fathom::TensorInfo& tensor : *tensors) {
    bytes += tensor.bytes;
    // Reads every byte: the sanitizer sees a tensor that leaves the file.
    for (int64_t i = 0; i < tensor.bytes; ++i) sum += std::to_integer<unsigned>(tensor.data[i]);
  }
  if (bytes > static_cast<int64_t>(size) || (bytes == 0 && sum != 0)) std::abort();
  return 0;
}
