// The tensors of a DeepSeek-V4 checkpoint as data: names, dtypes and shapes from the config alone
// (model.md 9.2), with the transformers spelling of each (model.md 9.6).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "model/config.h"

namespace fathom {

struct ExpectedTensor {
  std::string name;  // original spelling
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  // attn.wo_a may be stored BF16 without its scale (model.md 9.3); set on weight and scale.
  bool may_be_bf16 = false;
  // Transformers spelling; empty for mtp.*, which transformers drops. `alias` is another one in
  // use, or empty. Experts are stacked there: this tensor is slice `part` of `parts` equal slices
  // of the stored tensor's rows.
  std::string transformers;
  std::string alias;
  int part = 0;
  int parts = 1;

  int64_t bytes() const;  // payload as stored, what metadata.total_size counts
  // Shape of the stored transformers tensor: [E, rows, cols] when stacked.
  std::vector<int64_t> transformers_shape(int num_experts) const;
};

// The drafter stages the config promises: DSpark one per trailing 0 of compress_ratios (else 3),
// MTP num_nextn_predict_layers. What the checkpoint holds may differ (model.md 8.3).
int DrafterStages(const ModelConfig& config);

// Every tensor, in the model's order: embedding, layers, head, then mtp.0 .. mtp.stages-1.
// ExpertFormat::kUnknown counts as FP4.
std::vector<ExpectedTensor> ExpectedTensors(const ModelConfig& config, int drafter_stages);
std::vector<ExpectedTensor> ExpectedTensors(const ModelConfig& config);

}  // namespace fathom
