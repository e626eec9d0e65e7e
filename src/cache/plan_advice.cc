#include "cache/plan_advice.h"

#include <algorithm>
#include <functional>

namespace fathom {
namespace {

// The largest n in [low, high] for which fits(n), or 0.
int64_t LargestThatFits(int64_t low, int64_t high, const std::function<bool(int64_t)>& fits) {
  if (high < low || !fits(low)) return 0;
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (fits(middle)) low = middle;
    else high = middle - 1;
  }
  return low;
}

class Search {
 public:
  Search(const ModelConfig& config, const MemoryPlan& plan) : config_(config), plan_(plan) {}

  PlanRemedies Run() {
    PlanRemedies out;
    const PlanRequest& now = plan_.request;
    const auto propose = [&](const char* flag, int64_t value) {
      if (value > 0) out.changes.push_back({flag, std::to_string(value)});
    };
    const bool quantised = now.numerics == ops::Numerics::kProduct;
    if (quantised && now.cache.kv == KvDType::kBf16 &&
        Fits([](PlanRequest& request) { request.cache.kv = KvDType::kFp8; })) {
      out.changes.push_back({"--kv-cache-dtype", "fp8"});
    }
    if (quantised && now.cache.index != IndexDType::kMxfp4 &&
        Fits([](PlanRequest& request) { request.cache.index = IndexDType::kMxfp4; })) {
      out.changes.push_back({"--attention-config.indexer_kv_dtype", "mxfp4"});
    }
    propose("--max-num-seqs", FewerSlots());
    propose("--max-num-batched-tokens", SmallerSteps());
    propose("--max-model-len", ShorterContext(now.slots));
    propose("--gpus", MoreGpus());
    if (!out.changes.empty()) return out;
    // No single flag is enough: as few sequences as asked for, and the context they leave.
    const int64_t context = ShorterContext(now.sequences);
    if (context > 0) {
      propose("--max-num-seqs", now.sequences);
      propose("--max-model-len", context);
      out.together = true;
    }
    return out;
  }

 private:
  bool Fits(const std::function<void(PlanRequest&)>& change) const {
    PlanRequest request = plan_.request;
    change(request);
    const auto plan = PlanMemory(config_, request, plan_.weights);
    return plan && plan->fits();
  }

  int64_t FewerSlots() const {
    return LargestThatFits(plan_.request.sequences, plan_.request.slots - 1, [&](int64_t n) {
      return Fits([n](PlanRequest& request) { request.slots = static_cast<int>(n); });
    });
  }

  int64_t SmallerSteps() const {
    return LargestThatFits(plan_.request.slots, plan_.request.step_tokens - 1, [&](int64_t n) {
      return Fits([n](PlanRequest& request) { request.step_tokens = static_cast<int>(n); });
    });
  }

  // In whole blocks.
  int64_t ShorterContext(int64_t slots) const {
    const int64_t block = plan_.geometry.options.block_tokens;
    return block * LargestThatFits(1, plan_.request.context / block, [&](int64_t n) {
             return Fits([&](PlanRequest& request) {
               request.slots = static_cast<int>(slots);
               request.context = n * block;
             });
           });
  }

  // The next larger number that divides the experts evenly.
  int64_t MoreGpus() const {
    if (!plan_.request.on_gpu) return 0;
    const int most = plan_.weights.num_experts;
    for (int gpus = plan_.request.gpus + 1; gpus <= most; ++gpus) {
      if (most % gpus == 0 && Fits([gpus](PlanRequest& request) { request.gpus = gpus; })) {
        return gpus;
      }
    }
    return 0;
  }

  const ModelConfig& config_;
  const MemoryPlan& plan_;
};

}  // namespace

PlanRemedies Remedies(const ModelConfig& config, const MemoryPlan& plan) {
  return plan.fits() ? PlanRemedies{} : Search(config, plan).Run();
}

std::string RemedyText(const PlanRemedies& remedies) {
  std::string text;
  const size_t count = remedies.changes.size();
  for (size_t i = 0; i < count; ++i) {
    if (i > 0) text += i + 1 < count ? ", " : remedies.together ? " and " : " or ";
    text += remedies.changes[i].flag + " " + remedies.changes[i].value;
  }
  return text;
}

}  // namespace fathom
