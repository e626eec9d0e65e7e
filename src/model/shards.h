// The files of a checkpoint directory and the tensors stored in them, before anything is known
// about the model: the index and the shards agree, or it is an error.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "core/status.h"
#include "model/safetensors.h"

namespace fathom {

struct ShardSet {
  std::string origin;  // the index or the single file, for messages
  std::vector<SafeTensorsFile> files;
  std::unordered_map<std::string, const TensorInfo*> tensors;  // by stored name
  int64_t total_bytes = 0;
};

// See OpenCheckpoint for the errors. Index and shards may disagree about one kind of tensor: the
// scale of attn.wo_a, which some re-quantised repositories dropped from one of the two
// (model.md 9.3).
Expected<ShardSet> OpenShards(const std::string& directory);

}  // namespace fathom
