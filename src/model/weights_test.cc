#include "model/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>

#include "core/thread_pool.h"
#include "model/testing.h"

namespace fathom {
namespace {

using ::testing::HasSubstr;
using testing::MakeTensors;
using testing::OwnedTensor;
using testing::TensorsByName;

Expected<Weights> Load(const std::string& directory, const LoadOptions& options = {}) {
  FATHOM_ASSIGN(ModelConfig config, LoadModelConfig(directory));
  return LoadWeights(directory, config, options);
}

TEST(LoadWeights, BindsEveryTensorOfTheDemoCheckpoint) {
  const auto loaded = Load(testing::DemoDirectory());
  ASSERT_TRUE(loaded) << loaded.error().message;
  const Weights& w = *loaded;
  EXPECT_EQ(w.tensor_count, 509);
  EXPECT_EQ(w.total_bytes, 21272124);
  ASSERT_EQ(w.layers.size(), 6u);
  EXPECT_EQ(w.head.out, 4096);
  EXPECT_EQ(w.head.in, 256);
  EXPECT_EQ(w.norm.size(), 256u);
  EXPECT_EQ(w.hc_head.site.mixes, 4);
  EXPECT_EQ(w.hc_head.fn.size(), 4u * 1024);
  EXPECT_EQ(w.layers[0].hc_attn.site.fn, w.layers[0].hc_attn.fn.data());
  EXPECT_EQ(w.layers[0].compressor.wkv.data, nullptr);
  EXPECT_EQ(w.layers[1].compressor.ape.size(), 4u * 1024);
  EXPECT_EQ(w.layers[2].compressor.ape.size(), 128u * 512);
  EXPECT_EQ(w.layers[1].index_wq_b.out, 8 * 128);
  EXPECT_EQ(w.layers[2].index_wq_b.data, nullptr);
  EXPECT_NE(w.layers[1].tid2eid, nullptr);
  EXPECT_EQ(w.layers[2].tid2eid, nullptr);
  EXPECT_EQ(w.layers[1].gate_bias.size(), 0u);
  EXPECT_EQ(w.layers[2].gate_bias.size(), 8u);
  EXPECT_EQ(w.layers[5].experts[7].w2.format, ops::WeightFormat::kFp4Block32);
  EXPECT_EQ(w.layers[5].experts[7].w2.in, 256);
  EXPECT_EQ(w.layers[5].shared.w1.format, ops::WeightFormat::kFp8Block128);
}

TEST(LoadWeights, BindsEveryTensorOfTheProLikeCheckpoint) {
  const auto w = Load(testing::SharedPath("models/random-pro"));
  ASSERT_TRUE(w) << w.error().message;
  EXPECT_EQ(w->tensor_count, 762);
  EXPECT_EQ(w->total_bytes, 26238176);
  EXPECT_EQ(w->layers[0].wo_a.out, 4 * 96);
  EXPECT_EQ(w->layers[0].wo_a.in, 1024);
}

// Seconds that this thread has computed: neither a busy machine nor a cold disk adds to them.
double ThreadSeconds() {
  timespec time{};
  EXPECT_EQ(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time), 0);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

TEST(LoadWeights, TakesWellUnderASecondForTheDemo) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers have their own idea of time";
#endif
  const double start = ThreadSeconds();
  ASSERT_TRUE(Load(testing::DemoDirectory()));
  EXPECT_LT(ThreadSeconds() - start, 1);
}

TEST(LoadWeights, ListsEveryMatrixOnce) {
  auto w = Load(testing::DemoDirectory());
  ASSERT_TRUE(w);
  const std::vector<ops::LinearWeight*> matrices = w->Matrices();
  // Per layer 5 attention matrices, the gate, 3 shared, 3 * 8 routed; CSA 6 and HCA 2 more; head.
  EXPECT_EQ(matrices.size(), 6u * (5 + 1 + 3 + 24) + 3 * 6 + 2 * 2 + 1);
  EXPECT_EQ(std::set<ops::LinearWeight*>(matrices.begin(), matrices.end()).size(), matrices.size());
}

TEST(PackForCpu, PacksEveryMatrix) {
  auto w = Load(testing::DemoDirectory());
  ASSERT_TRUE(w);
  ThreadPool pool(2);
  PackForCpu(*w, pool);
  for (const ops::LinearWeight* matrix : w->Matrices()) EXPECT_NE(matrix->packed, nullptr);
}

class LoadTest : public ::testing::Test {
 protected:
  LoadTest() { testing::WriteAll(dir_ / "config.json", testing::TinyConfigJson().dump()); }

  std::string RefusalOf(const TensorsByName& tensors) {
    testing::WriteSingle(dir_.path(), tensors);
    const auto weights = Load(dir_.path());
    EXPECT_FALSE(weights);
    if (weights) return "";
    EXPECT_EQ(weights.error().code, Code::kDataLoss);
    EXPECT_THAT(weights.error().message, HasSubstr(dir_.path()));
    return weights.error().message;
  }

