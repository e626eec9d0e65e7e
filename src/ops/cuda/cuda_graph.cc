#include "ops/cuda/cuda_graph.h"

#include <cuda_runtime_api.h>

#include <utility>

namespace fathom::ops {

CudaGraph CudaGraph::Capture(CudaBackend& backend, const std::function<void()>& run) {
  const CudaStream stream = backend.stream();
  FATHOM_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  run();
  cudaGraph_t graph = nullptr;
  FATHOM_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  size_t nodes = 0;
  FATHOM_CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
  cudaGraphExec_t executable = nullptr;
  FATHOM_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  FATHOM_CUDA_CHECK(cudaGraphDestroy(graph));
  // Now, not at the first launch: what a graph keeps on the device is there once it is captured.
  FATHOM_CUDA_CHECK(cudaGraphUpload(executable, stream));
  return {backend, executable, static_cast<int64_t>(nodes)};
}

CudaGraph::CudaGraph(CudaGraph&& other) noexcept
    : backend_(other.backend_),
      graph_(std::exchange(other.graph_, nullptr)),
      nodes_(other.nodes_) {}

CudaGraph::~CudaGraph() {
  if (graph_ != nullptr) (void)cudaGraphExecDestroy(graph_);
}

void CudaGraph::Launch() const {
  FATHOM_CUDA_CHECK(cudaGraphLaunch(graph_, backend_->stream()));
}

}  // namespace fathom::ops
