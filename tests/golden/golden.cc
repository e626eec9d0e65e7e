#include "golden/golden.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#if FATHOM_CUDA
#include "engine/cuda_executor.h"
#include "model/cuda_weights.h"
#include "ops/cuda/cuda_backend.h"
#endif

namespace fathom::golden {
namespace {

float F16ToF32(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -24)
                              : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return (bits & 0x8000) ? -magnitude : magnitude;
}

template <class T>
T Need(Expected<T> value) {
  if (value.has_value()) return std::move(*value);
  std::fprintf(stderr, "%s\n", value.error().message.c_str());
  std::exit(1);
}

void Prepare(Model& model, Device device) {
#if FATHOM_CUDA
  if (device == Device::kCuda) {
    auto backend = Need(ops::CudaBackend::Make());
    if (const Status status = UploadForCuda(model.weights, model.config, *backend); !status) {
      std::fprintf(stderr, "%s\n", status.error().message.c_str());
      std::exit(1);
    }
    model.backend = std::move(backend);
    model.memory = ReserveCuda;
    return;
  }
#endif
  PackForCpu(model.weights, model.threads);
  model.backend = ops::MakeCpuBackend(model.threads);
}

void Load(Model& model, Device device, const std::string& directory, const std::string& json_path,
          const std::string& tensor_path) {
  model.name = std::filesystem::path(directory).filename();
  model.config = Need(LoadModelConfig(directory));
  model.weights = Need(LoadWeights(directory, model.config, {}));
  Prepare(model, device);
  std::ifstream json_file(json_path);
  const auto json = nlohmann::json::parse(json_file);
  const SafeTensorsFile file = Need(SafeTensorsFile::Open(tensor_path));
  for (const auto& entry : json) {
    Prompt prompt;
    prompt.name = entry.at("name");
    prompt.prompt = entry.at("prompt_ids").get<std::vector<TokenId>>();
    if (entry.contains("greedy_ids"))
      prompt.greedy = entry["greedy_ids"].get<std::vector<TokenId>>();
    const TensorInfo* logits = file.Find(prompt.name + ".logits");
    prompt.logits = Floats(*logits);
    if (entry.contains("logits_rows")) {
      prompt.logits_rows = entry["logits_rows"].get<std::vector<int64_t>>();
    } else {
      for (int64_t r = 0; r < logits->shape[0]; ++r) {
        prompt.logits_rows.push_back(entry.at("logits_from").get<int64_t>() + r);
      }
    }
    if (const TensorInfo* streams = file.Find(prompt.name + ".streams")) {
      prompt.streams = Floats(*streams);
      if (entry.contains("stream_rows")) {
        prompt.stream_rows = entry["stream_rows"].get<std::vector<int64_t>>();
      } else {
        for (int64_t r = 0; r < streams->shape[1]; ++r) prompt.stream_rows.push_back(r);
      }
    }
    model.prompts.push_back(std::move(prompt));
  }
}

}  // namespace

std::vector<float> Floats(const TensorInfo& tensor) {
  const int64_t n = tensor.bytes / ElementBytes(tensor.dtype);
  std::vector<float> out(n);
  for (int64_t i = 0; i < n; ++i) {
    const std::byte* at = tensor.data + i * ElementBytes(tensor.dtype);
    uint16_t half = 0;
    std::memcpy(&half, at, 2);
    switch (tensor.dtype) {
      case DType::kF32: std::memcpy(&out[i], at, 4); break;
      case DType::kBF16: out[i] = Bf16ToF32(half); break;
      case DType::kF16: out[i] = F16ToF32(half); break;
      default: std::fprintf(stderr, "%s: no float tensor\n", tensor.name.c_str()); std::exit(1);
    }
  }
  return out;
}

std::string SourceDirectory() {
  if (const char* path = std::getenv("FATHOM_SOURCE")) return path;
  return FATHOM_SOURCE_DIR;
}

std::string SharedDirectory() {
  if (const char* path = std::getenv("FATHOM_SHARED")) return path;
  return SourceDirectory() + "/../shared";
}

Model& Demo(Device device) {
  // Never destroyed: the CUDA runtime may be gone when statics are.
  static auto& models = *new std::map<Device, std::unique_ptr<Model>>;
  std::unique_ptr<Model>& model = models[device];
  if (model == nullptr) {
    model = std::make_unique<Model>();
    const std::string root = SourceDirectory();
    Load(*model, device, root + "/models/demo", root + "/tests/golden/demo.json",
         root + "/tests/golden/demo.safetensors");
  }
  return *model;
}

Model* RandomPro(Device device) {
  // Never destroyed: the CUDA runtime may be gone when statics are.
  static auto& models = *new std::map<Device, std::unique_ptr<Model>>;
  const std::string directory = SharedDirectory() + "/models/random-pro";
  if (!std::filesystem::exists(directory + "/config.json")) {
    if (std::getenv("CI") != nullptr) {
      std::fprintf(stderr, "%s is missing; CI needs it\n", directory.c_str());
      std::exit(1);
    }
    return nullptr;
  }
  std::unique_ptr<Model>& model = models[device];
  if (model == nullptr) {
    model = std::make_unique<Model>();
    Load(*model, device, directory, directory + "/golden.json", directory + "/golden.safetensors");
  }
  return model.get();
}

}  // namespace fathom::golden
