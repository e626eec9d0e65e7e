// What these prove: sorting, grouping, SwiGLU, re-quantising and combining give the reference's
// result for every weight format and batch, and a token's row has the same bits whatever tokens
// stand around it, streamed or tiled.
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "cuda/linear_device.h"
#include "ops/experts/cuda.h"
#include "ops/experts/experts.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

using testing::OwnedWeight;
using testing::PaddedMatrix;

// The host's weights for the reference, the same ones packed for the device.
struct Layer {
  Layer(WeightFormat routed, WeightFormat shared_format, int64_t width, int64_t inner, int count) {
    owned.reserve(3 * (count + 1));
    const auto make = [&](WeightFormat format) {
      const auto seed = static_cast<uint32_t>(owned.size());
      owned.emplace_back(format, inner, width, seed + 1);
      owned.emplace_back(format, width, inner, seed + 2);
      owned.emplace_back(format, inner, width, seed + 3);
      const size_t at = owned.size() - 3;
      return ExpertWeights{owned[at].weight, owned[at + 1].weight, owned[at + 2].weight};
    };
    for (int e = 0; e < count; ++e) experts.push_back(make(routed));
    shared = make(shared_format);
    PackExpertsCuda(experts.data(), count, shared);
  }
  std::vector<OwnedWeight> owned;
  std::vector<ExpertWeights> experts;
  ExpertWeights shared;
};

struct Choice {
  Choice(int64_t rows, int experts, int k, uint32_t seed) : top_k(k) {
    std::mt19937 rng(seed);
    std::vector<int32_t> ids(experts);
    for (int64_t t = 0; t < rows; ++t) {
      std::iota(ids.begin(), ids.end(), 0);
      // Few experts take most tokens, and the last ones may take none.
      for (int j = 0; j < k; ++j) {
        const auto left = static_cast<uint32_t>(experts - j);
        std::swap(ids[j], ids[j + std::min(rng() % left, rng() % left)]);
      }
      std::sort(ids.begin(), ids.begin() + k);
      chosen.insert(chosen.end(), ids.begin(), ids.begin() + k);
      for (int j = 0; j < k; ++j) weights.push_back(0.1f + static_cast<float>(rng() % 100) / 60);
    }
  }
  Choice Slice(int64_t first, int64_t rows) const {
    Choice part(0, top_k, top_k, 0);
    part.chosen.assign(chosen.begin() + first * top_k, chosen.begin() + (first + rows) * top_k);
    part.weights.assign(weights.begin() + first * top_k, weights.begin() + (first + rows) * top_k);
    return part;
  }
  int top_k;
  std::vector<int32_t> chosen;
  std::vector<float> weights;
};

ExpertsArgs Args(const Layer& layer, int k, Numerics numerics) {
  return {.experts = layer.experts.data(),
          .num_experts = static_cast<int>(layer.experts.size()),
          .shared = &layer.shared,
          .top_k = k,
          .limit = 1.0f,  // low, so that the clamp matters
          .shared_limit = std::numeric_limits<float>::infinity(),
          .numerics = numerics};
}

PaddedMatrix RunCuda(const Layer& layer, const PaddedMatrix& z, const Choice& choice,
                     Numerics numerics, int64_t padding) {
  const DType type = DeviceActivationType(numerics);
  const GuardedMatrix in(z, z.cols + padding, type);
  const GuardedMatrix out(z.rows, z.cols, z.cols + padding, type);
  const DeviceArray<int32_t> chosen(choice.chosen);
  const DeviceArray<float> weights(choice.weights);
  ExpertsArgs args = Args(layer, choice.top_k, numerics);
  args.z = in.view();
  args.y = out.view();
  args.chosen = chosen.data();
  args.weights = weights.data();
  DeviceArray<uint8_t> scratch(ExpertsCudaScratchBytes(args, z.rows));
  ExpertsCuda(args, scratch.data(), nullptr);
  return out.Download();
}

struct Case {
  WeightFormat routed, shared;
  int64_t width, inner;
  int experts, k;

  Layer MakeLayer() const { return {routed, shared, width, inner, experts}; }
};

