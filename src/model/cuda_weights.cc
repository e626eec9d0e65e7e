#include "model/cuda_weights.h"

#include <unordered_set>
#include <utility>
#include <vector>

#include "ops/experts/cuda.h"
#include "ops/hyper_connection/cuda.h"
#include "ops/linear/cuda.h"
#include "ops/router/cuda.h"

namespace fathom {
namespace {

constexpr int64_t kAlignment = 256;

int64_t Aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Everything that is no matrix: where it lies on the host, and its size.
std::vector<std::pair<const void*, int64_t>> Arrays(const Weights& weights,
                                                    const ModelConfig& config) {
  std::vector<std::pair<const void*, int64_t>> arrays;
  const auto add = [&](const void* data, int64_t bytes) {
    if (data != nullptr && bytes > 0) arrays.emplace_back(data, bytes);
  };
  const auto floats = [&](const std::vector<float>& values) {
    add(values.data(), std::ssize(values) * int64_t{sizeof(float)});
  };
  const auto site = [&](const HyperConnectionWeights& hc) {
    floats(hc.fn);
    floats(hc.base);
    floats(hc.scale);
  };
  add(weights.embed, config.vocab_size * config.hidden_size * int64_t{sizeof(bf16_t)});
  floats(weights.norm);
  site(weights.hc_head);
  for (const LayerWeights& layer : weights.layers) {
    for (const auto* values :
         {&layer.attn_norm, &layer.ffn_norm, &layer.attn_sink, &layer.q_norm, &layer.kv_norm,
          &layer.compressor.ape, &layer.compressor.norm, &layer.index_compressor.ape,
          &layer.index_compressor.norm, &layer.gate_bias}) {
      floats(*values);
    }
    site(layer.hc_attn);
    site(layer.hc_ffn);
    add(layer.tid2eid, config.vocab_size * config.experts_per_token * int64_t{sizeof(int64_t)});
  }
  return arrays;
}

}  // namespace

Status CheckForCuda(const ModelConfig& config) {
  const auto above = [](const char* key, int64_t value, int64_t most) {
    return Fail(Code::kInvalidArgument, "{} {}: at most {} on a GPU (--device cpu takes more)", key,
                value, most);
  };
  if (config.hidden_size > ops::kSeamCudaChannels) {
    return above("hidden_size", config.hidden_size, ops::kSeamCudaChannels);
  }
  if (config.hc_eps < ops::kSeamCudaLeastEps || config.hc_eps > ops::kSeamCudaMostEps) {
    return Fail(Code::kInvalidArgument, "hc_eps {}: {} to {} on a GPU (--device cpu takes others)",
                config.hc_eps, ops::kSeamCudaLeastEps, ops::kSeamCudaMostEps);
  }
  if (config.num_experts > ops::kRouterCudaExperts) {
    return above("n_routed_experts", config.num_experts, ops::kRouterCudaExperts);
  }
  if (config.experts_per_token > ops::kRouterCudaChosen) {
    return above("num_experts_per_tok", config.experts_per_token, ops::kRouterCudaChosen);
  }
  return {};
}

Status UploadForCuda(Weights& weights, const ModelConfig& config, ops::CudaBackend& backend) {
  FATHOM_TRY(CheckForCuda(config));
  const auto arrays = Arrays(weights, config);
  int64_t array_bytes = 0;
  for (const auto& [data, bytes] : arrays) array_bytes += Aligned(bytes);
  FATHOM_ASSIGN(std::byte * at, backend.Reserve(array_bytes, "embedding, norms and tables"));
  for (const auto& [data, bytes] : arrays) {
    backend.FromHost(at, data, bytes);
    backend.Stand(data, at);
    at += Aligned(bytes);
  }

  // A layer's experts are packed together: the device table of their addresses goes with them.
  std::unordered_set<const ops::LinearWeight*> in_experts;
  int64_t matrix_bytes = 0;
  for (const LayerWeights& layer : weights.layers) {
    const auto add = [&](const ops::ExpertWeights& expert) {
      in_experts.insert({&expert.w1, &expert.w2, &expert.w3});
    };
    for (const ops::ExpertWeights& expert : layer.experts) add(expert);
    add(layer.shared);
    matrix_bytes += Aligned(ops::CudaExpertsBytes(
        layer.experts.data(), static_cast<int>(layer.experts.size()), layer.shared));
  }
  std::vector<ops::LinearWeight*> others = weights.Matrices();
  std::erase_if(others, [&](const ops::LinearWeight* m) { return in_experts.contains(m); });
  for (const ops::LinearWeight* matrix : others) {
    matrix_bytes += Aligned(ops::CudaWeightBytes(*matrix));
  }
  FATHOM_ASSIGN(std::byte * next, backend.Reserve(matrix_bytes, "matrices"));
  const std::byte* end = next + matrix_bytes;
  const ops::CudaAllocate allocate = [&](int64_t bytes) -> void* {
    std::byte* begin = std::exchange(next, next + Aligned(bytes));
    FATHOM_CHECK(next <= end);
    return begin;
  };
  for (ops::LinearWeight* matrix : others) ops::PackLinearCuda(*matrix, allocate);
  for (LayerWeights& layer : weights.layers) {
    ops::PackExpertsCuda(layer.experts.data(), static_cast<int>(layer.experts.size()), layer.shared,
                         allocate);
  }
  backend.Wait();
  return {};
}

}  // namespace fathom
