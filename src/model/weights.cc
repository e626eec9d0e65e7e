#include "model/weights.h"

#include <algorithm>
#include <cstring>

#include "core/thread_pool.h"
#include "model/checkpoint.h"
#include "model/dummy.h"
#include "model/finite_check.h"
#include "model/tensor_names.h"

namespace fathom {
namespace {

// What Weights::storage holds.
struct WeightStorage {
  TensorSet tensors;
  std::vector<std::unique_ptr<std::max_align_t[]>> copies;  // of tensors the file left unaligned
};

// Binds tensors by name to the operand types. All of them are there with the right shape and dtype:
// the tensor set has been accounted for.
class Binder {
 public:
  Binder(const ModelConfig& config, WeightStorage& storage)
      : config_(config), storage_(storage), set_(storage.tensors) {}

  Weights Bind() {
    Weights weights;
    weights.embed = static_cast<const bf16_t*>(Data(set_.Get("embed.weight")));
    weights.layers.resize(static_cast<size_t>(config_.num_layers));
    for (int i = 0; i < config_.num_layers; ++i) {
      BindLayer(fmt::format("layers.{}.", i), i, weights.layers[static_cast<size_t>(i)]);
    }
    weights.hc_head = Site("hc_head", 4);
    weights.norm = Vector("norm.weight");
    weights.head = Linear("head");
    weights.tensor_count = set_.tensor_count;
    weights.total_bytes = set_.total_bytes;
    return weights;
  }

 private:
  void BindLayer(const std::string& at, int layer, LayerWeights& w) {
    w.attn_norm = Vector(at + "attn_norm.weight");
    w.ffn_norm = Vector(at + "ffn_norm.weight");
    w.hc_attn = Site(at + "hc_attn", 24);
    w.hc_ffn = Site(at + "hc_ffn", 24);
    w.attn_sink = Vector(at + "attn.attn_sink");
    w.wq_a = Linear(at + "attn.wq_a");
    w.q_norm = Vector(at + "attn.q_norm.weight");
    w.wq_b = Linear(at + "attn.wq_b");
    w.wkv = Linear(at + "attn.wkv");
    w.kv_norm = Vector(at + "attn.kv_norm.weight");
    w.wo_a = Linear(at + "attn.wo_a");
    w.wo_b = Linear(at + "attn.wo_b");
    if (config_.kind(layer) != LayerKind::kSwa) w.compressor = Compressor(at + "attn.compressor");
    if (config_.kind(layer) == LayerKind::kCsa) {
      w.index_wq_b = Linear(at + "attn.indexer.wq_b");
      w.index_weights_proj = Linear(at + "attn.indexer.weights_proj");
      w.index_compressor = Compressor(at + "attn.indexer.compressor");
    }
    w.gate = Linear(at + "ffn.gate");
    if (config_.hash_routed(layer)) {
      w.tid2eid = static_cast<const int64_t*>(Data(set_.Get(at + "ffn.gate.tid2eid")));
    } else {
      w.gate_bias = Vector(at + "ffn.gate.bias");
    }
    w.experts.reserve(static_cast<size_t>(config_.num_experts));
    for (int e = 0; e < config_.num_experts; ++e) {
      w.experts.push_back(Expert(fmt::format("{}ffn.experts.{}", at, e)));
    }
    w.shared = Expert(at + "ffn.shared_experts");
  }

  CompressorWeights Compressor(const std::string& at) {
    return {Linear(at + ".wkv"), Linear(at + ".wgate"), Vector(at + ".ape"),
            Vector(at + ".norm.weight")};
  }

  ops::ExpertWeights Expert(const std::string& at) {
    return {Linear(at + ".w1"), Linear(at + ".w2"), Linear(at + ".w3")};
  }

  HyperConnectionWeights Site(const std::string& at, int mixes) {
    HyperConnectionWeights w;
    w.fn = Vector(at + "_fn");
    w.base = Vector(at + "_base");
    w.scale = Vector(at + "_scale");
    w.site = {w.fn.data(), w.base.data(), w.scale.data(), mixes};
    return w;
  }

  ops::LinearWeight Linear(const std::string& at) {
    const TensorInfo& tensor = set_.Get(at + ".weight");
    ops::LinearWeight w;
    w.out = tensor.shape[0];
    w.in = tensor.shape[1];
    w.data = Data(tensor);
    switch (tensor.dtype) {
      case DType::kF32: w.format = ops::WeightFormat::kF32; return w;
      case DType::kBF16: w.format = ops::WeightFormat::kBF16; return w;
      case DType::kF8E4M3: w.format = ops::WeightFormat::kFp8Block128; break;
      default: w.format = ops::WeightFormat::kFp4Block32; w.in *= 2;
    }
    w.scale = static_cast<const uint8_t*>(Data(set_.Get(at + ".scale")));
    return w;
  }

