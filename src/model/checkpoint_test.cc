#include "model/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "model/testing.h"

namespace fathom {
namespace {

using ::testing::HasSubstr;
using testing::MakeTensors;
using testing::OwnedTensor;
using testing::TensorsByName;
using testing::TinyConfig;

class CheckpointTest : public ::testing::Test {
 protected:
  Expected<TensorSet> Open() { return OpenCheckpoint(dir_.path(), config_); }

  // The refusal of DIRECTORY as it stands.
  std::string Refusal() {
    const auto set = Open();
    EXPECT_FALSE(set);
    if (set) return "";
    EXPECT_EQ(set.error().code, Code::kDataLoss) << set.error().message;
    EXPECT_THAT(set.error().message, HasSubstr(dir_.path()));
    return set.error().message;
  }
  std::string RefusalOf(const TensorsByName& tensors) {
    testing::WriteSingle(dir_.path(), tensors);
    return Refusal();
  }
  void ExpectOpens(const TensorsByName& tensors) {
    testing::WriteSingle(dir_.path(), tensors);
    const auto set = Open();
    ASSERT_TRUE(set) << set.error().message;
  }

  void ExpectSameValues(const TensorSet& set, const TensorsByName& tensors) {
    EXPECT_EQ(set.tensors.size(), tensors.size());
    for (const auto& [name, tensor] : tensors) {
      const TensorInfo* info = set.Find(name);
      ASSERT_NE(info, nullptr) << name;
      EXPECT_EQ(info->shape, tensor.shape) << name;
      EXPECT_EQ(
          std::string(reinterpret_cast<const char*>(info->data), static_cast<size_t>(info->bytes)),
          tensor.data)
          << name;
    }
  }

