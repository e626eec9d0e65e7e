// Checkpoint: the shards of one model directory, mapped read-only and accounted for tensor by
// tensor against what the config promises (model.md 9).
//
//   FATHOM_ASSIGN(TensorSet set, OpenCheckpoint(directory, config));
//   const TensorInfo& embed = set.Get("embed.weight");
//
// No weight is read here: only headers are.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>

#include "core/status.h"
#include "model/config.h"
#include "model/safetensors.h"

namespace fathom {

// The tensors of the main model under their original names, whatever the files call them.
// TensorInfo::name is the stored name, for messages.
struct TensorSet {
  std::unordered_map<std::string, TensorInfo> tensors;
  int64_t tensor_count = 0;       // stored tensors, drafters included
  int64_t total_bytes = 0;        // their payload
  std::shared_ptr<void> storage;  // keeps the data alive

  const TensorInfo* Find(const std::string& name) const;
  const TensorInfo& Get(const std::string& name) const;  // must be there
};

// Opens DIRECTORY/model.safetensors.index.json, else DIRECTORY/model.safetensors. Sets
// config.expert_format from the tensors when the file left it open.
// Transformers spelling: BF16 and F32 stand for each other, as that library saves them.
// kNotFound: neither is there. kDataLoss, naming the tensor: a shard that is missing or broken, a
// tensor missing, extra, misshapen, mistyped or in another shard than the index says.
Expected<TensorSet> OpenCheckpoint(const std::string& directory, ModelConfig& config);

}  // namespace fathom
