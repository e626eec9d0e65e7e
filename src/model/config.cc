#include "model/config.h"

#include <algorithm>

#include "model/config_reader.h"
#include "model/strict_json.h"

namespace fathom {
namespace {

using nlohmann::json;

// Upper bounds keep every product of sizes far below 2^63 and refuse absurd files before memory is
// asked for; each is at least eight times the largest released model.
constexpr int64_t kMaxVocabulary = int64_t{1} << 24;
constexpr int64_t kMaxWidth = int64_t{1} << 17;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxExperts = 1 << 14;
constexpr int64_t kMaxDrafterStages = 16;
// The f32 position of RoPE is exact up to 2^24 (model.md 4.1).
constexpr int64_t kMaxPositions = int64_t{1} << 24;
constexpr int64_t kFp4Block = 32;

void CheckArchitecture(ConfigReader& in) {
  if (const json* names = in.Raw("architectures")) {
    if (*names != json::array({"DeepseekV4ForCausalLM"})) {
      in.Refuse("architectures", fmt::format("is {}, only [\"DeepseekV4ForCausalLM\"] is supported",
                                             ShortJson(*names)));
    }
  }
  in.Equals("model_type", "deepseek_v4");
}

// What the kernels fix, and the switches of which V4 has one setting (model.md 1.1, 1.4).
void CheckConstants(ConfigReader& in) {
  in.Equals("num_key_value_heads", 1);
  in.Equals("head_dim", 512);
  in.Equals("qk_rope_head_dim", 64);
  in.Equals("sliding_window", 128);
  in.Equals("index_head_dim", 128);
  in.Equals("hc_mult", 4);
  in.Equals("n_shared_experts", 1);
  in.Equals("scoring_func", "sqrtsoftplus");
  in.Equals("topk_method", "noaux_tc");
  in.Equals("norm_topk_prob", true);
  in.Equals("hidden_act", "silu");
  in.EqualsIfPresent("tie_word_embeddings", false);
  in.EqualsIfPresent("attention_bias", false);
}

void ReadYarn(ConfigReader& in, ModelConfig& config) {
  const json* object = in.Raw("rope_scaling");
  if (object == nullptr) return;
  if (!object->is_object()) {
    return in.Refuse("rope_scaling", fmt::format("is {}, must be an object", ShortJson(*object)));
  }
  ConfigReader yarn(*object, in.origin(), "rope_scaling.");
  yarn.Equals(yarn.Has("rope_type") ? "rope_type" : "type", "yarn");
  yarn.EqualsIfPresent("type", "yarn");
  config.yarn.factor = yarn.Number("factor", 1, 4096);
  config.yarn.original_max_position =
      static_cast<double>(yarn.Int("original_max_position_embeddings", 1, kMaxPositions));
  config.yarn.beta_fast = yarn.Number("beta_fast", 1e-3, 4096);
  config.yarn.beta_slow = yarn.Number("beta_slow", 1e-3, 4096);
  if (!yarn.failed() && config.yarn.beta_fast <= config.yarn.beta_slow) {
    yarn.Refuse("beta_fast", fmt::format("is {}, must be above beta_slow {}", config.yarn.beta_fast,
                                         config.yarn.beta_slow));
  }
  in.Absorb(yarn);
}

void CheckQuantization(ConfigReader& in) {
  const json* object = in.Raw("quantization_config");
  if (object == nullptr) return;
  if (!object->is_object()) {
    return in.Refuse("quantization_config",
                     fmt::format("is {}, must be an object", ShortJson(*object)));
  }
  ConfigReader quant(*object, in.origin(), "quantization_config.");
  quant.Equals("quant_method", "fp8");
  quant.Equals("fmt", "e4m3");
  quant.Equals("scale_fmt", "ue8m0");
  quant.Equals("activation_scheme", "dynamic");
  quant.Equals("weight_block_size", json::array({128, 128}));
  in.Absorb(quant);
}

void ReadExpertFormat(ConfigReader& in, ModelConfig& config) {
  if (!in.Has("expert_dtype")) return;  // the dtype of experts.*.w1.weight decides (model.md 1.1)
  const json& value = *in.Raw("expert_dtype");
  if (value == "fp4") {
    config.expert_format = ExpertFormat::kFp4;
  } else if (value == "fp8") {
    config.expert_format = ExpertFormat::kFp8;
  } else {
    in.Refuse("expert_dtype", fmt::format("is {}, must be \"fp4\" or \"fp8\"", ShortJson(value)));
  }
}

void ReadSizes(ConfigReader& in, ModelConfig& config) {
  config.vocab_size = in.Int("vocab_size", 2, kMaxVocabulary);
  config.hidden_size = in.Int("hidden_size", kFp4Block, kMaxWidth);
  config.num_layers = static_cast<int>(in.Int("num_hidden_layers", 1, kMaxLayers));
  config.num_heads = static_cast<int>(in.Int("num_attention_heads", 1, kMaxHeads));
  config.q_lora_rank = in.Int("q_lora_rank", 1, kMaxWidth);
  config.o_lora_rank = in.Int("o_lora_rank", 1, kMaxWidth);
  config.o_groups = static_cast<int>(in.Int("o_groups", 1, kMaxHeads));
  config.index_heads = static_cast<int>(in.Int("index_n_heads", 1, kMaxHeads));
  config.index_top_k = static_cast<int>(in.Int("index_topk", 1, 1 << 20));
  config.num_hash_layers = static_cast<int>(in.Int("num_hash_layers", 0, kMaxLayers));
  config.num_experts = static_cast<int>(in.Int("n_routed_experts", 1, kMaxExperts));
  config.experts_per_token = static_cast<int>(in.Int("num_experts_per_tok", 1, kMaxExperts));
  config.expert_width = in.Int("moe_intermediate_size", kFp4Block, kMaxWidth);
  config.max_position_embeddings = in.Int("max_position_embeddings", 1, kMaxPositions);
  config.sinkhorn_iterations = static_cast<int>(in.Int("hc_sinkhorn_iters", 1, 1000));
  config.bos_token = static_cast<TokenId>(in.Int("bos_token_id", 0, kMaxVocabulary));
  config.eos_token = static_cast<TokenId>(in.Int("eos_token_id", 0, kMaxVocabulary));
}

void ReadNumbers(ConfigReader& in, ModelConfig& config) {
  config.routed_scaling_factor = static_cast<float>(in.Number("routed_scaling_factor", 1e-6, 1e6));
  config.swiglu_limit = static_cast<float>(in.Number("swiglu_limit", 1e-3, 1e6));
  config.rms_norm_eps = static_cast<float>(in.Number("rms_norm_eps", 1e-30, 0.1));
  config.hc_eps = static_cast<float>(in.Number("hc_eps", 1e-30, 0.1));
  config.rope_theta = in.Number("rope_theta", 1.001, 1e12);
  config.compress_rope_theta = in.Number("compress_rope_theta", 1.001, 1e12);
}

// Relations among keys that are each sane.
void CheckRelations(ConfigReader& in, const ModelConfig& config) {
  if (in.failed()) return;
  const auto multiple = [&](const char* key, int64_t value, int64_t of, const char* why) {
    if (value % of != 0) in.Refuse(key, fmt::format("is {}, must be {}", value, why));
  };
  multiple("hidden_size", config.hidden_size, kFp4Block, "a multiple of 32");
  multiple("moe_intermediate_size", config.expert_width, kFp4Block, "a multiple of 32");
  if (config.num_heads % config.o_groups != 0) {
    in.Refuse("o_groups", fmt::format("is {}, must divide num_attention_heads {}", config.o_groups,
                                      config.num_heads));
  }
  if (config.experts_per_token > config.num_experts) {
    in.Refuse("num_experts_per_tok", fmt::format("is {}, above n_routed_experts {}",
                                                 config.experts_per_token, config.num_experts));
  }
  if (config.num_hash_layers > config.num_layers) {
    in.Refuse("num_hash_layers", fmt::format("is {}, above num_hidden_layers {}",
                                             config.num_hash_layers, config.num_layers));
  }
  for (const auto& [key, id] :
       {std::pair("bos_token_id", config.bos_token), std::pair("eos_token_id", config.eos_token)}) {
    if (id >= config.vocab_size) {
      in.Refuse(key, fmt::format("is {}, vocab_size is {}", id, config.vocab_size));
    }
  }
}

// One entry per main layer, then one 0 per drafter stage (model.md 1.3).
void ReadSchedule(ConfigReader& in, ModelConfig& config) {
  config.compress_ratios = in.Ints("compress_ratios", 0, 128);
  if (in.failed()) return;
  const int64_t entries = static_cast<int64_t>(config.compress_ratios.size());
  if (entries < config.num_layers || entries > config.num_layers + kMaxDrafterStages) {
    return in.Refuse("compress_ratios",
                     fmt::format("has {} entries for num_hidden_layers {} (one each, then at most "
                                 "{} for drafter stages)",
                                 entries, config.num_layers, kMaxDrafterStages));
  }
  for (int64_t i = 0; i < entries; ++i) {
    const int ratio = config.compress_ratios[i];
    if (i < config.num_layers ? ratio != 0 && ratio != 4 && ratio != 128 : ratio != 0) {
      return in.Refuse("compress_ratios",
                       fmt::format("entry {} is {}, must be {}", i, ratio,
                                   i < config.num_layers ? "0, 4 or 128" : "0 (drafter stage)"));
    }
  }
}

void ReadDrafter(ConfigReader& in, ModelConfig& config) {
  if (in.Has("num_nextn_predict_layers")) {
    config.num_mtp_layers =
        static_cast<int>(in.Int("num_nextn_predict_layers", 0, kMaxDrafterStages));
  }
  if (!in.Has("dspark_block_size")) return;
  config.dspark_block_size = static_cast<int>(in.Int("dspark_block_size", 1, 64));
  config.dspark_markov_rank = static_cast<int>(in.Int("dspark_markov_rank", 1, kMaxWidth));
  config.dspark_noise_token =
      static_cast<TokenId>(in.Int("dspark_noise_token_id", 0, kMaxVocabulary));
  config.dspark_target_layers = in.Ints("dspark_target_layer_ids", 0, kMaxLayers);
  if (in.failed()) return;
  const std::vector<int>& layers = config.dspark_target_layers;
  if (layers.empty() || layers.size() > kMaxDrafterStages || layers.back() >= config.num_layers ||
      !std::is_sorted(layers.begin(), layers.end(), std::less_equal<int>())) {
    in.Refuse("dspark_target_layer_ids",
              fmt::format("must be 1 to {} ascending layers below num_hidden_layers {}",
                          kMaxDrafterStages, config.num_layers));
  }
  if (config.dspark_noise_token >= config.vocab_size) {
    in.Refuse("dspark_noise_token_id",
              fmt::format("is {}, vocab_size is {}", config.dspark_noise_token, config.vocab_size));
  }
}

}  // namespace

int ModelConfig::count(LayerKind kind_wanted) const {
  int n = 0;
  for (int layer = 0; layer < num_layers; ++layer) n += kind(layer) == kind_wanted;
  return n;
}

Expected<ModelConfig> ParseModelConfig(std::string_view text, std::string_view origin) {
  FATHOM_ASSIGN(const json document, ParseStrictJson(text, origin));
  if (!document.is_object()) {
    return Fail(Code::kInvalidArgument, "{}: is {}, must be an object", origin,
                ShortJson(document));
  }
  ConfigReader in(document, origin);
  ModelConfig config;
  CheckArchitecture(in);  // first: of another model nothing else is worth a message
  config.model_type = "deepseek_v4";
  CheckConstants(in);
  ReadSizes(in, config);
  ReadNumbers(in, config);
  ReadYarn(in, config);
  CheckQuantization(in);
  ReadExpertFormat(in, config);
  CheckRelations(in, config);
  ReadSchedule(in, config);
  ReadDrafter(in, config);
  FATHOM_TRY(in.Finish());
  return config;
}

Expected<ModelConfig> LoadModelConfig(const std::string& directory) {
  const std::string path = directory + "/config.json";
  FATHOM_ASSIGN(const std::string text, ReadTextFile(path, 16 << 20));
  return ParseModelConfig(text, path);
}

}  // namespace fathom