  testing::TemporaryDirectory dir_;
  ModelConfig config_ = TinyConfig();
};

TEST_F(CheckpointTest, OpensASingleFile) {
  const TensorsByName tensors = MakeTensors(config_);
  testing::WriteSingle(dir_.path(), tensors);
  const auto set = Open();
  ASSERT_TRUE(set) << set.error().message;
  ExpectSameValues(*set, tensors);
  EXPECT_EQ(set->tensor_count, static_cast<int64_t>(tensors.size()));
}

TEST_F(CheckpointTest, OpensShardsWithAnIndex) {
  const TensorsByName tensors = MakeTensors(config_);
  testing::WriteSharded(dir_.path(), tensors);
  const auto set = Open();
  ASSERT_TRUE(set) << set.error().message;
  ExpectSameValues(*set, tensors);
}

TEST_F(CheckpointTest, OpensTransformersNamesAndUnstacksTheExperts) {
  const TensorsByName tensors = MakeTensors(config_);
  TensorsByName renamed = testing::ToTransformers(config_, tensors);
  EXPECT_TRUE(renamed.contains("model.layers.0.mlp.experts.gate_up_proj"));
  testing::WriteSingle(dir_.path(), renamed);
  auto set = Open();
  ASSERT_TRUE(set) << set.error().message;
  ExpectSameValues(*set, tensors);

  // The older place of weights_proj.
  const std::string indexer = "model.layers.1.self_attn.compressor.indexer.";
  auto node = renamed.extract(indexer + "scorer.weights_proj.weight");
  node.key() = indexer + "weights_proj.weight";
  renamed.insert(std::move(node));
  ExpectOpens(renamed);

  OwnedTensor& down = renamed["model.layers.2.mlp.experts.down_proj"];
  down.shape = {1, 2 * down.shape[1], down.shape[2]};
  EXPECT_THAT(RefusalOf(renamed),
              HasSubstr("down_proj is I8 [1, 64, 16], config.json asks for I8 [2, 32, 16]"));
}

TEST_F(CheckpointTest, TransformersMayKeepModulesInFloat32) {
  TensorsByName renamed = testing::ToTransformers(config_, MakeTensors(config_));
  OwnedTensor& wkv = renamed["model.layers.1.self_attn.compressor.kv_proj.weight"];
  wkv.dtype = DType::kF32;
  wkv.data.resize(wkv.data.size() * 2, 1);
  ExpectOpens(renamed);
  OwnedTensor& embed = renamed["model.embed_tokens.weight"];
  embed.dtype = DType::kF32;
  embed.data.resize(embed.data.size() * 2, 1);
  EXPECT_THAT(RefusalOf(renamed), HasSubstr("model.embed_tokens.weight is F32 [16, 32]"));
}

TEST_F(CheckpointTest, EveryMissingTensorIsNamed) {
  const TensorsByName tensors = MakeTensors(config_, 1);
  for (const auto& [name, tensor] : tensors) {
    if (name == "embed.weight") continue;            // tells the two spellings apart; below
    if (name == "mtp.0.attn_norm.weight") continue;  // without it there is no stage: all are extra
    TensorsByName changed = tensors;
    changed.erase(name);
    EXPECT_THAT(RefusalOf(changed), HasSubstr(name + " is missing"));
  }
  TensorsByName changed = tensors;
  changed.erase("embed.weight");
  EXPECT_THAT(RefusalOf(changed), HasSubstr("embed.weight is missing"));
}

TEST_F(CheckpointTest, EveryMisshapenTensorIsNamed) {
  const TensorsByName tensors = MakeTensors(config_, 1);
  for (const auto& [name, tensor] : tensors) {
    TensorsByName changed = tensors;
    changed[name].shape.insert(changed[name].shape.begin(), 1);
    EXPECT_THAT(RefusalOf(changed), HasSubstr(name + " is "));
  }
}

TEST_F(CheckpointTest, EveryMistypedTensorIsNamed) {
  const TensorsByName tensors = MakeTensors(config_, 1);
  for (const auto& [name, tensor] : tensors) {
    TensorsByName changed = tensors;
    switch (tensor.dtype) {  // another type of the same size
      case DType::kF32: changed[name].dtype = DType::kI32; break;
      case DType::kBF16: changed[name].dtype = DType::kF16; break;
      case DType::kF8E4M3: changed[name].dtype = DType::kI8; break;
      case DType::kI64:
        changed[name].dtype = DType::kF32;
        changed[name].shape.back() *= 2;
        break;
      default: changed[name].dtype = DType::kF8E4M3;
    }
    EXPECT_THAT(RefusalOf(changed), HasSubstr(name + " is "));
  }
}

TEST_F(CheckpointTest, ExtraTensorsAreNamed) {
  TensorsByName tensors = MakeTensors(config_);
  tensors["layers.3.attn_norm.weight"] = {DType::kBF16, {32}, std::string(64, 1)};
  tensors["layers.0.attn.compressor.ape"] = {DType::kF32, {4, 1024}, std::string(16384, 1)};
  const std::string message = RefusalOf(tensors);
  EXPECT_THAT(message, HasSubstr("layers.3.attn_norm.weight is no tensor of this model"));
  EXPECT_THAT(message, HasSubstr("layers.0.attn.compressor.ape is no tensor of this model"));
}

TEST_F(CheckpointTest, AnotherModelGetsAShortMessage) {
  TensorsByName tensors;
  for (int i = 0; i < 500; ++i) {
    tensors[fmt::format("h.{}.weight", i)] = {DType::kBF16, {1}, std::string(2, 1)};
  }
  const std::string message = RefusalOf(tensors);
  EXPECT_THAT(message, HasSubstr("embed.weight is missing"));
  EXPECT_THAT(message, HasSubstr("more"));
  EXPECT_LT(message.size(), 600u);
}

TEST_F(CheckpointTest, AnotherVocabularyIsNamed) {
  const TensorsByName tensors = MakeTensors(config_);
  config_.vocab_size = 17;
  EXPECT_THAT(RefusalOf(tensors),
              HasSubstr("embed.weight is BF16 [16, 32], config.json asks for BF16 [17, 32]"));
}

TEST_F(CheckpointTest, TheTensorsDecideTheExpertFormat) {
  config_.expert_format = ExpertFormat::kUnknown;
  ExpectOpens(MakeTensors(config_));
  EXPECT_EQ(config_.expert_format, ExpertFormat::kFp4);

  config_.expert_format = ExpertFormat::kFp8;
  const TensorsByName fp8 = MakeTensors(config_);
  EXPECT_EQ(fp8.at("layers.0.ffn.experts.0.w1.scale").shape, (std::vector<int64_t>{1, 1}));
  config_.expert_format = ExpertFormat::kUnknown;
  ExpectOpens(fp8);
  EXPECT_EQ(config_.expert_format, ExpertFormat::kFp8);

  config_.expert_format = ExpertFormat::kFp4;
  EXPECT_THAT(RefusalOf(fp8), HasSubstr("F8_E4M3, config.json's expert_dtype is fp4"));

  TensorsByName bf16 = fp8;
  bf16["layers.0.ffn.experts.0.w1.weight"].dtype = DType::kBF16;
  bf16["layers.0.ffn.experts.0.w1.weight"].shape.back() /= 2;
  EXPECT_THAT(RefusalOf(bf16), HasSubstr("experts are I8 (packed FP4) or F8_E4M3"));
}

TEST_F(CheckpointTest, StackedFp8ExpertsNeedWholeTiles) {
  config_.expert_format = ExpertFormat::kFp8;
  const TensorsByName renamed = testing::ToTransformers(config_, MakeTensors(config_));
  EXPECT_THAT(RefusalOf(renamed), HasSubstr("moe_intermediate_size 32 is not a multiple of 128"));
}

TEST_F(CheckpointTest, WoAMayBeBf16WithoutItsScale) {
  TensorsByName tensors = MakeTensors(config_);
  const std::string wo_a = "layers.1.attn.wo_a.";
  tensors[wo_a + "weight"].dtype = DType::kBF16;
  tensors[wo_a + "weight"].data.append(tensors[wo_a + "weight"].data);
  EXPECT_THAT(RefusalOf(tensors), HasSubstr("wo_a.scale stands beside a BF16 weight"));
  const OwnedTensor scale = tensors[wo_a + "scale"];
  tensors.erase(wo_a + "scale");
  ExpectOpens(tensors);

  // An index that still lists the scale, and one that does not list a scale that is there.
  nlohmann::json index = testing::WriteSharded(dir_.path(), tensors);
  index["weight_map"][wo_a + "scale"] = "a.safetensors";
  testing::WriteAll(dir_ / "model.safetensors.index.json", index.dump());
  EXPECT_TRUE(Open()) << Open().error().message;
  index = testing::WriteSharded(dir_.path(), MakeTensors(config_));
  index["weight_map"].erase(wo_a + "scale");
  testing::WriteAll(dir_ / "model.safetensors.index.json", index.dump());
  EXPECT_TRUE(Open()) << Open().error().message;
}

TEST_F(CheckpointTest, MtpTensorsAreCheckedAndLeftUnbound) {
  config_.num_mtp_layers = 1;
  const TensorsByName with = MakeTensors(config_, 1);
  const TensorsByName without = MakeTensors(config_, 0);
  EXPECT_EQ(with.size() - without.size(), 39u + 6 * 2);
  testing::WriteSingle(dir_.path(), with);
  const auto set = Open();
  ASSERT_TRUE(set) << set.error().message;
  EXPECT_EQ(set->tensors.size(), without.size());
  EXPECT_EQ(set->tensor_count, static_cast<int64_t>(with.size()));
  ExpectOpens(without);  // a drafter dropped as a whole is fine
}

TEST_F(CheckpointTest, DsparkTensorsAreChecked) {
  nlohmann::json json = testing::TinyConfigJson();
  json.update({{"dspark_block_size", 5},
               {"dspark_markov_rank", 4},
               {"dspark_noise_token_id", 3},
               {"dspark_target_layer_ids", {0, 1, 2}},
               {"num_nextn_predict_layers", 1},
               {"compress_ratios", {0, 4, 128, 0, 0, 0}}});
  config_ = testing::ToConfig(json);
  const TensorsByName tensors = MakeTensors(config_, 3);
  EXPECT_EQ(tensors.size() - MakeTensors(config_, 0).size(), 3u * (29 + 6 * 2) + 10);
  EXPECT_EQ(tensors.at("mtp.0.main_proj.weight").shape, (std::vector<int64_t>{32, 96}));
  EXPECT_EQ(tensors.at("mtp.2.confidence_head.proj.weight").shape, (std::vector<int64_t>{1, 36}));
  ExpectOpens(tensors);
  TensorsByName two = tensors;
  std::erase_if(two, [](const auto& item) { return item.first.starts_with("mtp.2."); });
  EXPECT_THAT(RefusalOf(two), HasSubstr("config.json promises 3 stages"));

  config_ = TinyConfig();  // the same tensors taken for an MTP block
  EXPECT_THAT(RefusalOf(tensors), HasSubstr("mtp.0.e_proj.weight is missing"));
}

TEST_F(CheckpointTest, IndexAndShardsMustAgree) {
  const TensorsByName tensors = MakeTensors(config_);
  const nlohmann::json good = testing::WriteSharded(dir_.path(), tensors);
  const auto refusal = [&](const nlohmann::json& index) {
    testing::WriteAll(dir_ / "model.safetensors.index.json", index.dump());
    return Refusal();
  };
  nlohmann::json index = good;
  index["weight_map"]["embed.weight"] = "c.safetensors";
  EXPECT_THAT(refusal(index), HasSubstr("shard c.safetensors (tensor embed.weight"));
  index = good;
  index["weight_map"]["embed.weight"] = "b.safetensors";
  EXPECT_THAT(refusal(index), HasSubstr("tensor embed.weight belongs in b.safetensors"));
  index = good;
  index["weight_map"].erase("embed.weight");
  EXPECT_THAT(refusal(index), HasSubstr("tensor embed.weight is not in"));
  index = good;
  index["weight_map"]["more"] = "a.safetensors";
  EXPECT_THAT(refusal(index), HasSubstr("tensor more is missing"));
  for (const nlohmann::json& bad : {nlohmann::json("../a.safetensors"), nlohmann::json(""),
                                    nlohmann::json(7), nlohmann::json(nullptr)}) {
    index = good;
    index["weight_map"]["embed.weight"] = bad;
    EXPECT_THAT(refusal(index), HasSubstr("weight_map.embed.weight"));
  }
  for (const char* text : {"", "[]", "{}", "{\"weight_map\":[]}", "{\"weight_map\":{}}"}) {
    testing::WriteAll(dir_ / "model.safetensors.index.json", text);
    EXPECT_THAT(Refusal(), HasSubstr("model.safetensors.index.json"));
  }
  // A stale total_size is reported in the log and harms nothing.
  index = good;
  index["metadata"]["total_size"] = 1;
  testing::WriteAll(dir_ / "model.safetensors.index.json", index.dump());
  EXPECT_TRUE(Open());
}

TEST_F(CheckpointTest, ATensorInTwoShardsIsRefused) {
  const TensorsByName tensors = MakeTensors(config_);
  testing::WriteSharded(dir_.path(), tensors);
  testing::WriteTensors(dir_ / "a.safetensors", tensors);
  EXPECT_THAT(Refusal(), HasSubstr("is in another shard too"));
}

TEST_F(CheckpointTest, EveryTruncationOfAShardIsRefused) {
  testing::WriteSharded(dir_.path(), MakeTensors(config_));
  const auto size = std::filesystem::file_size(dir_ / "b.safetensors");
  for (uintmax_t n = size; n > 0;) {
    n = n > 200 ? n - n / 20 : n - 1;
    std::filesystem::resize_file(dir_ / "b.safetensors", n);
    EXPECT_THAT(Refusal(), HasSubstr("b.safetensors"));
  }
}

TEST_F(CheckpointTest, NoWeightsAtAllIsNotFound) {
  const auto set = Open();
  ASSERT_FALSE(set);
  EXPECT_EQ(set.error().code, Code::kNotFound);
  EXPECT_THAT(set.error().message, HasSubstr("neither model.safetensors.index.json nor"));
}

}  // namespace
}  // namespace fathom
