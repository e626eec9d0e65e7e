#include "engine/cuda_executor.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <new>
#include <utility>

#include "engine/step_arrays.h"

namespace fathom {
namespace {

ForwardOptions WithLimits(ForwardOptions options, const ExecutorLimits& limits) {
  options.max_tokens = limits.max_step_tokens;
  options.max_logit_rows = limits.max_logit_rows;
  return options;
}

class CudaExecutor final : public Executor {
 public:
  CudaExecutor(const ModelConfig& config, const Weights& weights, const Geometry& geometry,
               BlockPool& blocks, SlotPool& slots, ops::CudaBackend& backend,
               const ForwardOptions& options, ExecutorLimits limits)
      : vocab_size_(config.vocab_size),
        limits_(limits),
        backend_(backend),
        kv_(MakeKvView(geometry, config.num_layers, blocks.base(), slots.base())),
        forward_(config, weights, backend, WithLimits(options, limits)),
        arrays_(backend, {.tokens = limits.max_step_tokens,
                          .sequences = slots.capacity(),
                          .blocks_per_sequence = geometry.blocks_for(geometry.max_positions),
                          .logit_rows = limits.max_logit_rows}),
        logit_bytes_(limits.max_logit_rows * vocab_size_ * static_cast<int64_t>(sizeof(float))),
        device_logits_(reinterpret_cast<float*>(backend.Allocate(logit_bytes_))) {
    FATHOM_CUDA_CHECK(cudaMallocHost(&logits_, static_cast<size_t>(logit_bytes_)));
    // The largest step, for its scratch: nothing is allocated once the server says ready.
    ops::StepView largest;
    largest.num_tokens = limits.max_step_tokens;
    largest.num_sequences = std::min(slots.capacity(), limits.max_step_tokens);
    largest.max_blocks = static_cast<int32_t>(geometry.blocks_for(geometry.max_positions));
    const std::span<const int32_t> rows(static_cast<const int32_t*>(nullptr),
                                        static_cast<size_t>(limits.max_logit_rows));
    backend.PlanScratch([&] {
      forward_.Run(largest, kv_, rows,
                   F32Matrix(device_logits_, limits.max_logit_rows, vocab_size_));
    });
    backend.Wait();
  }
  ~CudaExecutor() override { FATHOM_CUDA_CHECK(cudaFreeHost(logits_)); }

  Expected<std::span<float>> Execute(const StepPlan& plan) override {
    FATHOM_CHECK(plan.num_tokens() <= limits_.max_step_tokens);
    FATHOM_CHECK(plan.logit_rows.size() <= static_cast<size_t>(limits_.max_logit_rows));
    const auto rows = static_cast<int64_t>(plan.logit_rows.size());
    const StepArrays::Uploaded step = arrays_.Upload(plan);
    forward_.Run(step.view, kv_, step.logit_rows, F32Matrix(device_logits_, rows, vocab_size_));
    auto* logits = static_cast<float*>(logits_);
    const int64_t values = rows * vocab_size_;
    // A step without logits is not waited for: the next one's arrays are copied behind it.
    if (rows > 0) {
      backend_.ToHost(logits, device_logits_, values * static_cast<int64_t>(sizeof(float)));
    }
    return std::span<float>(logits, static_cast<size_t>(values));
  }

  void ClearSlot(std::span<std::byte> slot) override {
    backend_.Fill(slot.data(), 0, std::ssize(slot));
  }
  void CopyRuns(std::byte* to, const std::byte* from, std::span<const CopyRun> runs) override {
    for (const CopyRun& run : runs) backend_.Copy(to + run.to, from + run.from, run.bytes);
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
  int64_t vocab_size_;
  ExecutorLimits limits_;
  ops::CudaBackend& backend_;
  KvView kv_;
  Forward forward_;
  StepArrays arrays_;
  int64_t logit_bytes_;
  float* device_logits_;    // [max_logit_rows, V]
  void* logits_ = nullptr;  // the same in pinned host memory
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

Expected<std::unique_ptr<Executor>> MakeCudaExecutor(const ModelConfig& config,
                                                     const Weights& weights,
                                                     const Geometry& geometry, BlockPool& blocks,
                                                     SlotPool& slots, ops::CudaBackend& backend,
                                                     const ForwardOptions& options,
                                                     ExecutorLimits limits) {
  try {
    return std::make_unique<CudaExecutor>(config, weights, geometry, blocks, slots, backend,
                                          options, limits);
  } catch (const std::bad_alloc&) {
    return Fail(Code::kResourceExhausted,
                "the buffers of a step of {} tokens do not fit: {} bytes of device memory are free",
                limits.max_step_tokens, ops::CudaBackend::Memory().free);
  }
}

}  // namespace fathom