  testing::TemporaryDirectory dir_;
  ModelConfig config_ = testing::TinyConfig();
};

TEST_F(LoadTest, NanAndInfinityAreRefusedByTensorNameInEveryTensor) {
  const TensorsByName tensors = MakeTensors(config_);
  const std::map<DType, std::vector<std::string>> bad = {
      {DType::kF32, {{"\0\0\x80\x7f", 4}, {"\0\0\x80\xff", 4}, {"\1\0\xc0\x7f", 4}}},
      {DType::kBF16, {{"\x80\x7f", 2}, {"\x80\xff", 2}, {"\xc1\x7f", 2}}},
      {DType::kF8E4M3, {"\x7f", "\xff"}},
      {DType::kF8E8M0, {"\xff"}}};
  int changed_tensors = 0;
  for (const auto& [name, tensor] : tensors) {
    const auto patterns = bad.find(tensor.dtype);
    if (patterns == bad.end()) continue;
    const std::string& pattern = patterns->second[changed_tensors % patterns->second.size()];
    TensorsByName changed = tensors;
    const size_t element = changed_tensors % 3 == 0   ? 0
                           : changed_tensors % 3 == 1 ? tensor.data.size() / pattern.size() - 1
                                                      : tensor.data.size() / pattern.size() / 2;
    changed[name].data.replace(element * pattern.size(), pattern.size(), pattern);
    EXPECT_THAT(RefusalOf(changed),
                HasSubstr(fmt::format("tensor {}: element {} is NaN", name, element)));
    ++changed_tensors;
  }
  EXPECT_GT(changed_tensors, 100);
}

TEST_F(LoadTest, ExtremeFiniteValuesAreAccepted) {
  TensorsByName tensors = MakeTensors(config_);
  const std::map<DType, std::string> largest = {{DType::kF32, {"\xff\xff\x7f\xff", 4}},
                                                {DType::kBF16, {"\x7f\xff", 2}},
                                                {DType::kF8E4M3, "\xfe"},
                                                {DType::kF8E8M0, "\xfe"}};
  for (auto& [name, tensor] : tensors) {
    const auto value = largest.find(tensor.dtype);
    if (value != largest.end()) tensor.data.replace(0, value->second.size(), value->second);
  }
  testing::WriteSingle(dir_.path(), tensors);
  const auto weights = Load(dir_.path());
  EXPECT_TRUE(weights) << weights.error().message;
}

TEST_F(LoadTest, TheFiniteCheckCanBeLeftOut) {
  TensorsByName tensors = MakeTensors(config_);
  tensors["norm.weight"].data.assign(64, '\xff');
  testing::WriteSingle(dir_.path(), tensors);
  EXPECT_FALSE(Load(dir_.path()));
  EXPECT_TRUE(Load(dir_.path(), {.check_finite = false}));
}

TEST_F(LoadTest, ExpertIdsOutOfRangeAreRefused) {
  for (const int64_t id : {int64_t{2}, int64_t{-1}, INT64_MIN, int64_t{1} << 32}) {
    TensorsByName tensors = MakeTensors(config_);
    std::memcpy(tensors["layers.0.ffn.gate.tid2eid"].data.data() + 8 * 11, &id, 8);
    EXPECT_THAT(RefusalOf(tensors),
                HasSubstr(fmt::format(
                    "layers.0.ffn.gate.tid2eid: token 11 names expert {}, there are 2", id)));
  }
}

TEST_F(LoadTest, TransformersNamesBindTheSameValues) {
  const TensorsByName tensors = MakeTensors(config_);
  testing::WriteSingle(dir_.path(), tensors);
  auto original = Load(dir_.path());
  ASSERT_TRUE(original) << original.error().message;
  testing::TemporaryDirectory other;
  testing::WriteAll(other / "config.json", testing::TinyConfigJson().dump());
  testing::WriteSingle(other.path(), testing::ToTransformers(config_, tensors));
  auto renamed = Load(other.path());
  ASSERT_TRUE(renamed) << renamed.error().message;
  const auto a = original->Matrices();
  const auto b = renamed->Matrices();
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i]->format, b[i]->format);
    ASSERT_EQ(a[i]->out, b[i]->out);
    ASSERT_EQ(a[i]->in, b[i]->in);
    for (const int64_t o : {int64_t{0}, a[i]->out - 1}) {
      for (const int64_t in : {int64_t{0}, a[i]->in - 1}) {
        EXPECT_EQ(ops::WeightAt(*a[i], o, in), ops::WeightAt(*b[i], o, in)) << i;
      }
    }
  }
  EXPECT_EQ(original->layers[1].attn_sink, renamed->layers[1].attn_sink);
  EXPECT_EQ(original->layers[2].compressor.ape, renamed->layers[2].compressor.ape);
}

TEST_F(LoadTest, UnalignedTensorsAreCopied) {
  testing::WriteSingle(dir_.path(), MakeTensors(config_));
  // The format lets the header have any length: one more space shifts every tensor by a byte.
  std::string file = testing::ReadAll(dir_ / "model.safetensors");
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  file.insert(8 + length, " ");
  ++length;
  std::memcpy(file.data(), &length, 8);
  const auto aligned = Load(dir_.path());
  testing::TemporaryDirectory other;
  testing::WriteAll(other / "config.json", testing::TinyConfigJson().dump());
  testing::WriteAll(other / "model.safetensors", file);
  const auto shifted = Load(other.path());
  ASSERT_TRUE(aligned && shifted);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(shifted->embed) % 2, 0u);
  EXPECT_EQ(std::memcmp(shifted->embed, aligned->embed, 16 * 32 * 2), 0);
  EXPECT_EQ(shifted->layers[0].hc_attn.fn, aligned->layers[0].hc_attn.fn);
  EXPECT_EQ(shifted->layers[0].attn_norm, aligned->layers[0].attn_norm);
}

}  // namespace
}  // namespace fathom
