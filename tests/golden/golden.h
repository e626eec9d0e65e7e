// Reference outputs of a checkpoint: prompts, logits and streams computed by transformers in
// float32 from the dequantised weights (tests/golden/README.md).
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/ids.h"
#include "core/thread_pool.h"
#include "engine/replay.h"
#include "model/config.h"
#include "model/safetensors.h"
#include "model/weights.h"
#include "ops/backend.h"

namespace fathom::golden {

struct Prompt {
  std::string name;
  std::vector<TokenId> prompt;
  std::vector<TokenId> greedy;       // continuation, the end token included
  std::vector<int64_t> logits_rows;  // positions of the rows of logits
  std::vector<float> logits;         // [rows, V]
  std::vector<int64_t> stream_rows;  // positions of the rows of streams
  std::vector<float> streams;        // [layers, rows, 4*D]; may be empty
};

// A checkpoint ready for Replay, with its reference outputs.
struct Model {
  std::string name;
  ModelConfig config;
  Weights weights;
  ThreadPool threads;
  std::unique_ptr<ops::Backend> backend;
  MemorySource memory = Reservation::Make;  // where the backend computes
  std::vector<Prompt> prompts;
};

enum class Device { kCpu, kCuda };  // kCuda: in builds with FATHOM_CUDA

// The demo checkpoint and the trimmed outputs in tests/golden. Ends the test program on an error.
Model& Demo(Device device = Device::kCpu);
// The random checkpoint of the shared fixtures, or null when they are not there (never null in CI).
Model* RandomPro(Device device = Device::kCpu);

// The source tree: FATHOM_SOURCE, else where it was built.
std::string SourceDirectory();

// Path of the shared fixtures: FATHOM_SHARED, else ../shared beside the source tree.
std::string SharedDirectory();

// A tensor's values as float32 (F32, BF16, F16).
std::vector<float> Floats(const TensorInfo& tensor);

}  // namespace fathom::golden