void ExpectMatchesReference(const Case& c, const Layer& layer, int64_t rows, Numerics numerics) {
  SCOPED_TRACE("rows " + std::to_string(rows) + " width " + std::to_string(c.width) + " experts " +
               std::to_string(c.experts) + (numerics == Numerics::kProduct ? " product" : ""));
  const Choice choice(rows, c.experts, c.k, static_cast<uint32_t>(rows));
  PaddedMatrix z(rows, c.width, 0);
  z.Randomise(3, numerics == Numerics::kProduct);
  PaddedMatrix expected(rows, c.width, 0);
  ExpertsArgs args = Args(layer, c.k, numerics);
  args.z = z.view();
  args.y = expected.view();
  args.chosen = choice.chosen.data();
  args.weights = choice.weights.data();
  ForRowSlices(rows, [&](int64_t first, int64_t count) {
    ExpertsArgs slice = args;
    slice.z = RowsOf(args.z, first, count);
    slice.y = RowsOf(args.y, first, count);
    slice.chosen = args.chosen + first * c.k;
    slice.weights = args.weights + first * c.k;
    ExpertsReference(slice);
  });
  const PaddedMatrix got = RunCuda(layer, z, choice, numerics, rows % 2 == 0 ? 0 : 5);
  // kProduct rounds g, u and a to bf16 and a to e4m3 (2^-4 relative): a sum that differs in
  // its last bit may cross one of those edges, which moves one term of many by that much.
  const bool product = numerics == Numerics::kProduct;
  ASSERT_LE(RelativeL2(got.data, expected.data), product ? 1e-2 : 1e-5);
  double largest = 0;
  double worst = 0;
  for (size_t i = 0; i < got.data.size(); ++i) {
    largest = std::max<double>(largest, std::fabs(expected.data[i]));
    worst = std::max<double>(worst, std::fabs(got.data[i] - expected.data[i]));
  }
  ASSERT_LE(worst, (product ? 0.02 : 1e-5) * largest);
}

constexpr auto kFp4 = WeightFormat::kFp4Block32;
constexpr auto kFp8 = WeightFormat::kFp8Block128;
constexpr auto kBf16 = WeightFormat::kBF16;

