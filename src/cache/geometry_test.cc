#include "cache/geometry.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "cache/block_pool.h"
#include "ops/compressor/compressor.h"

namespace fathom {
namespace {

constexpr int64_t kMillion = 1'048'576;

std::string SharedFolder() {
  const char* folder = std::getenv("FATHOM_SHARED");
  return folder != nullptr ? folder : FATHOM_SOURCE_DIR "/../shared";
}

ModelConfig ReadConfig(const std::string& name) {
  const std::string path = SharedFolder() + "/models/configs/" + name + ".json";
  std::ifstream file(path);
  EXPECT_TRUE(file) << path;
  std::ostringstream text;
  text << file.rdbuf();
  auto config = ParseModelConfig(text.str(), path);
  EXPECT_TRUE(config.has_value()) << config.error().message;
  return *config;
}

Geometry Make(const std::string& name, KvDType kv, IndexDType index, int block_tokens = 256) {
  auto geometry =
      MakeGeometry(ReadConfig(name), {.kv = kv, .index = index, .block_tokens = block_tokens});
  EXPECT_TRUE(geometry.has_value());
  return *geometry;
}

double Gib(int64_t bytes) {
  return static_cast<double>(bytes) / (1 << 30);
}

TEST(Geometry, PagesOf256TokensHaveTheFlashMlaSizes) {
  const Geometry fp8 = Make("v4-flash", KvDType::kFp8, IndexDType::kFp8);
  EXPECT_EQ(fp8.of(CacheKind::kCsaKv).page_bytes, 37'440);
  EXPECT_EQ(fp8.of(CacheKind::kIndexK).page_bytes, 8'640);
  EXPECT_EQ(fp8.of(CacheKind::kHcaKv).page_bytes, 1'728);
  EXPECT_EQ(fp8.of(CacheKind::kCsaKv).row_bytes, 584);
  EXPECT_EQ(fp8.of(CacheKind::kIndexK).row_bytes, 132);
  EXPECT_EQ(fp8.of(CacheKind::kCsaKv).rows_per_page, 64);
  EXPECT_EQ(fp8.of(CacheKind::kHcaKv).rows_per_page, 2);
  const Geometry fp4 = Make("v4-flash", KvDType::kFp8, IndexDType::kMxfp4);
  EXPECT_EQ(fp4.of(CacheKind::kIndexK).page_bytes, 4'608);
  EXPECT_EQ(fp4.of(CacheKind::kIndexK).row_bytes, 68);
  const Geometry bf16 = Make("v4-flash", KvDType::kBf16, IndexDType::kBf16);
  EXPECT_EQ(bf16.of(CacheKind::kCsaKv).row_bytes, 1'024);
  EXPECT_EQ(bf16.of(CacheKind::kIndexK).row_bytes, 256);
  EXPECT_EQ(bf16.of(CacheKind::kWindowKv).row_bytes, 1'024);
}

TEST(Geometry, SlabsAddUpForBothModelsAndBothRefreshes) {
  for (const char* name : {"v4-flash", "v4-flash-0731"}) {
    EXPECT_EQ(Make(name, KvDType::kFp8, IndexDType::kFp8).block_bytes, 1'002'240) << name;
    EXPECT_EQ(Make(name, KvDType::kFp8, IndexDType::kMxfp4).block_bytes, 917'568) << name;
  }
  for (const char* name : {"v4-pro", "v4-pro-0813"}) {
    EXPECT_EQ(Make(name, KvDType::kFp8, IndexDType::kFp8).block_bytes, 1'435'968) << name;
    EXPECT_EQ(Make(name, KvDType::kFp8, IndexDType::kMxfp4).block_bytes, 1'315'008) << name;
  }
}

TEST(Geometry, AMillionTokensCostWhatIsPublished) {
  const Geometry pro_bf16 = Make("v4-pro", KvDType::kBf16, IndexDType::kBf16);
  EXPECT_EQ(pro_bf16.row_bytes(kMillion), 10'326'376'448);
  EXPECT_NEAR(Gib(pro_bf16.row_bytes(kMillion)), 9.617, 5e-4);
  EXPECT_NEAR(Gib(pro_bf16.row_bytes(kMillion) + pro_bf16.window_bytes()), 9.625, 5e-4);
  const Geometry flash_bf16 = Make("v4-flash", KvDType::kBf16, IndexDType::kBf16);
  EXPECT_EQ(flash_bf16.row_bytes(kMillion), 7'214'202'880);
  EXPECT_NEAR(Gib(flash_bf16.row_bytes(kMillion)), 6.719, 5e-4);
  const auto gib = [](const char* name, IndexDType index) {
    return Gib(Make(name, KvDType::kFp8, index).row_bytes(kMillion));
  };
  EXPECT_NEAR(gib("v4-flash", IndexDType::kFp8), 3.760, 5e-4);
  EXPECT_NEAR(gib("v4-pro", IndexDType::kFp8), 5.382, 5e-4);
  EXPECT_NEAR(gib("v4-flash", IndexDType::kMxfp4), 3.432, 5e-4);
  EXPECT_NEAR(gib("v4-pro", IndexDType::kMxfp4), 4.914, 5e-4);
}

TEST(Geometry, SlotIsConstantAndSmall) {
  const Geometry flash = Make("v4-flash", KvDType::kFp8, IndexDType::kFp8);
  // 43 rings of 128 x 584, 21 c4 states (main 64 KiB, indexer 16 KiB), 20 online records of 6 KiB.
  EXPECT_EQ(flash.slot_bytes, 43 * 128 * 584 + 21 * (65'536 + 16'384) + 20 * 6'144);
  EXPECT_NEAR(static_cast<double>(flash.slot_bytes) / (1 << 20), 4.9, 0.1);
  EXPECT_EQ(flash.of(CacheKind::kCsaState).page_bytes, 8 * 8'192);
  EXPECT_EQ(flash.of(CacheKind::kIndexState).page_bytes, 8 * 2'048);
  EXPECT_EQ(flash.of(CacheKind::kHcaState).page_bytes, 3 * 512 * 4);
}

TEST(Geometry, IllegalBlockSizesAreRefusedWithLegalOnes) {
  for (const int tokens : {-128, 0, 1, 64, 100, 192, 257}) {
    const auto geometry = MakeGeometry(ReadConfig("v4-flash"), {.block_tokens = tokens});
    ASSERT_FALSE(geometry.has_value()) << tokens;
    EXPECT_EQ(geometry.error().code, Code::kInvalidArgument);
    EXPECT_NE(geometry.error().message.find(std::to_string(tokens)), std::string::npos);
    EXPECT_NE(geometry.error().message.find("128, 256"), std::string::npos);
  }
  EXPECT_FALSE(MakeGeometry(ReadConfig("v4-flash"), {.draft_depth = -1}).has_value());
  EXPECT_FALSE(MakeGeometry(ModelConfig{}, {}).has_value());
}

ModelConfig RandomConfig() {
  ModelConfig config;
  config.num_layers = *rc::gen::inRange(1, 12);
  for (int i = 0; i < config.num_layers + 1; ++i) {
    config.compress_ratios.push_back(*rc::gen::element(0, 4, 128));
  }
  return config;
}

CacheOptions RandomOptions() {
  return {.kv = *rc::gen::element(KvDType::kF32, KvDType::kBf16, KvDType::kFp8),
          .index = *rc::gen::element(IndexDType::kF32, IndexDType::kBf16, IndexDType::kFp8,
                                     IndexDType::kMxfp4),
          .block_tokens = 128 * *rc::gen::inRange(1, 9),
          .draft_depth = *rc::gen::inRange(0, 9)};
}

// For any n, a block table of ceil(n / block) entries holds every complete row of every kind.
RC_GTEST_PROP(Geometry, OneBlockCountServesEveryKind, ()) {
  const Geometry geometry = *MakeGeometry(RandomConfig(), RandomOptions());
  const auto tokens = *rc::gen::inRange<int64_t>(1, 1 << 21);
  const int64_t blocks = geometry.blocks_for(tokens);
  RC_ASSERT(blocks * geometry.options.block_tokens >= tokens);
  RC_ASSERT((blocks - 1) * geometry.options.block_tokens < tokens);
  for (const KindGeometry& kind : geometry.kinds) {
    if (!kind.block_kind) continue;
    RC_ASSERT(kind.page_bytes % 576 == 0);
    RC_ASSERT(kind.padding_bytes >= 0 && kind.padding_bytes < 576);
    RC_ASSERT(blocks * kind.rows_per_page >= tokens / kind.tokens_per_row);
    RC_ASSERT(kind.rows_per_page * kind.tokens_per_row == geometry.options.block_tokens);
  }
  RC_ASSERT(geometry.of(CacheKind::kWindowKv).rows_per_page == 128 + geometry.options.draft_depth);
}

// Byte ranges [begin, end) relative to the pool's base.
using Ranges = std::vector<std::pair<int64_t, int64_t>>;

void AddRows(const ops::PagedRows& rows, int unit, const std::byte* base, Ranges& out) {
  for (int row = 0; row < rows.rows_per_page; ++row) {
    const int64_t data = rows.data(unit, row) - base;
    out.push_back({data, data + ops::RowDataBytes(rows.format, rows.channels)});
    const int64_t scale = rows.scale(unit, row) - base;
    if (const int64_t bytes = ops::RowScaleBytes(rows.format))
      out.push_back({scale, scale + bytes});
  }
}

// Every row, scale and state of every layer and unit has its own bytes, inside its unit.
bool Disjoint(Ranges ranges, int64_t limit) {
  std::sort(ranges.begin(), ranges.end());
  int64_t end = 0;
  for (const auto& range : ranges) {
    if (range.first < end) return false;
    end = range.second;
  }
  return end <= limit;
}

RC_GTEST_PROP(Geometry, ViewsOfAllLayersAndUnitsAreDisjointAndAligned, ()) {
  const ModelConfig config = RandomConfig();
  const Geometry geometry = *MakeGeometry(config, RandomOptions());
  constexpr int kUnits = 2;
  const Reservation block_memory = *Reservation::Make(kUnits * geometry.block_bytes, "blocks");
  const Reservation slot_memory = *Reservation::Make(kUnits * geometry.slot_bytes, "slots");
  std::byte* const blocks = block_memory.data();
  std::byte* const slots = slot_memory.data();
  const KvView view = MakeKvView(geometry, config.num_layers, blocks, slots);
  Ranges in_blocks, in_slots;
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const LayerKv& kv = view.layers[layer];
    const LayerKind kind = config.kind(layer);
    RC_ASSERT((kv.compressed.base != nullptr) == (kind != LayerKind::kSwa));
    RC_ASSERT((kv.index_keys.base != nullptr) == (kind == LayerKind::kCsa));
    RC_ASSERT((kv.state != nullptr) == (kind != LayerKind::kSwa));
    RC_ASSERT((kv.index_state != nullptr) == (kind == LayerKind::kCsa));
    RC_ASSERT((kv.ring.base - slots) % 64 == 0);
    for (int unit = 0; unit < kUnits; ++unit) {
      AddRows(kv.ring, unit, slots, in_slots);
      if (kind == LayerKind::kSwa) continue;
      RC_ASSERT((kv.compressed.data(unit, 0) - blocks) % 64 == 0);
      AddRows(kv.compressed, unit, blocks, in_blocks);
      const auto add_state = [&](float* state, int64_t stride, int channels) {
        const int ratio = kind == LayerKind::kCsa ? 4 : 128;
        const int64_t begin = reinterpret_cast<std::byte*>(state + unit * stride) - slots;
        RC_ASSERT(begin % 64 == 0);
        in_slots.push_back({begin, begin + 4 * ops::CompressorStateFloats(ratio, channels)});
      };
      add_state(kv.state, kv.state_stride, 512);
      if (kind != LayerKind::kCsa) continue;
      AddRows(kv.index_keys, unit, blocks, in_blocks);
      add_state(kv.index_state, kv.index_state_stride, 128);
    }
  }
  RC_ASSERT(Disjoint(in_blocks, kUnits * geometry.block_bytes));
  RC_ASSERT(Disjoint(in_slots, kUnits * geometry.slot_bytes));
}

}  // namespace
}  // namespace fathom
