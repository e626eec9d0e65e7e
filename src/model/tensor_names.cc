#include "model/tensor_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>

namespace fathom {
namespace {

// A size as a function of the config. The names are model.md's symbols.
using Size = int64_t (*)(const ModelConfig&);
constexpr Size D = [](const ModelConfig& c) { return c.hidden_size; };
constexpr Size V = [](const ModelConfig& c) { return c.vocab_size; };
constexpr Size H = [](const ModelConfig& c) -> int64_t { return c.num_heads; };
constexpr Size Q = [](const ModelConfig& c) { return c.q_lora_rank; };
constexpr Size E = [](const ModelConfig& c) -> int64_t { return c.num_experts; };
constexpr Size I = [](const ModelConfig& c) { return c.expert_width; };
constexpr Size K = [](const ModelConfig& c) -> int64_t { return c.experts_per_token; };
constexpr Size Hi = [](const ModelConfig& c) -> int64_t { return c.index_heads; };
constexpr Size Streams = [](const ModelConfig& c) { return 4 * c.hidden_size; };
constexpr Size QueryWidth = [](const ModelConfig& c) -> int64_t { return 512 * c.num_heads; };
constexpr Size IndexWidth = [](const ModelConfig& c) -> int64_t { return 128 * c.index_heads; };
constexpr Size OutLatent = [](const ModelConfig& c) { return c.o_lora_rank * c.o_groups; };
constexpr Size GroupWidth = [](const ModelConfig& c) -> int64_t {
  return 512 * (c.num_heads / c.o_groups);
};
constexpr Size Rank = [](const ModelConfig& c) -> int64_t { return c.dspark_markov_rank; };
constexpr Size Taps = [](const ModelConfig& c) -> int64_t {
  return c.hidden_size * static_cast<int64_t>(c.dspark_target_layers.size());
};
constexpr Size Confidence = [](const ModelConfig& c) -> int64_t {
  return c.hidden_size + c.dspark_markov_rank;
};
template <int64_t n>
constexpr Size Fixed = [](const ModelConfig&) -> int64_t { return n; };

enum class Storage {
  kBf16,  // NAME.weight BF16
  kF32,   // NAME F32, without suffix
  kI64,   // NAME I64, without suffix
  kFp8,   // NAME.weight F8_E4M3 and NAME.scale F8_E8M0, one per 128x128 tile
  kWoA,   // as kFp8; re-quantised repositories have BF16 without scale (model.md 9.3)
};

struct Rule {
  const char* name;
  const char* transformers;
  Storage storage;
  Size rows;
  Size cols = nullptr;  // null: a vector
  const char* alias = nullptr;
};

constexpr Rule kBottom[] = {
    {"embed", "model.embed_tokens", Storage::kBf16, V, D},
};

constexpr Rule kTop[] = {
    {"head", "lm_head", Storage::kBf16, V, D},
    {"norm", "model.norm", Storage::kBf16, D},
    {"hc_head_fn", "model.hc_head.hc_fn", Storage::kF32, Fixed<4>, Streams},
    {"hc_head_base", "model.hc_head.hc_base", Storage::kF32, Fixed<4>},
    {"hc_head_scale", "model.hc_head.hc_scale", Storage::kF32, Fixed<1>},
};

constexpr Rule kEveryLayer[] = {
    {"attn_norm", "input_layernorm", Storage::kBf16, D},
    {"ffn_norm", "post_attention_layernorm", Storage::kBf16, D},
    {"hc_attn_fn", "attn_hc.fn", Storage::kF32, Fixed<24>, Streams},
    {"hc_attn_base", "attn_hc.base", Storage::kF32, Fixed<24>},
    {"hc_attn_scale", "attn_hc.scale", Storage::kF32, Fixed<3>},
    {"hc_ffn_fn", "ffn_hc.fn", Storage::kF32, Fixed<24>, Streams},
    {"hc_ffn_base", "ffn_hc.base", Storage::kF32, Fixed<24>},
    {"hc_ffn_scale", "ffn_hc.scale", Storage::kF32, Fixed<3>},
    {"attn.attn_sink", "self_attn.sinks", Storage::kF32, H},
    {"attn.wq_a", "self_attn.q_a_proj", Storage::kFp8, Q, D},
    {"attn.q_norm", "self_attn.q_a_norm", Storage::kBf16, Q},
    {"attn.wq_b", "self_attn.q_b_proj", Storage::kFp8, QueryWidth, Q},
    {"attn.wkv", "self_attn.kv_proj", Storage::kFp8, Fixed<512>, D},
    {"attn.kv_norm", "self_attn.kv_norm", Storage::kBf16, Fixed<512>},
    {"attn.wo_a", "self_attn.o_a_proj", Storage::kWoA, OutLatent, GroupWidth},
    {"attn.wo_b", "self_attn.o_b_proj", Storage::kFp8, D, OutLatent},
    {"ffn.gate", "mlp.gate", Storage::kBf16, E, D},
    {"ffn.shared_experts.w1", "mlp.shared_experts.gate_proj", Storage::kFp8, I, D},
    {"ffn.shared_experts.w2", "mlp.shared_experts.down_proj", Storage::kFp8, D, I},
    {"ffn.shared_experts.w3", "mlp.shared_experts.up_proj", Storage::kFp8, I, D},
};

constexpr Rule kLearnedRouter[] = {
    {"ffn.gate.bias", "mlp.gate.e_score_correction_bias", Storage::kF32, E},
};
constexpr Rule kHashRouter[] = {
    {"ffn.gate.tid2eid", "mlp.gate.tid2eid", Storage::kI64, V, K},
};

constexpr Rule kCsaLayer[] = {
    {"attn.compressor.ape", "self_attn.compressor.position_bias", Storage::kF32, Fixed<4>,
     Fixed<1024>},
    {"attn.compressor.wkv", "self_attn.compressor.kv_proj", Storage::kBf16, Fixed<1024>, D},
    {"attn.compressor.wgate", "self_attn.compressor.gate_proj", Storage::kBf16, Fixed<1024>, D},
    {"attn.compressor.norm", "self_attn.compressor.kv_norm", Storage::kBf16, Fixed<512>},
    {"attn.indexer.wq_b", "self_attn.compressor.indexer.q_b_proj", Storage::kFp8, IndexWidth, Q},
    {"attn.indexer.weights_proj", "self_attn.compressor.indexer.scorer.weights_proj",
     Storage::kBf16, Hi, D, "self_attn.compressor.indexer.weights_proj"},
    {"attn.indexer.compressor.ape", "self_attn.compressor.indexer.position_bias", Storage::kF32,
     Fixed<4>, Fixed<256>},
    {"attn.indexer.compressor.wkv", "self_attn.compressor.indexer.kv_proj", Storage::kBf16,
     Fixed<256>, D},
    {"attn.indexer.compressor.wgate", "self_attn.compressor.indexer.gate_proj", Storage::kBf16,
     Fixed<256>, D},
    {"attn.indexer.compressor.norm", "self_attn.compressor.indexer.kv_norm", Storage::kBf16,
     Fixed<128>},
};

constexpr Rule kHcaLayer[] = {
    {"attn.compressor.ape", "self_attn.compressor.position_bias", Storage::kF32, Fixed<128>,
     Fixed<512>},
    {"attn.compressor.wkv", "self_attn.compressor.kv_proj", Storage::kBf16, Fixed<512>, D},
    {"attn.compressor.wgate", "self_attn.compressor.gate_proj", Storage::kBf16, Fixed<512>, D},
    {"attn.compressor.norm", "self_attn.compressor.kv_norm", Storage::kBf16, Fixed<512>},
};

// One row per matrix of a routed expert: original ffn.experts.e.NAME; in the stacked tensor the
// expert's `slices` matrices follow each other, this one at `slice` (w1 rows first, then w3).
struct ExpertRule {
  const char* name;
  const char* transformers;
  int slice;
  int slices;
  Size rows;
  Size cols;
};
constexpr ExpertRule kExpert[] = {
    {"w1", "mlp.experts.gate_up_proj", 0, 2, I, D},
    {"w2", "mlp.experts.down_proj", 0, 1, D, I},
    {"w3", "mlp.experts.gate_up_proj", 1, 2, I, D},
};

// What a drafter has beside its block (model.md 9.2). No transformers spelling.
constexpr Rule kMtpStage[] = {
    {"e_proj", "", Storage::kFp8, D, D},
    {"h_proj", "", Storage::kFp8, D, D},
    {"enorm", "", Storage::kBf16, D},
    {"hnorm", "", Storage::kBf16, D},
    {"norm", "", Storage::kBf16, D},
    {"hc_head_fn", "", Storage::kF32, Fixed<4>, Streams},
    {"hc_head_base", "", Storage::kF32, Fixed<4>},
    {"hc_head_scale", "", Storage::kF32, Fixed<1>},
};
constexpr Rule kDsparkFirst[] = {
    {"main_proj", "", Storage::kFp8, D, Taps},
    {"main_norm", "", Storage::kBf16, D},
};
constexpr Rule kDsparkLast[] = {
    {"norm", "", Storage::kBf16, D},
    {"hc_head_fn", "", Storage::kF32, Fixed<4>, Streams},
    {"hc_head_base", "", Storage::kF32, Fixed<4>},
    {"hc_head_scale", "", Storage::kF32, Fixed<1>},
    {"markov_head.markov_w1", "", Storage::kBf16, V, Rank},
    {"markov_head.markov_w2", "", Storage::kBf16, V, Rank},
    {"confidence_head.proj", "", Storage::kBf16, Fixed<1>, Confidence},
};

int64_t Tiles(int64_t size) {
  return (size + 127) / 128;
}

class Table {
 public:
  explicit Table(const ModelConfig& config) : config_(config) {}

