// dump: runs a list of token ids and writes named intermediates (design: interfaces.md, `dump`).
#pragma once

#include <string>
#include <vector>

#include "core/status.h"
#include "engine/replay.h"

namespace fathom {

struct DumpRequest {
  std::vector<TokenId> ids;
  std::vector<std::string> tensors = {"logits"};  // "logits" or names of TapNames()
  int64_t last = 0;                               // only the last N positions; 0: all
  int64_t chunk = 0;  // tokens per prefill step; 0: as many as a step holds
  ops::Numerics numerics = ops::Numerics::kProduct;
  CacheOptions cache;
  MemorySource memory = Reservation::Make;  // where the backend computes
};

struct DumpedTensor {
  std::string name;
  std::vector<int64_t> shape;  // [positions, ...]
  DType dtype = DType::kF32;   // kF32, or kI32 for selections and experts
  std::vector<float> f32;
  std::vector<int32_t> i32;
};

// Every name that can be asked for, "layers.3.attn.out" written as "layers.*.attn.out".
std::vector<std::string> TapNames();

// Runs the ids and collects the tensors in the order asked for. kInvalidArgument names an unknown
// tensor, an empty list of ids or an id outside the vocabulary.
Expected<std::vector<DumpedTensor>> Dump(const ModelConfig& config, const Weights& weights,
                                         ops::Backend& backend, const DumpRequest& request);

}  // namespace fathom
