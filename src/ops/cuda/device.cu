#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "ops/cuda/device.h"

namespace fathom::ops {

LaunchPolicy& ThreadLaunchPolicy() {
  static thread_local LaunchPolicy policy;
  return policy;
}

void CheckCuda(int status, const char* what, const char* file, int line) {
  auto error = static_cast<cudaError_t>(status);
  if (error == cudaSuccess) error = cudaPeekAtLastError();
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "fathom: %s:%d: %s: %s\n", file, line, what, cudaGetErrorString(error));
  std::abort();
}

}  // namespace fathom::ops
