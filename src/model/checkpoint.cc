#include "model/checkpoint.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <unordered_set>

#include "model/shards.h"
#include "model/tensor_names.h"

namespace fathom {
namespace {

constexpr size_t kNamedProblems = 5;  // in one error message

// Checks the shards against the table and fills a TensorSet.
class Accounting {
 public:
  Accounting(const ShardSet& shards, ModelConfig& config) : shards_(shards), config_(config) {
    transformers_ = !Stored("embed.weight") && Stored("model.embed_tokens.weight");
  }

  Expected<TensorSet> Run() {
    FATHOM_TRY(FindExpertFormat());
    FATHOM_ASSIGN(const int stages, FindDrafterStages());
    for (const ExpectedTensor& expected : ExpectedTensors(config_, stages)) Match(expected);
    ReportExtra();
    if (problem_count_ > 0) {
      const size_t more = problem_count_ - problems_.size();
      return Fail(Code::kDataLoss, "{}: {}{}", shards_.origin, fmt::join(problems_, "; "),
                  more > 0 ? fmt::format("; and {} more", more) : "");
    }
    set_.tensor_count = static_cast<int64_t>(shards_.tensors.size());
    set_.total_bytes = shards_.total_bytes;
    return std::move(set_);
  }

 private:
  const TensorInfo* Stored(const std::string& name) const {
    const auto it = shards_.tensors.find(name);
    return it == shards_.tensors.end() ? nullptr : it->second;
  }

  void Problem(std::string text) {
    if (problem_count_++ < kNamedProblems) problems_.push_back(std::move(text));
  }

  Status FindExpertFormat() {
    const std::string name = transformers_ ? "model.layers.0.mlp.experts.gate_up_proj"
                                           : "layers.0.ffn.experts.0.w1.weight";
    const TensorInfo* tensor = Stored(name);
    ExpertFormat format = config_.expert_format;
    if (tensor != nullptr) {
      if (tensor->dtype == DType::kI8) {
        format = ExpertFormat::kFp4;
      } else if (tensor->dtype == DType::kF8E4M3) {
        format = ExpertFormat::kFp8;
      } else {
        return Fail(Code::kDataLoss, "{}: tensor {} is {}, experts are I8 (packed FP4) or F8_E4M3",
                    shards_.origin, name, DTypeName(tensor->dtype));
      }
      if (config_.expert_format != ExpertFormat::kUnknown && config_.expert_format != format) {
        return Fail(Code::kDataLoss, "{}: tensor {} is {}, config.json's expert_dtype is {}",
                    shards_.origin, name, DTypeName(tensor->dtype),
                    config_.expert_format == ExpertFormat::kFp4 ? "fp4" : "fp8");
      }
    }
    if (transformers_ && format == ExpertFormat::kFp8 && config_.expert_width % 128 != 0) {
      // A scale tile of the stacked tensor would cover rows of both w1 and w3.
      return Fail(Code::kDataLoss,
                  "{}: tensor {}: moe_intermediate_size {} is not a multiple of 128, as stacked "
                  "FP8 experts need",
                  shards_.origin, name, config_.expert_width);
    }
    config_.expert_format = format;
    return {};
  }

  // The tensors decide how many stages there are (model.md 8.3); none at all is a checkpoint whose
  // drafter was dropped, as transformers does.
  Expected<int> FindDrafterStages() {
    int stages = 0;
    while (Stored(fmt::format("mtp.{}.attn_norm.weight", stages)) != nullptr) ++stages;
    const int promised = DrafterStages(config_);
    if (stages != 0 && config_.dspark() && stages != promised) {
      return Fail(Code::kDataLoss, "{}: tensors mtp.0 .. mtp.{}: config.json promises {} stages",
                  shards_.origin, stages - 1, promised);
    }
    return stages;
  }

  // The stored tensor behind `expected`, or null; marks it as used.
  const TensorInfo* Take(const ExpectedTensor& expected) {
    const TensorInfo* tensor = nullptr;
    if (!transformers_ || expected.transformers.empty()) {
      tensor = Stored(expected.name);
    } else {
      tensor = Stored(expected.transformers);
      if (tensor == nullptr && !expected.alias.empty()) tensor = Stored(expected.alias);
    }
    if (tensor != nullptr) used_.insert(tensor);
    return tensor;
  }