TEST(ExpertsCuda, EveryFormatMatchesTheReference) {
  FATHOM_NEEDS_DEVICE();
  constexpr Case kCases[] = {
      {kFp4, kFp8, 256, 256, 8, 2},  {kFp4, kFp8, 320, 96, 12, 3},
      {kFp4, kFp8, 96, 160, 5, 3},   {kFp4, kFp8, 64, 64, 70, 6},
      {kFp8, kFp8, 136, 72, 4, 1},   {kFp4, kBf16, 64, 416, 3, 3},
      {kBf16, kBf16, 40, 100, 6, 2}, {WeightFormat::kF32, kFp8, 32, 64, 2, 1},
  };
  for (const Case& c : kCases) {
    const Layer layer = c.MakeLayer();
    for (const int64_t rows : {1, 2, 3, 7, 8, 9, 16, 127, 129, 512}) {
      if (rows * (c.k + 1) * c.width * c.inner > 50'000'000) continue;  // the reference is slow
      for (const auto numerics : {Numerics::kProduct, Numerics::kReference}) {
        ExpectMatchesReference(c, layer, rows, numerics);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Every kernel, with as little work as lets every stage of its ring be filled again.
TEST(ExpertsCuda, SmallLayersOfEveryKernel) {
  FATHOM_NEEDS_DEVICE();
  struct Small {
    Case c;
    std::vector<int64_t> rows;
  };
  const Small smalls[] = {
      {{kFp4, kFp8, 1280, 1184, 3, 2}, {1}},   // a single token
      {{kFp4, kFp8, 704, 64, 2, 1}, {5, 70}},  // streamed, in tiles of 64 rows
      {{kFp8, kFp4, 96, 64, 2, 1}, {5, 300}},  // of 128 rows
      {{kBf16, kBf16, 40, 100, 2, 1}, {5, 70, 300}},
      {{WeightFormat::kF32, kFp8, 32, 64, 2, 1}, {5}},
  };
  for (const Small& small : smalls) {
    const Layer layer = small.c.MakeLayer();
    for (const int64_t rows : small.rows) {
      ExpectMatchesReference(small.c, layer, rows, Numerics::kProduct);
      if (HasFatalFailure()) return;
    }
    ExpectMatchesReference(small.c, layer, 3, Numerics::kReference);
  }
}

TEST(ExpertsCuda, ARowHasTheSameBitsInEveryBatch) {
  FATHOM_NEEDS_DEVICE();
  constexpr int64_t kAll = 520;
  const Layer layer(WeightFormat::kFp4Block32, WeightFormat::kFp8Block128, 256, 288, 6);
  const Choice choice(kAll, 6, 2, 9);
  for (const auto numerics : {Numerics::kProduct, Numerics::kReference}) {
    PaddedMatrix z(kAll, 256, 0);
    z.Randomise(4, true);
    const PaddedMatrix all = RunCuda(layer, z, choice, numerics, 0);
    for (const int64_t rows : {1, 2, 3, 8, 9, 31, 32, 33, 100, 257}) {
      for (const int64_t first : {int64_t{0}, 260 - rows / 2, kAll - rows}) {
        const PaddedMatrix part =
            RunCuda(layer, Slice(z, first, rows), choice.Slice(first, rows), numerics, 8);
        ASSERT_TRUE(SameBits(part, Slice(all, first, rows))) << first << " + " << rows;
      }
    }
  }
}

TEST(ExpertsCuda, ASingleTokenHasTheBitsOfABatch) {
  FATHOM_NEEDS_DEVICE();
  for (const Case& c : {Case{kFp4, kFp8, 1280, 1184, 9, 6}, Case{kFp4, kFp8, 320, 96, 12, 3},
                        Case{kFp4, kFp8, 416, 2304, 8, 5}, Case{kFp8, kFp4, 160, 64, 5, 1},
                        Case{kFp8, kFp8, 4608, 40, 7, 3}, Case{kFp4, kFp4, 512, 2048, 8, 6},
                        Case{kFp4, kBf16, 256, 128, 8, 6}, Case{kFp4, kFp8, 256, 128, 9, 7},
                        // More tiles of outputs than blocks.
                        Case{kFp4, kFp8, 4352, 416, 6, 3}, Case{kFp4, kFp8, 4288, 1312, 3, 2}}) {
    constexpr int64_t kAll = 40;
    const Layer layer = c.MakeLayer();
    const Choice choice(kAll, c.experts, c.k, 3);
    PaddedMatrix z(kAll, c.width, 0);
    z.Randomise(5, true);
    const PaddedMatrix all = RunCuda(layer, z, choice, Numerics::kProduct, 0);
    for (int64_t t = 0; t < kAll; ++t) {
      const PaddedMatrix alone =
          RunCuda(layer, Slice(z, t, 1), choice.Slice(t, 1), Numerics::kProduct, 8);
      ASSERT_TRUE(SameBits(alone, Slice(all, t, 1)))
          << "width " << c.width << " inner " << c.inner << " row " << t;
    }
  }
}

TEST(ExpertsCuda, OneExpertMayTakeEveryTokenAndOthersNone) {
  FATHOM_NEEDS_DEVICE();
  const Layer layer(WeightFormat::kFp4Block32, WeightFormat::kFp8Block128, 128, 96, 40);
  for (const int64_t rows : {5, 64, 200}) {
    Choice choice(rows, 40, 1, 1);
    for (const int32_t expert : {0, 31, 32, 39}) {
      std::fill(choice.chosen.begin(), choice.chosen.end(), expert);
      PaddedMatrix z(rows, 128, 0);
      z.Randomise(6, true);
      const PaddedMatrix together = RunCuda(layer, z, choice, Numerics::kProduct, 0);
      for (const int64_t t : {int64_t{0}, rows / 2, rows - 1}) {
        const PaddedMatrix alone =
            RunCuda(layer, Slice(z, t, 1), choice.Slice(t, 1), Numerics::kProduct, 0);
        ASSERT_TRUE(SameBits(alone, Slice(together, t, 1))) << "expert " << expert << " row " << t;
      }
    }
  }
}

}  // namespace
}  // namespace fathom::ops
