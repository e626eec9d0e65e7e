// Weights: every tensor of the main model, bound to the ops' operand types.
//
// Matrices stay where the checkpoint is mapped (or in their packed form) at stored precision; small
// vectors (norms, sinks, ape, biases, hyper-connection parameters) are float32 copies.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/status.h"
#include "model/config.h"
#include "ops/experts/experts.h"
#include "ops/hyper_connection/hyper_connection.h"
#include "ops/linear/linear.h"

namespace fathom {

// Movable, not copyable: `site` points into the three vectors.
struct HyperConnectionWeights {
  HyperConnectionWeights() = default;
  HyperConnectionWeights(HyperConnectionWeights&&) = default;
  HyperConnectionWeights& operator=(HyperConnectionWeights&&) = default;

  std::vector<float> fn, base, scale;
  ops::HyperConnectionSite site;
};

// One compressor: wkv and wgate [coff*e, D] bf16, ape [m, coff*e], norm [e].
struct CompressorWeights {
  ops::LinearWeight wkv, wgate;
  std::vector<float> ape, norm;
};

struct LayerWeights {
  std::vector<float> attn_norm, ffn_norm;  // [D]
  HyperConnectionWeights hc_attn, hc_ffn;
  std::vector<float> attn_sink;  // [H]
  ops::LinearWeight wq_a, wq_b, wkv, wo_a, wo_b;
  std::vector<float> q_norm, kv_norm;
  CompressorWeights compressor;                      // CSA and HCA
  ops::LinearWeight index_wq_b, index_weights_proj;  // CSA
  CompressorWeights index_compressor;                // CSA
  ops::LinearWeight gate;                            // [E, D] bf16
  std::vector<float> gate_bias;                      // [E], learned layers
  const int64_t* tid2eid = nullptr;                  // [V, k], hash layers
  std::vector<ops::ExpertWeights> experts;           // [E]
  ops::ExpertWeights shared;
};

struct Weights {
  const bf16_t* embed = nullptr;  // [V, D]
  ops::LinearWeight head;         // [V, D] bf16
  std::vector<float> norm;        // [D]
  HyperConnectionWeights hc_head;
  std::vector<LayerWeights> layers;
  int64_t tensor_count = 0;       // in the checkpoint, drafters included
  int64_t total_bytes = 0;        // tensor payload, as metadata.total_size counts
  std::shared_ptr<void> storage;  // keeps the mappings (or generated values) alive

  // Every matrix of the main model, for packing, uploading and accounting.
  std::vector<ops::LinearWeight*> Matrices();
};

// kDummy: config.json's shapes with generated values; the directory needs no weights.
enum class LoadFormat { kAuto, kDummy };

struct LoadOptions {
  LoadFormat format = LoadFormat::kAuto;
  uint64_t seed = 0;         // kDummy: values are a function of (seed, tensor name, index)
  bool check_finite = true;  // refuse NaN or infinite values by tensor name
};

// Reads DIR/model.safetensors.index.json (or DIR/model.safetensors), original or transformers
// names. Every tensor is accounted for: missing, extra, misshapen, mistyped, truncated or
// overlapping ones are refused by name. Drafter tensors (mtp.*) are checked and left unbound.
// config.expert_format is set from the tensors when the file left it open.
// Nothing is read twice: headers, then each float tensor once for the finite check (packed FP4 has
// no NaN and is not touched).
// kNotFound: no weights in the directory; kDataLoss: whatever else is wrong with them.
Expected<Weights> LoadWeights(const std::string& directory, ModelConfig& config,
                              const LoadOptions& options);

// Packs every matrix for the CPU backend, on the pool's threads.
void PackForCpu(Weights& weights, ThreadPool& pool);

}  // namespace fathom
