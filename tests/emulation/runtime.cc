// The functions of CUDA's runtime that the kernels' host code and the tests call.
#include <sys/mman.h>

#include <cstring>
#include <map>

#include "machine.h"

namespace {

// Memory whose end lies before a page that nobody may touch.
struct Allocation {
  char* mapping;
  size_t mapped;
  size_t bytes, padded;
};
std::map<void*, Allocation>& Allocations() {
  static auto* const allocations = new std::map<void*, Allocation>;
  return *allocations;
}
constexpr uint8_t kGuard = 0xa5;

}  // namespace

extern "C" {

cudaError_t cudaMalloc(void** to, size_t bytes) {
  emu::Finish();
  const size_t page = 4096, padded = (bytes + 255) / 256 * 256;
  const size_t pages = (padded + page - 1) / page * page;
  char* const mapping = static_cast<char*>(
      mmap(nullptr, pages + 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (mapping == MAP_FAILED) return cudaErrorMemoryAllocation;
  mprotect(mapping, page, PROT_NONE);
  mprotect(mapping + page + pages, page, PROT_NONE);
  char* const data = mapping + page + pages - padded;
  std::memset(mapping + page, kGuard, pages);
  Allocations()[data] = {mapping, pages + 2 * page, bytes, padded};
  *to = data;
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  emu::Finish();
  if (data == nullptr) return cudaSuccess;
  const auto found = Allocations().find(data);
  if (found == Allocations().end()) return cudaErrorInvalidValue;
  const Allocation& a = found->second;
  const char* const begin = static_cast<const char*>(data);
  for (const char* at = a.mapping + 4096; at < begin; ++at) {
    if (static_cast<uint8_t>(*at) != kGuard)
      emu::Fail("something was written before an allocation");
  }
  for (size_t i = a.bytes; i < a.padded; ++i) {
    if (static_cast<uint8_t>(begin[i]) != kGuard) {
      emu::Fail("something was written behind an allocation of %zu bytes (+%zu)", a.bytes, i);
    }
  }
  munmap(a.mapping, a.mapped);
  Allocations().erase(found);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** to, size_t bytes) {
  return cudaMalloc(to, bytes);
}
cudaError_t cudaFreeHost(void* data) {
  return cudaFree(data);
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  emu::Finish();
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  emu::Finish();
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  emu::Finish();
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  emu::Finish();
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind) {
  emu::Finish();
  for (size_t i = 0; i < height; ++i) {
    std::memcpy(static_cast<char*>(to) + i * to_pitch,
                static_cast<const char*>(from) + i * from_pitch, width);
  }
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
cudaError_t cudaPeekAtLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "emulated";
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  emu::Finish();
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  emu::Finish();
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = 132;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value > 227 * 1024) emu::Fail("%d bytes of shared memory are asked for", value);
    emu::allowed_shared[kernel] = value;
  }
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    emu::allowed_clusters[kernel] = value != 0;
  }
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  *clusters = 16;
  return cudaSuccess;
}

}  // extern "C"
