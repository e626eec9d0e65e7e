#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include "engine/executor.h"

namespace fathom {
namespace {

ForwardOptions WithLimits(ForwardOptions options, const ExecutorLimits& limits) {
  options.max_tokens = limits.max_step_tokens;
  options.max_logit_rows = limits.max_logit_rows;
  return options;
}

class CpuExecutor : public Executor {
 public:
  CpuExecutor(const ModelConfig& config, const Weights& weights, const Geometry& geometry,
              BlockPool& blocks, SlotPool& slots, ThreadPool& threads,
              const ForwardOptions& options, ExecutorLimits limits)
      : vocab_size_(config.vocab_size),
        limits_(limits),
        kv_(MakeKvView(geometry, config.num_layers, blocks.base(), slots.base())),
        backend_(ops::MakeCpuBackend(threads)),
        forward_(config, weights, *backend_, WithLimits(options, limits)),
        logits_(static_cast<size_t>(limits.max_logit_rows * config.vocab_size)) {}

  Status Execute(const StepPlan& plan) override {
    FATHOM_CHECK(plan.num_tokens() <= limits_.max_step_tokens);
    FATHOM_CHECK(plan.logit_rows.size() <= static_cast<size_t>(limits_.max_logit_rows));
    const auto rows = static_cast<int64_t>(plan.logit_rows.size());
    try {
      forward_.Run(plan.view(), kv_, plan.logit_rows, F32Matrix(logits_.data(), rows, vocab_size_));
    } catch (const std::exception& error) {  // thread scratch may fail to grow
      return Fail(Code::kInternal, "forward pass of {} tokens: {}", plan.num_tokens(),
                  error.what());
    }
    return {};
  }
  void CopyLogits(int64_t row, std::span<float> to) override {
    std::copy_n(logits_.begin() + row * vocab_size_, vocab_size_, to.begin());
  }
  void Sample(std::span<const ops::SamplingRow> rows, std::span<ops::SampledToken> out) override {
    backend_->Sample(
        {F32Matrix(logits_.data(), limits_.max_logit_rows, vocab_size_), rows, out.data()});
  }

  int64_t vocab_size() const override { return vocab_size_; }
  ExecutorLimits limits() const override { return limits_; }

 private:
  int64_t vocab_size_;
  ExecutorLimits limits_;
  KvView kv_;
  std::unique_ptr<ops::Backend> backend_;
  Forward forward_;
  std::vector<float> logits_;  // [max_logit_rows, V]
};

}  // namespace

std::unique_ptr<Executor> MakeCpuExecutor(const ModelConfig& config, const Weights& weights,
                                          const Geometry& geometry, BlockPool& blocks,
                                          SlotPool& slots, ThreadPool& threads,
                                          const ForwardOptions& options, ExecutorLimits limits) {
  return std::make_unique<CpuExecutor>(config, weights, geometry, blocks, slots, threads, options,
                                       limits);
}

}  // namespace fathom
