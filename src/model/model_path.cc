#include "model/model_path.h"

#include <fmt/ranges.h>

#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <vector>

#include "model/strict_json.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;

bool IsDirectory(const std::string& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

std::string Environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// The first that is set decides, as in huggingface_hub.
std::string HubCache() {
  if (std::string hub = Environment("HF_HUB_CACHE"); !hub.empty()) return hub;
  if (std::string home = Environment("HF_HOME"); !home.empty()) return home + "/hub";
  if (std::string home = Environment("HOME"); !home.empty()) {
    return home + "/.cache/huggingface/hub";
  }
  return "";
}

// "org/name": one slash, and no part that could leave the cache folder.
bool IsHubName(std::string_view model) {
  const size_t slash = model.find('/');
  if (slash == 0 || slash == model.npos || slash + 1 == model.size()) return false;
  if (model.find('/', slash + 1) != model.npos) return false;
  return model[0] != '.' && model[slash + 1] != '.' && model[0] != '~';
}

std::string Trimmed(std::string text) {
  while (!text.empty() && static_cast<unsigned char>(text.back()) <= ' ') text.pop_back();
  return text;
}

}  // namespace

Expected<std::string> ResolveModel(const std::string& model) {
  if (model.empty()) return FailParam(Code::kInvalidArgument, "model", "the model name is empty");
  if (IsDirectory(model)) return model;
  std::vector<std::string> looked = {model + " (no directory)"};
  if (IsHubName(model)) {
    const std::string hub = HubCache();
    if (hub.empty()) {
      looked.push_back("Hugging Face cache (none of HF_HUB_CACHE, HF_HOME, HOME is set)");
    } else {
      const size_t slash = model.find('/');
      const std::string folder =
          fmt::format("{}/models--{}--{}", hub, model.substr(0, slash), model.substr(slash + 1));
      const std::string ref = folder + "/refs/main";
      const auto revision = ReadTextFile(ref, 4096);
      if (!revision) {
        looked.push_back(ref + (IsDirectory(folder) ? " (no such file)" : " (no such model)"));
      } else {
        const std::string name = Trimmed(*revision);
        const bool plain = !name.empty() && name[0] != '.' && name.find('/') == name.npos;
        const std::string snapshot = folder + "/snapshots/" + name;
        if (plain && IsDirectory(snapshot)) return snapshot;
        looked.push_back(plain ? snapshot + " (named by refs/main, not there)"
                               : ref + " (does not hold a revision)");
      }
    }
  } else {
    looked.push_back("Hugging Face cache (skipped: the name is not ORG/NAME)");
  }
  return tl::unexpected<Error>(Error{
      Code::kNotFound,
      fmt::format("model {} not found; looked at: {}", model, fmt::join(looked, ", ")), "model"});
}

}  // namespace fathom
