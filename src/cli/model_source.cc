#include "cli/model_source.h"

#include <cstdlib>
#include <filesystem>

#include "model/config_overrides.h"
#include "model/model_path.h"
#include "model/strict_json.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostConfigBytes = 16 << 20;

// The file that holds the configuration.
Expected<std::string> FindConfig(const std::string& model) {
  if (model.empty()) {
    FATHOM_ASSIGN(const std::string demo, DemoModelDirectory());
    return demo + "/config.json";
  }
  if (model.ends_with(".gguf")) {
    return FailParam(Code::kInvalidArgument, "model",
                     "{}: GGUF is not supported; MODEL is a directory of safetensors files with "
                     "config.json, or org/name",
                     model);
  }
  std::error_code error;
  if (fs::is_regular_file(model, error)) return model;
  FATHOM_ASSIGN(const std::string directory, ResolveModel(model));
  if (!fs::exists(directory + "/config.json", error)) {
    return FailParam(Code::kNotFound, "model", "no model in {}: config.json is missing", directory);
  }
  return directory + "/config.json";
}

}  // namespace

Expected<ModelSource> OpenModel(const std::string& model, const std::string& hf_overrides) {
  FATHOM_ASSIGN(const std::string path, FindConfig(model));
  FATHOM_ASSIGN(const std::string text, ReadTextFile(path, kMostConfigBytes));
  ModelSource source;
  source.name = model.empty() ? "demo" : model;
  const fs::path directory = fs::path(path).parent_path();
  source.directory = directory.empty() ? std::string(1, '.') : directory.string();
  FATHOM_ASSIGN(source.config_text, OverrideConfig(text, path, hf_overrides));
  FATHOM_ASSIGN(source.config, ParseModelConfig(source.config_text, path));
  return source;
}

Expected<std::string> DemoModelDirectory() {
  std::vector<std::string> tried;
  const auto usable = [&](const fs::path& path) {
    tried.push_back(path.string());
    std::error_code error;
    return fs::exists(path / "config.json", error);
  };
  if (const char* given = std::getenv("FATHOM_DEMO_MODEL"); given != nullptr && *given != 0) {
    if (usable(given)) return std::string(given);
    return Fail(Code::kNotFound, "FATHOM_DEMO_MODEL: {} holds no config.json", given);
  }
  std::error_code error;
  const fs::path executable = fs::read_symlink("/proc/self/exe", error);
  fs::path folder = executable.parent_path();
  for (int depth = 0; depth < 4 && !folder.empty(); ++depth) {
    if (usable(folder / "models/demo")) return (folder / "models/demo").string();
    if (folder == folder.root_path()) break;
    folder = folder.parent_path();
  }
  const fs::path installed = executable.parent_path() / "../share/fathom/demo";
  if (usable(installed)) return installed.lexically_normal().string();
  std::string places;
  for (const std::string& path : tried) places += (places.empty() ? "" : ", ") + path;
  return Fail(Code::kNotFound, "no MODEL given and the demo checkpoint is in none of: {}", places);
}

Expected<std::string> TokenizerPath(const std::string& given, const std::string& directory) {
  if (given.empty()) return directory + "/tokenizer.json";
  if (fs::path(given).extension() == ".json") return given;
  FATHOM_ASSIGN(const std::string resolved, ResolveModel(given));
  return resolved + "/tokenizer.json";
}

}  // namespace fathom
