#include "engine/cuda_executor.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "engine/step_arrays.h"
#include "ops/cuda/cuda_graph.h"

namespace fathom {
namespace {

ForwardOptions WithLimits(ForwardOptions options, const ExecutorLimits& limits,
                          const CudaExecutorOptions& cuda) {
  options.max_tokens = limits.max_step_tokens;
  options.max_logit_rows = limits.max_logit_rows;
  options.branch_tokens = cuda.branch_tokens;
  return options;
}

class CudaExecutor final : public Executor {
 public:
  CudaExecutor(const ModelConfig& config, const Weights& weights, const Geometry& geometry,
               BlockPool& blocks, SlotPool& slots, ops::CudaBackend& backend,
               const ForwardOptions& options, ExecutorLimits limits,
               const CudaExecutorOptions& cuda)
      : vocab_size_(config.vocab_size),
        limits_(limits),
        backend_(backend),
        kv_(MakeKvView(geometry, config.num_layers, blocks.base(), slots.base())),
        forward_(config, weights, backend, WithLimits(options, limits, cuda)),
        arrays_(backend, {.tokens = limits.max_step_tokens,
                          .sequences = slots.capacity(),
                          .blocks_per_sequence = geometry.blocks_for(geometry.max_positions),
                          .logit_rows = limits.max_logit_rows}),
        device_logits_(reinterpret_cast<float*>(backend.Allocate(
            limits.max_logit_rows * vocab_size_ * static_cast<int64_t>(sizeof(float))))) {
    const auto table = static_cast<int32_t>(geometry.blocks_for(geometry.max_positions));
    PlanScratch(limits.max_step_tokens, slots.capacity(), table);
    // The largest step that branches needs scratch on every lane.
    PlanScratch(std::min(cuda.branch_tokens, limits.max_step_tokens), slots.capacity(), table);
    Capture(std::min({cuda.max_graph_sequences, static_cast<int>(slots.capacity()),
                      limits.max_step_tokens, limits.max_logit_rows}),
            GraphTableWidths(std::min<int64_t>(table, blocks.capacity())));
    backend.Wait();
  }

  Status Execute(const StepPlan& plan) override {
    FATHOM_CHECK(plan.num_tokens() <= limits_.max_step_tokens);
    FATHOM_CHECK(plan.logit_rows.size() <= static_cast<size_t>(limits_.max_logit_rows));
    // Nothing is waited for: sampling waits for what it needs, and the next step's arrays are
    // copied behind a step without logits.
    if (const Graph* graph = GraphOf(plan); graph != nullptr) {
      arrays_.Upload(plan, graph->table_width);
      graph->graph.Launch();
    } else {
      Run(arrays_.Upload(plan));
    }
    return {};
  }
  void CopyLogits(int64_t row, std::span<float> to) override {
    backend_.ToHost(to.data(), device_logits_ + row * vocab_size_,
                    vocab_size_ * static_cast<int64_t>(sizeof(float)));
  }
  void Sample(std::span<const ops::SamplingRow> rows, std::span<ops::SampledToken> out) override {
    backend_.Sample({Logits(), rows, out.data()});
  }

  void ClearSlot(std::span<std::byte> slot) override {
    backend_.Fill(slot.data(), 0, std::ssize(slot));
  }
  void CopyRuns(std::byte* to, const std::byte* from, std::span<const CopyRun> runs) override {
    if (runs.empty()) return;
    targets_.clear(), sources_.clear(), sizes_.clear();
    for (const CopyRun& run : runs) {
      targets_.push_back(to + run.to);
      sources_.push_back(from + run.from);
      sizes_.push_back(static_cast<size_t>(run.bytes));
    }
    cudaMemcpyAttributes attributes = {};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;  // the attributes are those of all copies
    FATHOM_CUDA_CHECK(cudaMemcpyBatchAsync(targets_.data(), sources_.data(), sizes_.data(),
                                           runs.size(), &attributes, &first, 1, backend_.stream()));
  }
  void ToHost(std::byte* host, const std::byte* from, int64_t bytes) override {
    backend_.ToHost(host, from, bytes);
  }
  void FromHost(std::byte* to, const std::byte* host, int64_t bytes) override {
    backend_.FromHost(to, host, bytes);
  }
  int64_t vocab_size() const override { return vocab_size_; }
  ExecutorLimits limits() const override { return limits_; }

 private:
  struct Graph {
    int32_t table_width;
    ops::CudaGraph graph;
  };

