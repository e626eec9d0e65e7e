// Shared by the tests of this folder: temporary directories and small checkpoints made to order.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/safetensors.h"
#include "model/tensor_names.h"

namespace fathom::testing {

// A fresh directory, removed with everything in it at the end.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "fathom-XXXXXX").string();
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

inline std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

inline void WriteAll(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string DemoDirectory() {
  return FATHOM_SOURCE_DIR "/models/demo";
}

// In the shared folder: FATHOM_SHARED, else ../shared beside the source tree.
inline std::string SharedPath(const std::string& path) {
  const char* shared = std::getenv("FATHOM_SHARED");
  return std::string(shared ? shared : FATHOM_SOURCE_DIR "/../shared") + "/" + path;
}

// The demo's config with the smallest legal sizes and every kind of layer: ratios [0, 4, 128], one
// hash layer, two experts.
inline nlohmann::json TinyConfigJson() {
  nlohmann::json config = nlohmann::json::parse(ReadAll(DemoDirectory() + "/config.json"));
  config.update({{"vocab_size", 16},
                 {"hidden_size", 32},
                 {"num_hidden_layers", 3},
                 {"num_attention_heads", 2},
                 {"q_lora_rank", 8},
                 {"o_lora_rank", 8},
                 {"o_groups", 2},
                 {"compress_ratios", {0, 4, 128}},
                 {"index_n_heads", 2},
                 {"index_topk", 4},
                 {"n_routed_experts", 2},
                 {"num_experts_per_tok", 1},
                 {"moe_intermediate_size", 32},
                 {"num_hash_layers", 1}});
  return config;
}

inline ModelConfig ToConfig(const nlohmann::json& json) {
  auto config = ParseModelConfig(json.dump(), "config.json");
  EXPECT_TRUE(config) << config.error().message;
  return config.value_or(ModelConfig{});
}

inline ModelConfig TinyConfig() {
  return ToConfig(TinyConfigJson());
}

struct OwnedTensor {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::string data;
};
using TensorsByName = std::map<std::string, OwnedTensor>;  // by stored name

// All tensors of `config` with `stages` drafter stages under their original names. Every byte of a
// tensor is the same, a finite value that differs from its neighbours'; tid2eid is zero.
inline TensorsByName MakeTensors(const ModelConfig& config, int stages = 0) {
  TensorsByName tensors;
  int i = 0;
  for (const ExpectedTensor& expected : ExpectedTensors(config, stages)) {
    const char value = expected.dtype == DType::kI64 ? 0 : static_cast<char>(0x21 + i++ % 64);
    tensors[expected.name] = {expected.dtype, expected.shape,
                              std::string(static_cast<size_t>(expected.bytes()), value)};
  }
  return tensors;
}

// The same values under transformers names, experts stacked, drafters dropped.
inline TensorsByName ToTransformers(const ModelConfig& config, const TensorsByName& tensors) {
  TensorsByName result;
  for (const ExpectedTensor& expected : ExpectedTensors(config, 0)) {
    OwnedTensor& stored = result[expected.transformers];
    const std::string& part = tensors.at(expected.name).data;
    stored.dtype = expected.dtype;
    stored.shape = expected.transformers_shape(config.num_experts);
    stored.data.resize(part.size() * static_cast<size_t>(expected.parts));
    std::memcpy(stored.data.data() + part.size() * static_cast<size_t>(expected.part), part.data(),
                part.size());
  }
  return result;
}

inline void WriteTensors(const std::string& path, const TensorsByName& tensors) {
  std::vector<TensorToWrite> list;
  for (const auto& [name, tensor] : tensors) {
    list.push_back({name, tensor.dtype, tensor.shape, tensor.data.data()});
  }
  const Status status = WriteSafeTensors(path, list);
  EXPECT_TRUE(status) << status.error().message;
}

// Writes DIRECTORY/model.safetensors.
inline void WriteSingle(const std::string& directory, const TensorsByName& tensors) {
  WriteTensors(directory + "/model.safetensors", tensors);
}

// Writes a.safetensors and b.safetensors, names alternating, and their index.
inline nlohmann::json WriteSharded(const std::string& directory, const TensorsByName& tensors) {
  TensorsByName half[2];
  nlohmann::json index = {{"metadata", {{"total_size", 0}}},
                          {"weight_map", nlohmann::json::object()}};
  size_t total = 0;
  int i = 0;
  for (const auto& [name, tensor] : tensors) {
    index["weight_map"][name] = i % 2 == 0 ? "a.safetensors" : "b.safetensors";
    half[i++ % 2][name] = tensor;
    total += tensor.data.size();
  }
  index["metadata"]["total_size"] = total;
  WriteTensors(directory + "/a.safetensors", half[0]);
  WriteTensors(directory + "/b.safetensors", half[1]);
  WriteAll(directory + "/model.safetensors.index.json", index.dump());
  return index;
}

}  // namespace fathom::testing
