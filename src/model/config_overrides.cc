#include "model/config_overrides.h"

#include <algorithm>
#include <array>

#include "model/strict_json.h"

namespace fathom {
namespace {

using nlohmann::json;

constexpr char kFlag[] = "--hf-overrides";

// Keys that a config.json may lack and that mean something where they are.
constexpr std::array<std::string_view, 7> kOptional = {
    "expert_dtype",       "num_nextn_predict_layers", "tie_word_embeddings",    "dspark_block_size",
    "dspark_markov_rank", "dspark_noise_token_id",    "dspark_target_layer_ids"};

// A name that config.json lacks is a slip of the pen: it would change nothing.
Status CheckKeys(const json& config, const json& overrides, const std::string& prefix) {
  for (const auto& [key, value] : overrides.items()) {
    const auto found = config.find(key);
    if (found == config.end()) {
      if (prefix.empty() && std::ranges::find(kOptional, key) != kOptional.end()) continue;
      return FailParam(Code::kInvalidArgument, kFlag, "{}: config.json has no key {}{}", kFlag,
                       prefix, key);
    }
    if (found->is_object() && value.is_object()) {
      FATHOM_TRY(CheckKeys(*found, value, prefix + key + "."));
    }
  }
  return {};
}

// `before` and `config` differ in the number of layers. What is malformed is left to the parser.
void FollowLayers(const json& before, const json& overrides, json* config) {
  const json& layers = config->at("num_hidden_layers");
  const json& old_layers = before.at("num_hidden_layers");
  if (!layers.is_number_unsigned() || !old_layers.is_number_unsigned()) return;
  const auto count = layers.get<size_t>(), old_count = old_layers.get<size_t>();
  if (count >= old_count) return;
  const auto ratios = config->find("compress_ratios");
  if (ratios != config->end() && ratios->is_array() && ratios->size() >= old_count &&
      !overrides.contains("compress_ratios")) {
    ratios->erase(ratios->begin() + static_cast<ptrdiff_t>(count),
                  ratios->begin() + static_cast<ptrdiff_t>(old_count));
  }
  const auto hashed = config->find("num_hash_layers");
  if (hashed != config->end() && hashed->is_number_unsigned() && hashed->get<size_t>() > count &&
      !overrides.contains("num_hash_layers")) {
    *hashed = count;
  }
}

}  // namespace

Expected<std::string> OverrideConfig(std::string_view config, std::string_view origin,
                                     std::string_view overrides) {
  if (overrides.empty()) return std::string(config);
  FATHOM_ASSIGN(const json before, ParseStrictJson(config, origin));
  if (!before.is_object()) {
    return Fail(Code::kInvalidArgument, "{}: is {}, must be an object", origin, ShortJson(before));
  }
  auto patch = ParseStrictJson(overrides, kFlag);
  if (!patch || !patch->is_object()) {
    return FailParam(Code::kInvalidArgument, kFlag, "{}",
                     patch ? fmt::format("{}: is {}, must be an object", kFlag, ShortJson(*patch))
                           : patch.error().message);
  }
  FATHOM_TRY(CheckKeys(before, *patch, ""));
  json after = before;
  after.merge_patch(*patch);
  if (after.contains("num_hidden_layers") && before.contains("num_hidden_layers")) {
    FollowLayers(before, *patch, &after);
  }
  return after.dump();
}

}  // namespace fathom
