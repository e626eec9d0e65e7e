// The executor that computes on a GPU, and the device memory its pools lie in.
//
//   Engine::Start(options, geometry,
//                 [&](BlockPool& blocks, SlotPool& slots) {
//                   return MakeCudaExecutor(config, weights, geometry, blocks, slots, backend,
//                                           forward, limits);
//                 },
//                 ReserveCuda);
#pragma once

#include "cache/graph_plan.h"
#include "engine/executor.h"
#include "ops/cuda/cuda_backend.h"

namespace fathom {

// A MemorySource: zero-filled device memory. kResourceExhausted names the bytes asked for and free.
Expected<Reservation> ReserveCuda(int64_t bytes, std::string_view what);

struct CudaExecutorOptions {
  // Steps in which every sequence decodes one token run as captured graphs, for 1 .. so many
  // sequences (at most the slots); 0: none do.
  int max_graph_sequences = kGraphSequences;
  // ForwardOptions::branch_tokens: steps of up to so many tokens use three streams.
  int branch_tokens = kGpuBranchTokens;
};

// Borrows config, weights (uploaded by UploadForCuda to this backend), pools and backend; all must
// outlive it. The pools lie in device memory. Everything a step needs is allocated, and every graph
// captured, here. Results do not depend on `cuda`.
Expected<std::unique_ptr<Executor>> MakeCudaExecutor(
    const ModelConfig& config, const Weights& weights, const Geometry& geometry, BlockPool& blocks,
    SlotPool& slots, ops::CudaBackend& backend, const ForwardOptions& options,
    ExecutorLimits limits, const CudaExecutorOptions& cuda = {});

}  // namespace fathom
