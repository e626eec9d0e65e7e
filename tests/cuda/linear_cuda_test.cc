// What these prove: LinearCuda computes W x of every format within the rounding of f32 sums, for
// every shape and number of rows, writes nothing else, and gives a row the same bits whatever
// kernel, batch or place it is computed in.
#include <string>
#include <utility>
#include <vector>

#include "cuda/linear_device.h"
#include "ops/linear/linear.h"
#include "ops/testing.h"

namespace fathom::ops {
namespace {

using testing::ExpectClose;
using testing::OwnedWeight;
using testing::PaddedMatrix;

constexpr WeightFormat kFormats[] = {WeightFormat::kF32, WeightFormat::kBF16,
                                     WeightFormat::kFp8Block128, WeightFormat::kFp4Block32};
constexpr int64_t kRows[] = {1, 2, 3, 7, 8, 9, 16, 64, 65, 127, 129, 512};

PaddedMatrix RunCuda(const LinearWeight& weight, const PaddedMatrix& x, Numerics numerics,
                     bool round, DType x_type, DType y_type, int64_t padding = 3,
                     CudaWay way = CudaWay::kFaster) {
  const GuardedMatrix in(x, x.cols + padding, x_type);
  const GuardedMatrix out(x.rows, weight.out, weight.out + padding, y_type);
  DeviceArray<uint8_t> scratch(LinearCudaScratchBytes(x.rows, weight.in));
  LinearCuda({.x = in.view(),
              .weight = &weight,
              .y = out.view(),
              .numerics = numerics,
              .round_output = round},
             scratch.data(), nullptr, way);
  return out.Download();
}

PaddedMatrix RunReference(const LinearWeight& weight, PaddedMatrix x, Numerics numerics,
                          bool round) {
  PaddedMatrix y(x.rows, weight.out, 0);
  ForRowSlices(x.rows, [&](int64_t first, int64_t count) {
    LinearReference({.x = RowsOf(x.view(), first, count),
                     .weight = &weight,
                     .y = RowsOf(y.view(), first, count),
                     .numerics = numerics,
                     .round_output = round});
  });
  return y;
}

void Compare(const OwnedWeight& owned, const LinearWeight& device, int64_t rows, Numerics numerics,
             bool round, DType x_type, DType y_type, int64_t padding) {
  // Both ways of many rows.
  const CudaWay way = padding % 2 == 0 ? CudaWay::kTiles : CudaWay::kStream;
  SCOPED_TRACE("format " + std::to_string(static_cast<int>(device.format)) + " " +
               std::to_string(rows) + "x" + std::to_string(device.out) + "x" +
               std::to_string(device.in) + (numerics == Numerics::kProduct ? " product" : "") +
               (round ? " rounded" : "") + " types " + std::to_string(static_cast<int>(x_type)) +
               " " + std::to_string(static_cast<int>(y_type)) + " padding " +
               std::to_string(padding));
  PaddedMatrix x(rows, device.in, 0);
  x.Randomise(static_cast<uint32_t>(rows), x_type == DType::kBF16);
  PaddedMatrix want = RunReference(owned.weight, x, numerics, round);
  PaddedMatrix got = RunCuda(device, x, numerics, round, x_type, y_type, padding, way);
  if (numerics == Numerics::kProduct && device.format == WeightFormat::kBF16) {
    for (float& value : x.data) value = RoundBf16(value);  // what the bound is about
  }
  const bool rounded = y_type == DType::kBF16 || (round && numerics == Numerics::kProduct);
  ExpectClose(owned.weight, x.view(), want.view(), got.view(), rounded);
  // Rounding to bf16 may fall the other way where a sum lies at an edge.
  EXPECT_LE(RelativeL2(got.data, want.data), rounded ? 3e-3 : 1e-5);
}

TEST(LinearCuda, EveryFormatAndShapeMatchesTheReference) {
  FATHOM_NEEDS_DEVICE();
  struct Shape {
    int64_t out, in;
  };
  constexpr Shape kShapes[] = {{24, 320},  {777, 160}, {8, 256},   {32, 96},   {1, 128},
                               {64, 416},  {130, 64},  {97, 1056}, {256, 128}, {33, 32},
                               {160, 384}, {96, 2048}, {48, 8192}};
  for (const auto format : kFormats) {
    for (const auto& shape : kShapes) {
      const OwnedWeight owned(format, shape.out, shape.in, 11);
      const LinearWeight device = OnDevice(owned.weight);
      for (const int64_t rows : kRows) {
        if (rows * shape.out * shape.in > 50'000'000) continue;  // the reference is slow
        Compare(owned, device, rows, Numerics::kProduct, true, DType::kBF16, DType::kBF16, 0);
        Compare(owned, device, rows, Numerics::kProduct, false, DType::kBF16, DType::kF32, 5);
        Compare(owned, device, rows, Numerics::kReference, false, DType::kF32, DType::kF32, 3);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Every kernel, with as little work as lets every stage of its ring be filled again.
TEST(LinearCuda, SmallProductsOfEveryKernel) {
  FATHOM_NEEDS_DEVICE();
  constexpr auto kBf16 = WeightFormat::kBF16;
  constexpr auto kFp8 = WeightFormat::kFp8Block128;
  constexpr auto kFp4 = WeightFormat::kFp4Block32;
  constexpr int64_t kByWarp = 264 * 8 / 2 * 16;  // outputs of enough jobs for half of all warps
  struct Small {
    WeightFormat format;
    int64_t out, in;
    std::vector<int64_t> rows;
  };
  const Small smalls[] = {
      // Streamed, a block a job: up to 8 rows quantised by the block or before, up to 16, up to 32.
      {kFp8, 24, 5120, {1, 8, 9}},
      {kFp8, 40, 640, {3, 17, 33}},
      {kFp4, 24, 9216, {1, 8, 9}},
      {kFp4, 40, 640, {3, 17}},
      {kBf16, 24, 3072, {1, 9, 17}},
      // A warp a job.
      {kFp8, kByWarp, 640, {1}},
      {kFp8, kByWarp, 128, {9, 17}},
      {kFp4, kByWarp, 1152, {1}},
      {kFp4, kByWarp, 128, {9}},
      {kBf16, kByWarp, 384, {1}},
      {kBf16, kByWarp, 128, {9, 17}},
      // Tiles of 64 and of 128 rows.
      {kFp8, 136, 704, {40, 70}},
      {kFp4, 136, 704, {40, 70}},
      {kBf16, 136, 320, {40, 70}},
      {WeightFormat::kF32, 72, 96, {33}},
  };
  for (const Small& small : smalls) {
    const OwnedWeight owned(small.format, small.out, small.in, 7);
    const LinearWeight device = OnDevice(owned.weight);
    for (const int64_t rows : small.rows) {
      // 33 rows are streamed, more are cut into tiles.
      Compare(owned, device, rows, Numerics::kProduct, false, DType::kBF16, DType::kF32,
              rows <= 33 ? 5 : 8);
      if (HasFatalFailure()) return;
    }
  }
  const OwnedWeight owned(kFp8, 72, 96, 7);
  Compare(owned, OnDevice(owned.weight), 33, Numerics::kReference, false, DType::kF32, DType::kF32,
          3);
}

TEST(LinearCuda, OddInputsAndFloatRowsAreLegal) {
  FATHOM_NEEDS_DEVICE();
  for (const auto format : kFormats) {
    for (const int64_t in : {1, 2, 3, 5, 63, 127, 129, 257, 259}) {
      if (format == WeightFormat::kFp4Block32) continue;  // in % 32 == 0
      const OwnedWeight owned(format, 40, in, 3);
      const LinearWeight device = OnDevice(owned.weight);
      for (const int64_t rows : {1, 6, 17, 70}) {
        for (const int64_t padding : {0, 1, 8}) {
          Compare(owned, device, rows, Numerics::kProduct, false, DType::kBF16, DType::kF32,
                  padding);
          Compare(owned, device, rows, Numerics::kProduct, true, DType::kF32, DType::kF32, padding);
          Compare(owned, device, rows, Numerics::kReference, true, DType::kF32, DType::kF32,
                  padding);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(LinearCuda, EveryStoredCodeIsExpandedExactly) {
  // One-hot inputs, exact in any form, read the weights back: all finite e4m3 codes (subnormals
  // included), all e2m1 codes, scales from 2^-127 up to those that need two factors.
  FATHOM_NEEDS_DEVICE();
  for (const auto format : kFormats) {
    OwnedWeight owned(format, 48, 256, 5);
    if (format == WeightFormat::kFp8Block128) {
      for (size_t i = 0; i < owned.data.size(); ++i) {
        const auto code = static_cast<uint8_t>(i * 7);
        owned.data[i] = (code & 0x7f) == 0x7f ? 0x7e : code;
      }
      owned.scale = {100, 140};
    }
    if (format == WeightFormat::kFp4Block32) {
      for (size_t i = 0; i < owned.data.size(); ++i) owned.data[i] = static_cast<uint8_t>(i * 7);
      for (size_t i = 0; i < owned.scale.size(); ++i) {
        owned.scale[i] = static_cast<uint8_t>(i % 250);
      }
    }
    owned.Pack();
    const LinearWeight device = OnDevice(owned.weight);
    for (const auto numerics : {Numerics::kProduct, Numerics::kReference}) {
      for (const int64_t rows : {1, 4, 64, 256}) {
        for (int64_t base = 0; base < 256; base += rows) {
          PaddedMatrix x(rows, 256, 0);
          x.Fill(0.0f);
          for (int64_t t = 0; t < rows; ++t) x.data[t * 256 + base + t] = 1.0f;
          const PaddedMatrix y = RunCuda(device, x, numerics, false, DType::kF32, DType::kF32);
          for (int64_t t = 0; t < rows; ++t) {
            for (int64_t o = 0; o < 48; ++o) {
              ASSERT_EQ(y.data[t * 48 + o], WeightAt(owned.weight, o, base + t))
                  << "format " << static_cast<int>(format) << " rows " << rows << " input "
                  << base + t << " output " << o;
            }
          }
        }
      }
    }
  }
}

TEST(LinearCuda, ARowHasTheSameBitsInEveryBatchAndPlace) {
  FATHOM_NEEDS_DEVICE();
  for (const auto format : kFormats) {
    for (const int64_t in : {64, 416, 1024, 1536, 4096}) {
      const OwnedWeight owned(format, 203, in, 8);
      const LinearWeight device = OnDevice(owned.weight);
      for (const auto numerics : {Numerics::kProduct, Numerics::kReference}) {
        const DType type = DeviceActivationType(numerics);
        PaddedMatrix x(512, in, 0);
        x.Randomise(17, true);
        const PaddedMatrix all = RunCuda(device, x, numerics, false, type, DType::kF32);
        for (const int64_t rows : kRows) {
          for (const int64_t first : {int64_t{0}, (512 - rows) / 2, 512 - rows}) {
            const CudaWay way = first == 0 ? CudaWay::kTiles : CudaWay::kStream;
            const PaddedMatrix part =
                RunCuda(device, Slice(x, first, rows), numerics, false, type, DType::kF32, 3, way);
            ASSERT_TRUE(SameBits(part, Slice(all, first, rows)))
                << "format " << static_cast<int>(format) << " in " << in << " rows " << first
                << " to " << first + rows;
          }
        }
      }
    }
  }
}

TEST(LinearCuda, ManyOutputsHaveTheSameBitsStreamedAndTiled) {
  // Several tiles of outputs for every block, and for every warp: what is on its way goes on from
  // one to the next. Segments of no unit, of one, and of different lengths.
  FATHOM_NEEDS_DEVICE();
  struct Shape {
    int64_t out, in;
  };
  constexpr Shape kShapes[] = {{9000, 160},  {9000, 1152}, {5000, 2944},
                               {70000, 128}, {34000, 416}, {34000, 1024}};
  for (const auto format :
       {WeightFormat::kBF16, WeightFormat::kFp8Block128, WeightFormat::kFp4Block32}) {
    for (const auto& shape : kShapes) {
      const OwnedWeight owned(format, shape.out, shape.in, 4);
      const LinearWeight device = OnDevice(owned.weight);
      PaddedMatrix x(65, shape.in, 0);
      x.Randomise(23, true);
      const auto run = [&](const PaddedMatrix& rows, CudaWay way) {
        return RunCuda(device, rows, Numerics::kProduct, false, DType::kBF16, DType::kF32, 3, way);
      };
      const PaddedMatrix all = run(x, CudaWay::kTiles);
      for (const int64_t rows : {1, 3, 8, 9, 17, 65}) {
        const PaddedMatrix part = run(Slice(x, 65 - rows, rows), CudaWay::kStream);
        ASSERT_TRUE(SameBits(part, Slice(all, 65 - rows, rows)))
            << "format " << static_cast<int>(format) << " " << rows << "x" << shape.out << "x"
            << shape.in;
      }
    }
  }
}

struct Part {
  WeightFormat format;
  int64_t out;
  bool round;
  DType y_type;
};

// Products of one x, computed together into rows that lie apart, and each on its own.
void CompareTogether(const std::vector<Part>& parts, int64_t in, int64_t rows) {
  SCOPED_TRACE(std::to_string(parts.size()) + " products of " + std::to_string(rows) + " rows of " +
               std::to_string(in));
  PaddedMatrix x(rows, in, 0);
  x.Randomise(static_cast<uint32_t>(in + rows), true);
  const GuardedMatrix device_x(x, in + 8, DType::kBF16);
  std::vector<OwnedWeight> owned;
  std::vector<LinearWeight> weights;
  std::vector<GuardedMatrix> together, apart;
  for (const Part& part : parts) {
    owned.emplace_back(part.format, part.out, in, static_cast<uint32_t>(owned.size() + 5));
    if (part.format == WeightFormat::kFp8Block128 && part.out % 3 == 0) {
      owned.back().scale[0] = 140;  // takes two factors
      owned.back().Pack();
    }
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    weights.push_back(OnDevice(owned[i].weight));
    for (auto* out : {&together, &apart}) {
      out->emplace_back(rows, parts[i].out, parts[i].out + 3, parts[i].y_type);
    }
  }
  const auto products = [&](const std::vector<GuardedMatrix>& out) {
    std::vector<LinearArgs> list;
    for (size_t i = 0; i < parts.size(); ++i) {
      list.push_back({.x = device_x.view(),
                      .weight = &weights[i],
                      .y = out[i].view(),
                      .round_output = parts[i].round});
    }
    return list;
  };
  ASSERT_TRUE(LinearsCudaTake(products(together)));
  LinearsCuda(products(together), nullptr);
  DeviceArray<uint8_t> scratch(LinearCudaScratchBytes(rows, in));
  for (const LinearArgs& product : products(apart)) LinearCuda(product, scratch.data(), nullptr);
  for (size_t i = 0; i < parts.size(); ++i) {
    EXPECT_TRUE(SameBits(together[i].Download(), apart[i].Download())) << "product " << i;
  }
}

TEST(LinearCuda, ProductsOfOneInputHaveTheSameBitsTogether) {
  FATHOM_NEEDS_DEVICE();
  constexpr WeightFormat kFp8 = WeightFormat::kFp8Block128, kBf16 = WeightFormat::kBF16;
  constexpr DType kHalf = DType::kBF16, kFloat = DType::kF32;
  // A layer's projections, in the order of the model.
  const std::vector<Part> layer = {
      {kFp8, 96, true, kHalf},    {kFp8, 64, true, kHalf},    {kBf16, 40, false, kFloat},
      {kBf16, 40, false, kFloat}, {kBf16, 17, true, kHalf},   {kBf16, 16, false, kFloat},
      {kBf16, 16, false, kFloat}, {kFp8, 203, false, kFloat},
  };
  const std::vector<Part> two(layer.begin(), layer.begin() + 2);
  const std::vector<Part> plain(layer.begin() + 2, layer.begin() + 4);
  for (const auto& [in, most] : {std::pair{128, 8}, {256, 8}, {1152, 8}, {4096, 4}}) {
    for (const int rows : {1, 2, most}) {
      CompareTogether(layer, in, rows);
      CompareTogether(two, in, rows);
      CompareTogether(plain, in, rows);
    }
  }
  // Several tiles for every block, of every format, and for every warp.
  CompareTogether({{kBf16, 5000, false, kFloat}, {kFp8, 5000, true, kHalf}}, 384, 3);
  CompareTogether({{kFp8, 3000, false, kFloat}, {kFp8, 6000, true, kHalf}}, 256, 2);
  CompareTogether({{kFp8, 24'000, false, kFloat}, {kFp8, 9'001, true, kHalf}}, 256, 3);
}

TEST(LinearCuda, WhatIsNotTakenTogether) {
  FATHOM_NEEDS_DEVICE();
  const OwnedWeight owned(WeightFormat::kFp8Block128, 32, 4096, 1);
  const OwnedWeight fp4(WeightFormat::kFp4Block32, 32, 4096, 1);
  const GuardedMatrix x(8, 4096, 4096, DType::kBF16), y(8, 32, 32, DType::kBF16);
  const auto takes = [&](int64_t rows, const auto& change) {
    const LinearArgs args = {
        .x = RowsOf(x.view(), 0, rows), .weight = &owned.weight, .y = RowsOf(y.view(), 0, rows)};
    std::vector<LinearArgs> products = {args, args};
    change(products);
    return LinearsCudaTake(products);
  };
  const auto as_it_is = [](auto&) {};
  EXPECT_TRUE(takes(4, as_it_is));
  EXPECT_FALSE(takes(5, as_it_is));
  EXPECT_FALSE(takes(1, [](auto& p) { p.pop_back(); }));
  EXPECT_FALSE(takes(1, [](auto& p) { p.resize(9, p[0]); }));
  EXPECT_FALSE(takes(1, [](auto& p) { p[1].numerics = Numerics::kReference; }));
  EXPECT_FALSE(takes(1, [&](auto& p) { p[1].weight = &fp4.weight; }));
  EXPECT_FALSE(takes(1, [&](auto& p) { p[1].x = RowsOf(x.view(), 1, 1); }));
  EXPECT_FALSE(takes(1, [](auto& p) {
    for (LinearArgs& args : p) args.x.dtype = DType::kF32;
  }));
}

}  // namespace
}  // namespace fathom::ops