  // The dtype `expected` may have in this checkpoint, given what is stored.
  DType AcceptedDType(const ExpectedTensor& expected, DType stored, bool renamed) const {
    if (expected.may_be_bf16 && wo_a_is_bf16_) return DType::kBF16;
    // Transformers keeps some modules in float32 and saves others in the dtype it was loaded with.
    const auto plain = [](DType t) { return t == DType::kF32 || t == DType::kBF16; };
    const bool free = renamed && plain(expected.dtype) && expected.name != "embed.weight";
    return free && plain(stored) ? stored : expected.dtype;
  }

  void Match(const ExpectedTensor& expected) {
    const bool renamed = transformers_ && !expected.transformers.empty();
    const std::string& name = renamed ? expected.transformers : expected.name;
    const TensorInfo* tensor = Take(expected);
    if (expected.may_be_bf16) {
      const bool scale = expected.dtype == DType::kF8E8M0;
      if (!scale) wo_a_is_bf16_ = tensor != nullptr && tensor->dtype == DType::kBF16;
      if (scale && wo_a_is_bf16_) {
        if (tensor != nullptr) Problem(fmt::format("{} stands beside a BF16 weight", name));
        return;
      }
    }
    if (tensor == nullptr) {
      // A stacked tensor is named once, not for each of its slices.
      if (!renamed || expected.part == 0) Problem(fmt::format("{} is missing", name));
      return;
    }
    const DType dtype = AcceptedDType(expected, tensor->dtype, renamed);
    const std::vector<int64_t> shape =
        renamed ? expected.transformers_shape(config_.num_experts) : expected.shape;
    if (tensor->dtype != dtype || tensor->shape != shape) {
      if (!renamed || expected.part == 0) {
        Problem(fmt::format("{} is {}, config.json asks for {}", name,
                            ShapeText(tensor->dtype, tensor->shape), ShapeText(dtype, shape)));
      }
      return;
    }
    if (expected.name.starts_with("mtp.")) return;
    TensorInfo bound = *tensor;
    if (renamed && expected.parts > 1) {
      bound.shape = expected.shape;
      bound.bytes = expected.bytes();
      bound.data += expected.part * bound.bytes;
    } else if (renamed) {
      bound.shape = expected.shape;  // [1, rows, cols] of a single expert
    }
    set_.tensors.emplace(expected.name, std::move(bound));
  }

  void ReportExtra() {
    std::vector<std::string_view> extra;
    for (const auto& [name, tensor] : shards_.tensors) {
      if (!used_.contains(tensor)) extra.push_back(name);
    }
    std::sort(extra.begin(), extra.end());
    for (const std::string_view name : extra) {
      Problem(fmt::format("{} is no tensor of this model", name));
    }
  }

  const ShardSet& shards_;
  ModelConfig& config_;
  bool transformers_ = false;
  bool wo_a_is_bf16_ = false;  // of the layer at hand: the weight comes before its scale
  std::unordered_set<const TensorInfo*> used_;
  TensorSet set_;
  std::vector<std::string> problems_;
  size_t problem_count_ = 0;
};

}  // namespace

const TensorInfo* TensorSet::Find(const std::string& name) const {
  const auto it = tensors.find(name);
  return it == tensors.end() ? nullptr : &it->second;
}

const TensorInfo& TensorSet::Get(const std::string& name) const {
  const TensorInfo* tensor = Find(name);
  FATHOM_CHECK(tensor != nullptr);
  return *tensor;
}

Expected<TensorSet> OpenCheckpoint(const std::string& directory, ModelConfig& config) {
  FATHOM_ASSIGN(ShardSet shards, OpenShards(directory));
  auto files = std::make_shared<ShardSet>(std::move(shards));
  FATHOM_ASSIGN(TensorSet set, Accounting(*files, config).Run());
  set.storage = files;
  return set;
}

}  // namespace fathom
