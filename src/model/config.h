// ModelConfig: config.json read once, validated, immutable (model.md 1).
//
// Every key the computation needs must be there and sane; a wrong one is refused by name. The layer
// schedule, ranks and counts are data: nothing of one released model is assumed. What V4's kernels
// do fix is refused otherwise: head_dim 512, qk_rope_head_dim 64, sliding_window 128,
// index_head_dim 128, hc_mult 4, ratios 0, 4 and 128, one shared expert.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/ids.h"
#include "core/status.h"
#include "ops/norm_rope_insert/rope.h"

namespace fathom {

// Attention of a layer: SWA window only (ratio 0); CSA (c4a) 4 tokens a row, indexer top-k;
// HCA (c128a) 128 tokens a row, all attended.
enum class LayerKind : uint8_t { kSwa, kCsa, kHca };

enum class ExpertFormat : uint8_t { kUnknown, kFp4, kFp8 };  // kUnknown: the checkpoint tells

struct ModelConfig {
  std::string model_type;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;  // D
  int num_layers = 0;       // main layers
  int num_heads = 0;        // H
  int64_t q_lora_rank = 0;  // q
  int64_t o_lora_rank = 0;  // R
  int o_groups = 0;         // G
  int index_heads = 0;      // Hi
  int index_top_k = 0;
  std::vector<int>
      compress_ratios;  // all entries of the file; the first num_layers are main layers
  int num_hash_layers = 0;
  int num_experts = 0;        // E
  int experts_per_token = 0;  // k
  int64_t expert_width = 0;   // I
  float routed_scaling_factor = 1.0f;
  float swiglu_limit = 10.0f;
  float rms_norm_eps = 1e-6f;
  float hc_eps = 1e-6f;
  int sinkhorn_iterations = 20;
  double rope_theta = 10000;
  double compress_rope_theta = 160000;
  ops::YarnParams yarn;
  int64_t max_position_embeddings = 0;
  int num_mtp_layers = 0;     // num_nextn_predict_layers; the tensors decide how many stages exist
  int dspark_block_size = 0;  // > 0: the checkpoint carries a DSpark drafter
  int dspark_markov_rank = 0;
  std::vector<int> dspark_target_layers;  // main layers the drafter taps; its main_proj joins them
  TokenId dspark_noise_token = 0;
  TokenId bos_token = 0;
  TokenId eos_token = 1;
  ExpertFormat expert_format = ExpertFormat::kUnknown;

  LayerKind kind(int layer) const {
    const int ratio = compress_ratios[layer];
    return ratio == 4 ? LayerKind::kCsa : ratio == 128 ? LayerKind::kHca : LayerKind::kSwa;
  }
  bool hash_routed(int layer) const { return layer < num_hash_layers; }
  int count(LayerKind kind) const;  // among the main layers
  bool dspark() const { return dspark_block_size > 0; }
};

// Refuses with kInvalidArgument; Error::param is the key at fault ("rope_scaling.factor").
// `origin` names the text in errors (usually the path of config.json).
Expected<ModelConfig> ParseModelConfig(std::string_view json, std::string_view origin);

// Reads DIRECTORY/config.json. kNotFound when it is not there.
Expected<ModelConfig> LoadModelConfig(const std::string& directory);

}  // namespace fathom