  template <size_t n>
  void Add(const std::string& prefix, const std::string& transformers_prefix, bool transformers,
           const Rule (&rules)[n]) {
    for (const Rule& rule : rules) Add(prefix, transformers_prefix, transformers, rule);
  }

  void AddBlock(const std::string& prefix, const std::string& transformers_prefix,
                bool transformers, LayerKind kind, bool hash_routed) {
    Add(prefix, transformers_prefix, transformers, kEveryLayer);
    if (kind == LayerKind::kCsa) Add(prefix, transformers_prefix, transformers, kCsaLayer);
    if (kind == LayerKind::kHca) Add(prefix, transformers_prefix, transformers, kHcaLayer);
    if (hash_routed) Add(prefix, transformers_prefix, transformers, kHashRouter);
    else Add(prefix, transformers_prefix, transformers, kLearnedRouter);
    for (int e = 0; e < config_.num_experts; ++e) {
      for (const ExpertRule& rule : kExpert) {
        AddExpert(prefix, transformers ? transformers_prefix + rule.transformers : "", e, rule);
      }
    }
  }

  std::vector<ExpectedTensor> Take() { return std::move(tensors_); }

 private:
  void Add(const std::string& prefix, const std::string& transformers_prefix, bool transformers,
           const Rule& rule) {
    const int64_t rows = rule.rows(config_);
    const int64_t cols = rule.cols ? rule.cols(config_) : 0;
    const auto put = [&](const char* suffix, const char* stored_suffix, DType dtype,
                         std::vector<int64_t> shape) -> ExpectedTensor& {
      ExpectedTensor& t = tensors_.emplace_back();
      t.name = prefix + rule.name + suffix;
      t.dtype = dtype;
      t.shape = std::move(shape);
      if (transformers) {
        t.transformers = transformers_prefix + rule.transformers + stored_suffix;
        if (rule.alias) t.alias = transformers_prefix + rule.alias + stored_suffix;
      }
      return t;
    };
    std::vector<int64_t> shape = {rows};
    if (rule.cols) shape.push_back(cols);
    switch (rule.storage) {
      case Storage::kBf16: put(".weight", ".weight", DType::kBF16, shape); break;
      case Storage::kF32: put("", "", DType::kF32, shape); break;
      case Storage::kI64: put("", "", DType::kI64, shape); break;
      case Storage::kFp8:
      case Storage::kWoA: {
        const bool may_be_bf16 = rule.storage == Storage::kWoA;
        put(".weight", ".weight", DType::kF8E4M3, shape).may_be_bf16 = may_be_bf16;
        put(".scale", ".weight_scale_inv", DType::kF8E8M0, {Tiles(rows), Tiles(cols)}).may_be_bf16 =
            may_be_bf16;
        break;
      }
    }
  }

