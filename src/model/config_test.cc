#include "model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "model/testing.h"

namespace fathom {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

Expected<ModelConfig> Parse(const json& config) {
  return ParseModelConfig(config.dump(), "config.json");
}

json DemoJson() {
  return json::parse(testing::ReadAll(testing::DemoDirectory() + "/config.json"));
}

json ReleasedJson(const std::string& name) {
  return json::parse(testing::ReadAll(testing::SharedPath("models/configs/" + name + ".json")));
}

// Expects a refusal whose text and param name `key`.
void ExpectRefused(const json& config, const std::string& key, const std::string& what) {
  const auto parsed = Parse(config);
  ASSERT_FALSE(parsed) << key << " " << what << " was accepted";
  EXPECT_EQ(parsed.error().code, Code::kInvalidArgument);
  EXPECT_EQ(parsed.error().param, key) << what << ": " << parsed.error().message;
  EXPECT_THAT(parsed.error().message, HasSubstr("config.json: " + key));
}

// Keys whose absence changes nothing: they describe training, or their only value is V4's own.
const std::set<std::string> kOptional = {
    "torch_dtype",          "attention_dropout",   "initializer_range", "use_cache",
    "transformers_version", "tie_word_embeddings", "attention_bias",    "num_nextn_predict_layers",
    "expert_dtype",         "dspark_block_size"};
// Of these not even the value matters.
const std::set<std::string> kIgnored = {"torch_dtype", "attention_dropout", "initializer_range",
                                        "use_cache", "transformers_version"};

TEST(ModelConfig, ReadsTheReleasedConfigs) {
  for (const auto& [name, layers, csa, hca, swa, entries] :
       {std::tuple("v4-flash", 43, 21, 20, 2, 44), std::tuple("v4-flash-0731", 43, 21, 20, 2, 46),
        std::tuple("v4-pro", 61, 30, 31, 0, 62), std::tuple("v4-pro-0813", 61, 30, 31, 0, 64)}) {
    const auto config = Parse(ReleasedJson(name));
    ASSERT_TRUE(config) << config.error().message;
    EXPECT_EQ(config->num_layers, layers);
    EXPECT_EQ(config->count(LayerKind::kCsa), csa);
    EXPECT_EQ(config->count(LayerKind::kHca), hca);
    EXPECT_EQ(config->count(LayerKind::kSwa), swa);
    EXPECT_EQ(static_cast<int>(config->compress_ratios.size()), entries);
    EXPECT_EQ(config->max_position_embeddings, 1048576);
  }
}

TEST(ModelConfig, ReadsEveryValueOfPro0813) {
  const auto config = Parse(ReleasedJson("v4-pro-0813"));
  ASSERT_TRUE(config) << config.error().message;
  EXPECT_EQ(config->vocab_size, 129280);
  EXPECT_EQ(config->hidden_size, 7168);
  EXPECT_EQ(config->num_heads, 128);
  EXPECT_EQ(config->q_lora_rank, 1536);
  EXPECT_EQ(config->o_lora_rank, 1024);
  EXPECT_EQ(config->o_groups, 16);
  EXPECT_EQ(config->index_heads, 64);
  EXPECT_EQ(config->index_top_k, 1024);
  EXPECT_EQ(config->num_hash_layers, 3);
  EXPECT_EQ(config->num_experts, 384);
  EXPECT_EQ(config->experts_per_token, 6);
  EXPECT_EQ(config->expert_width, 3072);
  EXPECT_EQ(config->routed_scaling_factor, 2.5f);
  EXPECT_EQ(config->swiglu_limit, 10.0f);
  EXPECT_EQ(config->rms_norm_eps, 1e-6f);
  EXPECT_EQ(config->sinkhorn_iterations, 20);
  EXPECT_EQ(config->rope_theta, 10000);
  EXPECT_EQ(config->compress_rope_theta, 160000);
  EXPECT_EQ(config->yarn.factor, 16);
  EXPECT_EQ(config->yarn.original_max_position, 65536);
  EXPECT_EQ(config->yarn.beta_fast, 32);
  EXPECT_EQ(config->yarn.beta_slow, 1);
  EXPECT_EQ(config->num_mtp_layers, 1);
  EXPECT_EQ(config->dspark_block_size, 5);
  EXPECT_EQ(config->dspark_markov_rank, 512);
  EXPECT_EQ(config->dspark_noise_token, 128799);
  EXPECT_EQ(config->dspark_target_layers, (std::vector{58, 59, 60}));
  EXPECT_EQ(config->expert_format, ExpertFormat::kFp4);
  EXPECT_EQ(config->eos_token, 1);
  EXPECT_EQ(Parse(ReleasedJson("v4-flash"))->expert_format, ExpertFormat::kUnknown);
}

TEST(ModelConfig, EveryNeededKeyIsRefusedByNameWhenMissing) {
  for (const json& config : {DemoJson(), ReleasedJson("v4-pro-0813")}) {
    for (const auto& item : config.items()) {
      json changed = config;
      changed.erase(item.key());
      if (kOptional.contains(item.key())) {
        EXPECT_TRUE(Parse(changed)) << item.key() << ": " << Parse(changed).error().message;
      } else {
        ExpectRefused(changed, item.key(), "missing");
      }
    }
    for (const std::string object : {"rope_scaling", "quantization_config"}) {
      for (const auto& item : config[object].items()) {
        json changed = config;
        changed[object].erase(item.key());
        ExpectRefused(changed, object + "." + item.key(), "missing");
      }
    }
  }
}

TEST(ModelConfig, EveryKeyOfAWrongTypeIsRefusedByName) {
  const json values = {nullptr, json::object(), json::array(), "text", true, -1, 0.5, {{1}}, 1e300};
  const json config = ReleasedJson("v4-pro-0813");
  const auto type_class = [](const json& v) { return v.is_number() ? "number" : v.type_name(); };
  const auto check = [&](const json& changed, const std::string& key, const json& old,
                         const json& value) {
    if (std::string(type_class(old)) == type_class(value) && !old.is_array()) return;
    ExpectRefused(changed, key, "= " + value.dump());
  };
  for (const auto& item : config.items()) {
    if (kIgnored.contains(item.key())) continue;
    for (const json& value : values) {
      json changed = config;
      changed[item.key()] = value;
      if (value.is_object() && item.value().is_object()) continue;
      check(changed, item.key(), item.value(), value);
    }
  }
  for (const std::string object : {"rope_scaling", "quantization_config"}) {
    for (const auto& item : config[object].items()) {
      for (const json& value : values) {
        json changed = config;
        changed[object][item.key()] = value;
        check(changed, object + "." + item.key(), item.value(), value);
      }
    }
  }
}

TEST(ModelConfig, EveryAbsurdNumberIsRefusedByName) {
  const json config = ReleasedJson("v4-pro-0813");
  const json absurd = {-1, -1e30, 1e30, json(UINT64_MAX), json(INT64_MIN), json(int64_t{1} << 40)};
  const std::set<std::string> zero_is_fine = {
      "bos_token_id",          "eos_token_id",      "num_hash_layers",  "num_nextn_predict_layers",
      "dspark_noise_token_id", "attention_dropout", "initializer_range"};
  const auto is_plain_number = [](const json& value) { return value.is_number(); };
  for (const auto& item : config.items()) {
    if (!is_plain_number(item.value()) || kIgnored.contains(item.key())) continue;
    for (const json& value : absurd) {
      json changed = config;
      changed[item.key()] = value;
      ExpectRefused(changed, item.key(), "= " + value.dump());
    }
    if (zero_is_fine.contains(item.key())) continue;
    json changed = config;
    changed[item.key()] = 0;
    ExpectRefused(changed, item.key(), "= 0");
  }
  for (const auto& item : config["rope_scaling"].items()) {
    if (!is_plain_number(item.value())) continue;
    for (json value : absurd) {
      json changed = config;
      changed["rope_scaling"][item.key()] = value;
      ExpectRefused(changed, "rope_scaling." + item.key(), "= " + value.dump());
    }
  }
}

TEST(ModelConfig, CountsMustBeIntegers) {
  const json config = ReleasedJson("v4-pro-0813");
  for (const std::string key : {"vocab_size",
                                "hidden_size",
                                "num_hidden_layers",
                                "num_attention_heads",
                                "q_lora_rank",
                                "o_lora_rank",
                                "o_groups",
                                "index_n_heads",
                                "index_topk",
                                "num_hash_layers",
                                "n_routed_experts",
                                "num_experts_per_tok",
                                "moe_intermediate_size",
                                "hc_sinkhorn_iters",
                                "max_position_embeddings",
                                "bos_token_id",
                                "eos_token_id",
                                "num_nextn_predict_layers",
                                "dspark_block_size",
                                "dspark_markov_rank",
                                "dspark_noise_token_id"}) {
    json changed = config;
    changed[key] = config[key].get<double>() + 0.5;
    ExpectRefused(changed, key, "not integral");
    changed[key] = config[key].get<double>();
    ExpectRefused(changed, key, "written as a fraction");
  }
}

TEST(ModelConfig, WhatTheKernelsFixIsRefusedOtherwise) {
  for (const auto& [key, value] : std::vector<std::pair<std::string, json>>{
           {"head_dim", 256},
           {"qk_rope_head_dim", 32},
           {"sliding_window", 4096},
           {"index_head_dim", 64},
           {"hc_mult", 2},
           {"n_shared_experts", 2},
           {"num_key_value_heads", 8},
           {"scoring_func", "softmax"},
           {"topk_method", "greedy"},
           {"norm_topk_prob", false},
           {"hidden_act", "gelu"},
           {"tie_word_embeddings", true},
           {"attention_bias", true},
           {"expert_dtype", "int4"},
           {"model_type", "deepseek_v3"},
           {"model_type", "deepseek_v41"},
           {"architectures", {"DeepseekV3ForCausalLM"}},
           {"architectures", json::array()},
           {"architectures", {"DeepseekV4ForCausalLM", "LlamaForCausalLM"}}}) {
    json changed = DemoJson();
    changed[key] = value;
    ExpectRefused(changed, key, "= " + value.dump());
  }
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, json>>{{"quant_method", "awq"},
                                                 {"fmt", "e5m2"},
                                                 {"scale_fmt", "float"},
                                                 {"activation_scheme", "static"},
                                                 {"weight_block_size", {64, 64}},
                                                 {"weight_block_size", {128, 128, 128}}}) {
    json changed = DemoJson();
    changed["quantization_config"][key] = value;
    ExpectRefused(changed, "quantization_config." + key, "= " + value.dump());
  }
  json changed = DemoJson();
  changed["rope_scaling"]["type"] = "linear";
  ExpectRefused(changed, "rope_scaling.type", "linear");
  changed["rope_scaling"]["rope_type"] = "yarn";  // the two contradict each other
  ExpectRefused(changed, "rope_scaling.type", "linear");
  changed["rope_scaling"].erase("type");
  EXPECT_TRUE(Parse(changed));
}