  // A float32 copy of a small BF16 or F32 tensor.
  std::vector<float> Vector(const std::string& name) {
    const TensorInfo& tensor = set_.Get(name);
    std::vector<float> values(static_cast<size_t>(tensor.bytes / ElementBytes(tensor.dtype)));
    if (tensor.dtype == DType::kF32) {
      std::memcpy(values.data(), tensor.data, static_cast<size_t>(tensor.bytes));
      return values;
    }
    const auto* data = static_cast<const bf16_t*>(Data(tensor));
    for (size_t i = 0; i < values.size(); ++i) values[i] = Bf16ToF32(data[i]);
    return values;
  }

  const void* Data(const TensorInfo& tensor) {
    const auto address = reinterpret_cast<uintptr_t>(tensor.data);
    if (address % static_cast<uintptr_t>(ElementBytes(tensor.dtype)) == 0) return tensor.data;
    const size_t bytes = static_cast<size_t>(tensor.bytes);
    auto& copy =
        storage_.copies.emplace_back(new std::max_align_t[bytes / sizeof(std::max_align_t) + 1]);
    std::memcpy(copy.get(), tensor.data, bytes);
    return copy.get();
  }

  const ModelConfig& config_;
  WeightStorage& storage_;
  const TensorSet& set_;
};

// An expert id out of range would read another layer's weights (model.md 12.2).
Status CheckRouting(const ModelConfig& config, const Weights& weights) {
  for (int layer = 0; layer < config.num_hash_layers; ++layer) {
    const int64_t* ids = weights.layers[static_cast<size_t>(layer)].tid2eid;
    const int64_t count = config.vocab_size * config.experts_per_token;
    for (int64_t i = 0; i < count; ++i) {
      if (ids[i] < 0 || ids[i] >= config.num_experts) {
        return Fail(Code::kDataLoss,
                    "tensor layers.{}.ffn.gate.tid2eid: token {} names expert {}, there are {}",
                    layer, i / config.experts_per_token, ids[i], config.num_experts);
      }
    }
  }
  return {};
}

Status CheckValues(const TensorSet& set, ThreadPool& pool) {
  std::vector<const TensorInfo*> tensors;
  tensors.reserve(set.tensors.size());
  for (const auto& [name, tensor] : set.tensors) tensors.push_back(&tensor);
  // In file order, so that the disk reads ahead.
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorInfo* a, const TensorInfo* b) { return a->data < b->data; });
  return CheckFinite(tensors, pool);
}

}  // namespace

std::vector<ops::LinearWeight*> Weights::Matrices() {
  std::vector<ops::LinearWeight*> list;
  const auto add = [&](ops::LinearWeight& w) {
    if (w.data != nullptr) list.push_back(&w);
  };
  for (LayerWeights& layer : this->layers) {
    for (ops::LinearWeight* w :
         {&layer.wq_a, &layer.wq_b, &layer.wkv, &layer.wo_a, &layer.wo_b, &layer.compressor.wkv,
          &layer.compressor.wgate, &layer.index_wq_b, &layer.index_weights_proj,
          &layer.index_compressor.wkv, &layer.index_compressor.wgate, &layer.gate}) {
      add(*w);
    }
    for (ops::ExpertWeights& expert : layer.experts) {
      for (ops::LinearWeight* w : {&expert.w1, &expert.w2, &expert.w3}) add(*w);
    }
    for (ops::LinearWeight* w : {&layer.shared.w1, &layer.shared.w2, &layer.shared.w3}) add(*w);
  }
  add(head);
  return list;
}

Expected<Weights> LoadWeights(const std::string& directory, ModelConfig& config,
                              const LoadOptions& options) {
  ThreadPool pool;
  auto storage = std::make_shared<WeightStorage>();
  if (options.format == LoadFormat::kDummy) {
    FATHOM_ASSIGN(storage->tensors, DummyTensors(config, options.seed, pool));
  } else {
    FATHOM_ASSIGN(storage->tensors, OpenCheckpoint(directory, config));
    if (options.check_finite) {
      auto finite = CheckValues(storage->tensors, pool);
      if (!finite) return Fail(Code::kDataLoss, "{}: {}", directory, finite.error().message);
    }
  }
  Weights weights = Binder(config, *storage).Bind();
  weights.storage = storage;
  auto routing = CheckRouting(config, weights);
  if (!routing) return Fail(Code::kDataLoss, "{}: {}", directory, routing.error().message);
  return weights;
}

void PackForCpu(Weights& weights, ThreadPool& pool) {
  const std::vector<ops::LinearWeight*> matrices = weights.Matrices();
  pool.ParallelFor(static_cast<int64_t>(matrices.size()), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) ops::PackLinearCpu(*matrices[i]);
  });
}

}  // namespace fathom
