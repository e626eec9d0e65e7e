// CudaGraph: what a function submits to a CudaBackend, captured once and launched as a whole.
//
//   CudaGraph graph = CudaGraph::Capture(backend, [&] { forward.Run(step, kv, rows, logits); });
//   graph.Launch();   // in order with the backend's other work
//
// Addresses and launch shapes are those of the capture: what changes from launch to launch lies in
// memory that they point to. The backend must not grow its scratch while it captures
// (CudaBackend::PlanScratch), and the function must neither wait nor copy from or to the host.
#pragma once

#include <cstdint>
#include <functional>

#include "ops/cuda/cuda_backend.h"

struct CUgraphExec_st;

namespace fathom::ops {

class CudaGraph {
 public:
  static CudaGraph Capture(CudaBackend& backend, const std::function<void()>& run);
  CudaGraph(CudaGraph&& other) noexcept;
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  CudaGraph& operator=(CudaGraph&&) = delete;
  ~CudaGraph();

  void Launch() const;
  int64_t nodes() const { return nodes_; }

 private:
  CudaGraph(CudaBackend& backend, CUgraphExec_st* graph, int64_t nodes)
      : backend_(&backend), graph_(graph), nodes_(nodes) {}

  CudaBackend* backend_;
  CUgraphExec_st* graph_;
  int64_t nodes_;
};

}  // namespace fathom::ops
