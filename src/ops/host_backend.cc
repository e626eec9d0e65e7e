#include <cstdlib>
#include <cstring>

#include "core/status.h"
#include "ops/backend.h"

namespace fathom::ops {

void HostBackend::Free::operator()(std::byte* memory) const {
  std::free(memory);
}

std::byte* HostBackend::Allocate(int64_t bytes) {
  const size_t size = (static_cast<size_t>(bytes) + 63) / 64 * 64;
  auto* memory = static_cast<std::byte*>(std::aligned_alloc(64, size == 0 ? 64 : size));
  FATHOM_CHECK(memory != nullptr);
  std::memset(memory, 0, size);
  memory_.emplace_back(memory);
  return memory;
}

void HostBackend::ToHost(void* host, const void* data, int64_t bytes) {
  std::memcpy(host, data, static_cast<size_t>(bytes));
}

}  // namespace fathom::ops
