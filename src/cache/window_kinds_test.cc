#include "cache/window_kinds.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "ops/numerics.h"

namespace fathom {
namespace {

ModelConfig Model(std::vector<int> ratios) {
  ModelConfig config;
  config.num_layers = static_cast<int>(ratios.size());
  config.compress_ratios.assign(ratios.begin(), ratios.end());
  config.max_position_embeddings = 1 << 20;
  return config;
}

Geometry Make(std::vector<int> ratios, CacheOptions options = {}) {
  return *MakeGeometry(Model(std::move(ratios)), options);
}

// The released schedules: Flash two windows-only layers and then c4a and c128a in turn; Pro 30
// and 31.
std::vector<int> Flash() {
  std::vector<int> ratios{0, 0};
  for (int i = 0; i < 20; ++i) ratios.insert(ratios.end(), {4, 128});
  ratios.push_back(4);
  return ratios;
}

TEST(WindowKinds, BundlesOfFlashHaveThePublishedSizes) {
  const WindowKinds kinds(Make(Flash()));
  EXPECT_EQ(kinds.BundleBytes(2'048), 43 * 128 * 584 + 21 * 4 * 2 * (512 + 128) * 4);
  EXPECT_NEAR(static_cast<double>(kinds.BundleBytes(128)) / (1 << 20), 3.5, 0.05);
  // At 4 mod 128 the c128 record, at 1 mod 4 the unfinished group of c4 too.
  EXPECT_EQ(kinds.BundleBytes(132) - kinds.BundleBytes(128), 20 * 3 * 512 * 4);
  EXPECT_EQ(kinds.BundleBytes(133) - kinds.BundleBytes(132), 21 * 4 * 4 * (512 + 128) * 4);
  EXPECT_EQ(kinds.BundleBytes(133), kinds.max_bundle_bytes());
}

TEST(WindowKinds, RunsCoverTheBundleOnceAndStayInsideTheSlot) {
  for (const int depth : {0, 1, 7, 128}) {
    const Geometry geometry = Make({0, 4, 128, 4}, {.draft_depth = depth});
    const WindowKinds kinds(geometry);
    for (const int64_t tokens : {1, 3, 4, 127, 128, 129, 130, 255, 256, 1'000, 1'001}) {
      int64_t at = 0;
      std::vector<bool> used(static_cast<size_t>(geometry.slot_bytes));
      for (const ByteRun& run : kinds.Runs(tokens)) {
        EXPECT_EQ(run.bundle, at);
        at += run.bytes;
        ASSERT_GE(run.slot, 0);
        ASSERT_LE(run.slot + run.bytes, geometry.slot_bytes);
        for (int64_t i = run.slot; i < run.slot + run.bytes; ++i) {
          ASSERT_FALSE(used[static_cast<size_t>(i)]) << tokens;
          used[static_cast<size_t>(i)] = true;
        }
      }
      EXPECT_EQ(at, kinds.BundleBytes(tokens));
    }
  }
}

// The serial form does not know the ring's length: saved from one, restored into another, every
// position of the window is where the other ring looks for it.
TEST(WindowKinds, ABundleFitsRingsOfOtherLengths) {
  const Geometry plain = Make({0, 4}), longer = Make({0, 4}, {.draft_depth = 5});
  const WindowKinds from(plain), to(longer);
  ASSERT_EQ(from.max_bundle_bytes(), to.max_bundle_bytes());
  const auto row = [](const Geometry& geometry, std::vector<std::byte>* slot, int64_t position) {
    const KindGeometry& window = geometry.of(CacheKind::kWindowKv);
    return slot->data() + window.offset + position % window.rows_per_page * 576;
  };
  for (const int64_t tokens : {50, 128, 131, 900}) {
    std::vector<std::byte> source(static_cast<size_t>(plain.slot_bytes));
    std::vector<std::byte> bundle(static_cast<size_t>(from.max_bundle_bytes()));
    std::vector<std::byte> target(static_cast<size_t>(longer.slot_bytes));
    for (int64_t p = std::max<int64_t>(0, tokens - 128); p < tokens; ++p) {
      std::memcpy(row(plain, &source, p), &p, sizeof(p));
    }
    for (const ByteRun& run : from.Runs(tokens)) {
      std::memcpy(bundle.data() + run.bundle, source.data() + run.slot, run.bytes);
    }
    for (const ByteRun& run : to.Runs(tokens)) {
      std::memcpy(target.data() + run.slot, bundle.data() + run.bundle, run.bytes);
    }
    for (int64_t p = std::max<int64_t>(0, tokens - 128); p < tokens; ++p) {
      EXPECT_EQ(std::memcmp(row(longer, &target, p), &p, sizeof(p)), 0) << p << " of " << tokens;
    }
  }
}

TEST(WindowKinds, RollingBackKeepsWindowsWithinTheDraftDepth) {
  const WindowKinds kinds(Make({0, 4, 128}, {.draft_depth = 5}));
  EXPECT_TRUE(kinds.KeepsWindow(1'000, 1'000));
  EXPECT_TRUE(kinds.KeepsWindow(1'005, 1'000));
  EXPECT_FALSE(kinds.KeepsWindow(1'006, 1'000));
  EXPECT_FALSE(kinds.KeepsWindow(999, 1'000));
  int64_t states = 0, all = 0;
  for (const ByteRun& run : kinds.StateRuns(130)) states += run.bytes;
  for (const ByteRun& run : kinds.Runs(130)) all += run.bytes;
  EXPECT_EQ(all - states, 3 * 128 * 584);
}

}  // namespace
}  // namespace fathom