TEST(ModelConfig, RelationsAmongKeysAreChecked) {
  const auto with = [](const std::string& key, const json& value) {
    json config = DemoJson();
    config[key] = value;
    return config;
  };
  ExpectRefused(with("o_groups", 3), "o_groups", "not dividing heads");
  ExpectRefused(with("o_groups", 8), "o_groups", "above heads");
  ExpectRefused(with("num_experts_per_tok", 9), "num_experts_per_tok", "above experts");
  ExpectRefused(with("num_hash_layers", 7), "num_hash_layers", "above layers");
  ExpectRefused(with("hidden_size", 257), "hidden_size", "no multiple of 32");
  ExpectRefused(with("moe_intermediate_size", 100), "moe_intermediate_size", "no multiple of 32");
  ExpectRefused(with("eos_token_id", 4096), "eos_token_id", "= vocab_size");
  ExpectRefused(with("bos_token_id", 5000), "bos_token_id", "above vocab_size");
  ExpectRefused(with("eos_token_id", json::array({1, 2})), "eos_token_id", "a list");
  ExpectRefused(with("compress_ratios", {0, 4, 128, 4, 128}), "compress_ratios", "too short");
  ExpectRefused(with("compress_ratios", json::array()), "compress_ratios", "empty");
  ExpectRefused(with("compress_ratios", {0, 4, 128, 4, 128, 2}), "compress_ratios", "a ratio 2");
  ExpectRefused(with("compress_ratios", {0, 4, 128, 4, 128, 4, 4}), "compress_ratios",
                "a compressed drafter stage");
  ExpectRefused(with("compress_ratios", json(std::vector<int>(40, 0))), "compress_ratios",
                "too long");
  json yarn = DemoJson();
  yarn["rope_scaling"]["beta_slow"] = 32;
  ExpectRefused(yarn, "rope_scaling.beta_fast", "= beta_slow");

  json dspark = ReleasedJson("v4-flash-0731");
  dspark["dspark_target_layer_ids"] = {40, 41, 43};
  ExpectRefused(dspark, "dspark_target_layer_ids", "a layer that is not there");
  dspark["dspark_target_layer_ids"] = {41, 40};
  ExpectRefused(dspark, "dspark_target_layer_ids", "not ascending");
  dspark["dspark_target_layer_ids"] = {40};
  dspark["dspark_noise_token_id"] = 129280;
  ExpectRefused(dspark, "dspark_noise_token_id", "= vocab_size");
}

