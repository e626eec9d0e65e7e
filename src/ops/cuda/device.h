// What every CUDA file shares, without CUDA headers: plain C++ files include this one.
//
// Each op has ops/<op>/cuda.cu with `void XCuda(const XArgs&, CudaStream)`: the arguments of its
// contract, all pointers in device memory, all work on the stream, nothing allocated, no
// synchronisation. MatrixViews of activations may be bf16 (kProduct) or float32 (kReference); a
// kernel computes in float32 either way and rounds where the contract says.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace fathom::ops {

using CudaStream = CUstream_st*;

// How a thread launches kernels (LaunchOverlapped); its own, so that two backends do not meet in
// it. Nothing but time depends on it.
struct LaunchPolicy {
  // Every kernel asks for as much shared memory as there is. A multiprocessor changes its split of
  // L1 and shared memory only when it is empty, so kernels that ask for different ones run one
  // after the other there.
  bool one_split = false;
};
LaunchPolicy& ThreadLaunchPolicy();

// Ends the process with the call's text and CUDA's message: a device that fails is not ours to
// mend. Checks the last launch too when `status` is cudaSuccess (0).
void CheckCuda(int status, const char* what, const char* file, int line);

}  // namespace fathom::ops

#define FATHOM_CUDA_CHECK(call) \
  ::fathom::ops::CheckCuda(static_cast<int>(call), #call, __FILE__, __LINE__)
