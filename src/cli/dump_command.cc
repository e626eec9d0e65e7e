// `fathom dump`: token ids through the forward pass, named intermediates to a safetensors file.
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/model_flags.h"
#include "cli/model_source.h"
#include "cli/runtime.h"
#include "engine/dump.h"
#include "model/safetensors.h"
#include "model/weights.h"

namespace fathom {
namespace {

struct DumpOptions {
  std::string model;
  std::string hf_overrides;
  std::string ids;
  std::string out;
  std::vector<std::string> tensors;
  std::string numerics = "product";
  std::string kv_cache_dtype = "auto";
  std::string indexer_kv_dtype = "auto";
  std::string load_format = "auto";
  std::string device = "auto";
  int64_t chunk = 0;
  int64_t last = 0;
  int threads = 0;
};

Expected<std::vector<TokenId>> ReadIds(const std::string& path) {
  std::ifstream file(path);
  if (!file) return FailParam(Code::kNotFound, "--ids", "{}: cannot be opened", path);
  const auto json = nlohmann::json::parse(file, nullptr, false);
  if (!json.is_array()) {
    return FailParam(Code::kInvalidArgument, "--ids", "{}: not a JSON array of token ids", path);
  }
  std::vector<TokenId> ids;
  for (size_t i = 0; i < json.size(); ++i) {
    if (!json[i].is_number_integer() || json[i] < 0 || json[i] > INT32_MAX) {
      return FailParam(Code::kInvalidArgument, "--ids", "{}: element {} is no token id", path, i);
    }
    ids.push_back(json[i].get<TokenId>());
  }
  return ids;
}

Status WriteDump(const std::string& path, const std::vector<DumpedTensor>& dumped) {
  std::vector<TensorToWrite> tensors;
  for (const DumpedTensor& tensor : dumped) {
    const void* data = tensor.dtype == DType::kI32 ? static_cast<const void*>(tensor.i32.data())
                                                   : static_cast<const void*>(tensor.f32.data());
    tensors.push_back({tensor.name, tensor.dtype, tensor.shape, data});
  }
  return WriteSafeTensors(path, tensors);
}

Status RunDump(const DumpOptions& options) {
  if (options.ids.empty()) {
    return FailParam(Code::kInvalidArgument, "--ids", "--ids FILE.json is required");
  }
  if (options.out.empty()) {
    return FailParam(Code::kInvalidArgument, "--out", "--out FILE.safetensors is required");
  }
  RuntimeOptions runtime;
  runtime.numerics =
      options.numerics == "reference" ? ops::Numerics::kReference : ops::Numerics::kProduct;
  runtime.kv_cache_dtype = options.kv_cache_dtype;
  runtime.indexer_kv_dtype = options.indexer_kv_dtype;
  DumpRequest request;
  request.numerics = runtime.numerics;
  FATHOM_ASSIGN(request.cache, MakeCacheOptions(runtime));
  FATHOM_ASSIGN(request.ids, ReadIds(options.ids));
  if (!options.tensors.empty()) request.tensors = options.tensors;
  request.chunk = options.chunk;
  request.last = options.last;

  FATHOM_ASSIGN(ModelSource model, OpenModel(options.model, options.hf_overrides));
  FATHOM_ASSIGN(std::unique_ptr<ops::Backend> gpu, OpenDevice(options.device));
  request.memory = CacheMemory(gpu.get());
  LoadOptions load;
  load.format = options.load_format == "dummy" ? LoadFormat::kDummy : LoadFormat::kAuto;
  FATHOM_ASSIGN(Weights weights, LoadWeights(model.directory, model.config, load));
  ThreadPool threads(options.threads);
  FATHOM_TRY(PlaceWeights(weights, model.config, gpu.get(), threads));
  const auto backend = gpu != nullptr ? std::move(gpu) : ops::MakeCpuBackend(threads);
  FATHOM_ASSIGN(const std::vector<DumpedTensor> dumped,
                Dump(model.config, weights, *backend, request));
  FATHOM_TRY(WriteDump(options.out, dumped));
  for (const DumpedTensor& tensor : dumped) {
    std::printf("%-28s %s\n", tensor.name.c_str(), ShapeText(tensor.dtype, tensor.shape).c_str());
  }
  return {};
}

}  // namespace

void AddDumpCommand(CLI::App& app, int* exit_code) {
  auto options = std::make_shared<DumpOptions>();
  std::string names;
  for (const std::string& name : TapNames()) names += " " + name;
  auto command = Command::Add(
      app, "dump", "Token ids through the model, named tensors to a safetensors file",
      "  fathom dump --ids ids.json --out logits.safetensors\n"
      "  fathom dump models/demo --ids ids.json --out x.safetensors --tensor layers.3.streams\n"
      "  fathom dump --ids ids.json --out x.safetensors --numerics reference --chunk 7 --last 100\n"
      "Tensors (* is a layer number):" +
          names);
  command->Positional("model", options->model,
                      "directory, config.json or org/name; left out: the demo model");
  AddHfOverridesFlag(*command, options->hf_overrides);
  command->Text("--ids", options->ids, "FILE", "JSON array of token ids");
  command->Text("--out", options->out, "FILE", "safetensors file to write");
  command->List("--tensor", options->tensors, "NAME", "tensor to write; repeatable (logits)");
  command->Choice("--numerics", options->numerics, {"product", "reference"},
                  "reference: float32 without any rounding");
  command->Choice("--kv-cache-dtype", options->kv_cache_dtype, {"auto", "bf16", "fp8"},
                  "rows of the main cache");
  command->Choice("--attention-config.indexer_kv_dtype", options->indexer_kv_dtype,
                  {"auto", "bf16", "fp8", "mxfp4"}, "rows of the indexer cache");
  command->Choice("--load-format", options->load_format, {"auto", "dummy"},
                  "dummy: values from a seed, shapes from config.json");
  command->Choice("--device", options->device, {"auto", "cpu", "cuda"},
                  "where to run; auto: a GPU when there is one");
  command->Count("--chunk", options->chunk, 0, 65'536, "tokens of a prefill step; 0: 1,024");
  command->Count("--last", options->last, 0, INT32_MAX, "only the last N positions; 0: all");
  command->Count("--threads", options->threads, 0, 1024, "compute threads; 0: one per CPU");
  command->OnRun(exit_code, [options](Command&) {
    const Status status = RunDump(*options);
    return status ? 0 : ReportError(status.error());
  });
}

}  // namespace fathom