  MatrixView Logits() const {
    return F32Matrix(device_logits_, limits_.max_logit_rows, vocab_size_);
  }

  void Run(const StepArrays::Uploaded& step) {
    forward_.Run(step.view, kv_, step.logit_rows,
                 F32Matrix(device_logits_, std::ssize(step.logit_rows), vocab_size_));
  }

  // The scratch of a step of so many tokens: nothing is allocated once the server says ready.
  void PlanScratch(int32_t tokens, int32_t sequences, int32_t table_width) {
    if (tokens < 1) return;
    ops::StepView step;
    step.num_tokens = tokens;
    step.num_sequences = std::min(sequences, tokens);
    step.max_blocks = table_width;
    const std::span<const int32_t> rows(
        static_cast<const int32_t*>(nullptr),
        static_cast<size_t>(std::min(tokens, limits_.max_logit_rows)));
    backend_.PlanScratch([&] {
      Run({step, rows});
      backend_.Sample({Logits(), {}, nullptr});
    });
  }

  // Every number of sequences is captured as it is: a step computes nothing that nobody asked for.
  void Capture(int32_t sequences, const std::vector<int32_t>& widths) {
    graphs_.resize(static_cast<size_t>(std::max(sequences, 0)));
    for (int32_t n = 1; n <= sequences; ++n) {
      for (const int32_t width : widths) {
        const StepArrays::Uploaded step = arrays_.View(n, n, n, width);
        graphs_[static_cast<size_t>(n) - 1].push_back(
            {width, ops::CudaGraph::Capture(backend_, [&] { Run(step); })});
      }
    }
  }

  // The narrowest graph for a step of decoding sequences alone; null: it runs kernel by kernel.
  const Graph* GraphOf(const StepPlan& plan) const {
    const auto n = static_cast<size_t>(plan.num_tokens());
    if (n > graphs_.size() || plan.slot.size() != n || plan.logit_rows.size() != n) return nullptr;
    for (const Graph& graph : graphs_[n - 1]) {
      if (plan.max_blocks <= graph.table_width) return &graph;
    }
    return nullptr;
  }

  int64_t vocab_size_;
  ExecutorLimits limits_;
  ops::CudaBackend& backend_;
  KvView kv_;
  Forward forward_;
  StepArrays arrays_;
  float* device_logits_;                    // [max_logit_rows, V]
  std::vector<std::vector<Graph>> graphs_;  // [sequences - 1], by ascending width
  // Of CopyRuns, kept for their memory.
  std::vector<void*> targets_;
  std::vector<const void*> sources_;
  std::vector<size_t> sizes_;
};

}  // namespace

Expected<Reservation> ReserveCuda(int64_t bytes, std::string_view what) {
  if (bytes == 0) return Reservation::Adopt(nullptr, 0, nullptr);
  void* memory = nullptr;
  if (cudaMalloc(&memory, static_cast<size_t>(bytes)) != cudaSuccess) {
    (void)cudaGetLastError();
    const ops::CudaMemory device = ops::CudaBackend::Memory();
    return Fail(Code::kResourceExhausted,
                "{}: cannot reserve {} bytes of device memory, {} of {} are free", what, bytes,
                device.free, device.total);
  }
  FATHOM_CUDA_CHECK(cudaMemset(memory, 0, static_cast<size_t>(bytes)));
  FATHOM_CUDA_CHECK(cudaDeviceSynchronize());
  return Reservation::Adopt(static_cast<std::byte*>(memory), bytes, [](std::byte* data, int64_t) {
    // Waits for work that still uses it.
    FATHOM_CUDA_CHECK(cudaFree(data));
  });
}

Expected<std::unique_ptr<Executor>> MakeCudaExecutor(
    const ModelConfig& config, const Weights& weights, const Geometry& geometry, BlockPool& blocks,
    SlotPool& slots, ops::CudaBackend& backend, const ForwardOptions& options,
    ExecutorLimits limits, const CudaExecutorOptions& cuda) {
  try {
    return std::make_unique<CudaExecutor>(config, weights, geometry, blocks, slots, backend,
                                          options, limits, cuda);
  } catch (const std::bad_alloc&) {
    return Fail(Code::kResourceExhausted,
                "the buffers of a step of {} tokens do not fit: {} bytes of device memory are free",
                limits.max_step_tokens, ops::CudaBackend::Memory().free);
  }
}

}  // namespace fathom
