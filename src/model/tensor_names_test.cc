#include "model/tensor_names.h"

#include <gtest/gtest.h>

#include <set>

#include "model/testing.h"

namespace fathom {
namespace {

struct Totals {
  int64_t tensors = 0;
  int64_t bytes = 0;
};

Totals TotalsOf(const std::string& config_path) {
  const auto config = ParseModelConfig(testing::ReadAll(config_path), config_path);
  EXPECT_TRUE(config) << config.error().message;
  Totals totals;
  for (const ExpectedTensor& tensor : ExpectedTensors(*config)) {
    ++totals.tensors;
    totals.bytes += tensor.bytes();
  }
  return totals;
}

// model.md 9.4: what the published indexes say.
TEST(ExpectedTensors, ReproduceThePublishedCountsAndBytes) {
  for (const auto& [name, tensors, bytes] : {std::tuple("v4-flash", 69187, 159'609'485'896),
                                             std::tuple("v4-flash-0731", 72317, 166'878'536'440),
                                             std::tuple("v4-pro-0813", 149782, 892'727'580'904),
                                             std::tuple("v4-pro", 145116, 864'704'792'696)}) {
    const Totals totals =
        TotalsOf(testing::SharedPath(std::string("models/configs/") + name + ".json"));
    EXPECT_EQ(totals.tensors, tensors) << name;
    EXPECT_EQ(totals.bytes, bytes) << name;
  }
}

TEST(ExpectedTensors, MtpAndDsparkBlocksHaveTheirCounts) {
  const auto drafter = [](const std::string& name) {
    const auto config =
        ParseModelConfig(testing::ReadAll(testing::SharedPath("models/configs/" + name)), name);
    int64_t count = 0;
    for (const ExpectedTensor& t : ExpectedTensors(*config)) count += t.name.starts_with("mtp.");
    return count;
  };
  EXPECT_EQ(drafter("v4-flash.json"), 39 + 6 * 256);
  EXPECT_EQ(drafter("v4-flash-0731.json"), 3 * (29 + 6 * 256) + 10);
  EXPECT_EQ(drafter("v4-pro-0813.json"), 3 * (29 + 6 * 384) + 10);
}

TEST(ExpectedTensors, NamesAreUniqueInBothSpellings) {
  const ModelConfig config = testing::TinyConfig();
  std::set<std::string> names, stored;
  for (const ExpectedTensor& tensor : ExpectedTensors(config, 1)) {
    EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name;
    EXPECT_EQ(tensor.transformers.empty(), tensor.name.starts_with("mtp.")) << tensor.name;
    if (tensor.transformers.empty()) continue;
    EXPECT_TRUE(stored.insert(tensor.transformers + "#" + std::to_string(tensor.part)).second)
        << tensor.transformers;
    EXPECT_LT(tensor.part, tensor.parts);
  }
}

TEST(ExpectedTensors, StackedExpertsHoldGateRowsThenUpRows) {
  for (const ExpectedTensor& t : ExpectedTensors(testing::TinyConfig(), 0)) {
    if (t.name == "layers.1.ffn.experts.1.w1.weight") {
      EXPECT_EQ(t.transformers, "model.layers.1.mlp.experts.gate_up_proj");
      EXPECT_EQ(t.part, 2);
      EXPECT_EQ(t.transformers_shape(2), (std::vector<int64_t>{2, 64, 16}));
    }
    if (t.name == "layers.1.ffn.experts.1.w3.scale") {
      EXPECT_EQ(t.transformers, "model.layers.1.mlp.experts.gate_up_proj_scale_inv");
      EXPECT_EQ(t.part, 3);
      EXPECT_EQ(t.transformers_shape(2), (std::vector<int64_t>{2, 64, 1}));
    }
    if (t.name == "layers.2.attn.wo_a.scale") {
      EXPECT_EQ(t.transformers, "model.layers.2.self_attn.o_a_proj.weight_scale_inv");
    }
  }
}

}  // namespace
}  // namespace fathom
