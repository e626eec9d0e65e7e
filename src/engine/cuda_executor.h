// The executor that computes on a GPU, and the device memory its pools lie in.
//
//   Engine::Start(options, geometry,
//                 [&](BlockPool& blocks, SlotPool& slots) {
//                   return MakeCudaExecutor(config, weights, geometry, blocks, slots, backend,
//                                           forward, limits);
//                 },
//                 ReserveCuda);
#pragma once

#include "engine/executor.h"
#include "ops/cuda/cuda_backend.h"

namespace fathom {

// A MemorySource: zero-filled device memory. kResourceExhausted names the bytes asked for and free.
Expected<Reservation> ReserveCuda(int64_t bytes, std::string_view what);

// Borrows config, weights (uploaded by UploadForCuda to this backend), pools and backend; all must
// outlive it. The pools lie in device memory. Everything a step needs is allocated here.
Expected<std::unique_ptr<Executor>> MakeCudaExecutor(const ModelConfig& config,
                                                     const Weights& weights,
                                                     const Geometry& geometry, BlockPool& blocks,
                                                     SlotPool& slots, ops::CudaBackend& backend,
                                                     const ForwardOptions& options,
                                                     ExecutorLimits limits);

}  // namespace fathom