  void AddExpert(const std::string& prefix, const std::string& stored, int e,
                 const ExpertRule& rule) {
    const bool fp8 = config_.expert_format == ExpertFormat::kFp8;
    const int64_t rows = rule.rows(config_);
    const int64_t cols = rule.cols(config_);
    for (const bool scale : {false, true}) {
      ExpectedTensor& t = tensors_.emplace_back();
      t.name =
          fmt::format("{}ffn.experts.{}.{}.{}", prefix, e, rule.name, scale ? "scale" : "weight");
      if (scale) {
        t.dtype = DType::kF8E8M0;
        t.shape = fp8 ? std::vector{Tiles(rows), Tiles(cols)} : std::vector{rows, cols / 32};
      } else {
        t.dtype = fp8 ? DType::kF8E4M3 : DType::kI8;
        t.shape = {rows, fp8 ? cols : cols / 2};
      }
      if (stored.empty()) continue;
      t.transformers = stored + (scale ? "_scale_inv" : "");
      t.part = e * rule.slices + rule.slice;
      t.parts = config_.num_experts * rule.slices;
    }
  }

  const ModelConfig& config_;
  std::vector<ExpectedTensor> tensors_;
};

}  // namespace

int64_t ExpectedTensor::bytes() const {
  int64_t bytes = ElementBytes(dtype);
  for (const int64_t size : shape) bytes *= size;
  return bytes;
}

std::vector<int64_t> ExpectedTensor::transformers_shape(int num_experts) const {
  if (parts == 1 && transformers.find(".experts.") == std::string::npos) return shape;
  return {num_experts, parts / num_experts * shape[0], shape[1]};
}

int DrafterStages(const ModelConfig& config) {
  if (!config.dspark()) return config.num_mtp_layers;
  const int trailing = static_cast<int>(config.compress_ratios.size()) - config.num_layers;
  return trailing > 0 ? trailing : 3;
}

std::vector<ExpectedTensor> ExpectedTensors(const ModelConfig& config, int drafter_stages) {
  Table table(config);
  table.Add("", "", true, kBottom);
  for (int i = 0; i < config.num_layers; ++i) {
    table.AddBlock(fmt::format("layers.{}.", i), fmt::format("model.layers.{}.", i), true,
                   config.kind(i), config.hash_routed(i));
  }
  table.Add("", "", true, kTop);
  for (int stage = 0; stage < drafter_stages; ++stage) {
    const std::string prefix = fmt::format("mtp.{}.", stage);
    table.AddBlock(prefix, "", false, LayerKind::kSwa, false);
    if (!config.dspark()) table.Add(prefix, "", false, kMtpStage);
    if (config.dspark() && stage == 0) table.Add(prefix, "", false, kDsparkFirst);
    if (config.dspark() && stage == drafter_stages - 1) table.Add(prefix, "", false, kDsparkLast);
  }
  return table.Take();
}

std::vector<ExpectedTensor> ExpectedTensors(const ModelConfig& config) {
  return ExpectedTensors(config, DrafterStages(config));
}

}  // namespace fathom