TEST(ModelConfig, BrokenJsonIsRefusedWithTheReason) {
  const auto error = [](const std::string& text) {
    const auto parsed = ParseModelConfig(text, "config.json");
    EXPECT_FALSE(parsed);
    return parsed ? "" : parsed.error().message;
  };
  const std::string good = DemoJson().dump();
  EXPECT_THAT(error(""), HasSubstr("config.json: not valid JSON"));
  EXPECT_THAT(error("[]"), HasSubstr("must be an object"));
  EXPECT_THAT(error("7"), HasSubstr("must be an object"));
  EXPECT_THAT(error(good + "x"), HasSubstr("not valid JSON"));
  EXPECT_THAT(error(good + good), HasSubstr("not valid JSON"));
  EXPECT_THAT(error("{\"vocab_size\": 1, \"vocab_size\": 2}"),
              HasSubstr("duplicate key \"vocab_size\""));
  EXPECT_THAT(error("{\"a\": {\"b\": 1, \"b\": 1}}"), HasSubstr("duplicate key \"b\""));
  EXPECT_THAT(error("{\"a\": 1e999}"), HasSubstr("not valid JSON"));
  EXPECT_THAT(error("{\"a\": NaN}"), HasSubstr("not valid JSON"));
  EXPECT_THAT(error("{\"a\": \"\xff\"}"), HasSubstr("not valid JSON"));
  EXPECT_THAT(error(std::string(100000, '[')), HasSubstr("nested deeper"));
  std::string nested = good;
  nested.insert(1, "\"deep\":" + std::string(40, '[') + std::string(40, ']') + ",");
  EXPECT_THAT(error(nested), HasSubstr("nested deeper"));
  json huge = DemoJson();
  huge["hidden_act"] = std::string(1 << 20, 'x');
  EXPECT_LT(error(huge.dump()).size(), 300u);
}

TEST(ModelConfig, EveryTruncationIsRefused) {
  const std::string text = DemoJson().dump();
  for (size_t n = 0; n < text.size(); ++n) {
    EXPECT_FALSE(ParseModelConfig(text.substr(0, n), "config.json")) << n;
  }
}

TEST(ModelConfig, AMissingFileIsNotFound) {
  testing::TemporaryDirectory dir;
  const auto config = LoadModelConfig(dir.path());
  ASSERT_FALSE(config);
  EXPECT_EQ(config.error().code, Code::kNotFound);
  EXPECT_THAT(config.error().message, HasSubstr(dir / "config.json"));
}

}  // namespace
}  // namespace fathom
