// A product of FP8 or FP4 weights with many rows: a block of three warpgroups makes 128 outputs x
// kRows rows. Two of them bring weights from memory into registers, expand them there and multiply;
// the third copies the rows, prepared in the order of the products (Form::kWide...), into shared
// memory, half a unit a stage.
#pragma once

#include "ops/cuda/hopper.cuh"
#include "ops/linear/cuda_skinny.cuh"
#include "ops/linear/cuda_tile.cuh"

namespace fathom::ops::cuda {

inline constexpr int kWideOutputs = 128;
inline constexpr int kWideThreads = 384;
inline constexpr int kWideStages = 8;
inline constexpr int kWideAhead = 5;  // stages on their way
// Of a thread; of all three warpgroups no more than the 65,536 of a multiprocessor.
inline constexpr int kWideRegisters = 232, kWideProducerRegisters = 40;

template <int kRows>
struct WideShared {
  char panel[kWideStages][kRows * 128];  // 64 channels of each row, swizzled
  uint64_t full[kWideStages];            // a warp of the producer arrives when its pieces are there
  uint64_t empty[kWideStages];           // a warp of the consumers, when it has read them
};

template <int kRows>
inline constexpr int kWideSharedBytes = static_cast<int>(sizeof(WideShared<kRows>)) + 1024;

// d (+)= A B with as many rows in B as d has values for a warpgroup: 64 or 128.
__device__ inline void WideWgmma(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  WgmmaBf16<true>(d, a, b);
}
__device__ inline void WideWgmma(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  WgmmaBf16N128(d, a, b);
}

// By the third warpgroup. row_of(r) is the prepared row of tile row r, or null beyond the last;
// any_x an address that may be read.
template <int kRows, class RowOf>
__device__ void WideProduce(const __nv_bfloat16* any_x, RowOf&& row_of, int stages,
                            WideShared<kRows>& s) {
  constexpr int kPieces = kRows / 16;  // of 16 bytes in a stage, per thread
  const int thread = static_cast<int>(threadIdx.x) % 128, piece = thread % 8;
  const __nv_bfloat16* row[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) row[i] = row_of(thread / 8 + 16 * i);
  for (int stage = 0; stage < stages + kWideAhead; ++stage) {
    if (stage < stages) {
      const int slot = stage % kWideStages, round = stage / kWideStages;
      if (round > 0) BarrierWait(&s.empty[slot], (round - 1) & 1);
      const uint32_t panel = SharedAddress(s.panel[slot]);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const bool valid = row[i] != nullptr;
        CopyAsync16(panel + SwizzledOffset(thread / 8 + 16 * i, 16 * piece),
                    (valid ? row[i] : any_x) + stage * (kUnit / 2) + 8 * piece, valid);
      }
    }
    CopyAsyncCommit();
    if (stage < kWideAhead) continue;
    CopyAsyncWaitFor<kWideAhead>();
    FenceForWgmma();
    __syncwarp();
    if (thread % 32 == 0) BarrierArrive(&s.full[(stage - kWideAhead) % kWideStages]);
  }
}

// By the first two warpgroups; sum + total are the products.
template <Format F, int kRows>
__device__ void WideConsume(const CudaWeightView& w, int out0, int out_end, WideShared<kRows>& s,
                            float (&sum)[kRows / 2], float (&total)[kRows / 2]) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, q = lane % 4;
  const int units = w.depth / kUnit;
  // Offsets in 32 bits: registers are short. (No matrix of a model reaches 4 GiB.)
  uint32_t data[2], scale[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = min(out0 + thread / 32 * 16 + lane / 4 + 8 * i, out_end - 1);
    data[i] = static_cast<uint32_t>(PieceOf(row, 0, units * kUnitPieces<F>)) * kPieceBytes + 16 * q;
    scale[i] = F == Format::kFp8Block128 ? static_cast<uint32_t>((row >> 7) * units)
                                         : 4 * static_cast<uint32_t>(PieceOf(row, 0, units)) + q;
  }
  // From a unit to the next.
  constexpr int kBytes = kTile * kUnitBytes<F>;
  constexpr int kScales = F == Format::kFp4Block32 ? 4 * kTile : 1;
  RawUnit<F> raw[2][2];  // of two units in turn, of two rows
  const auto load = [&](int unit, RawUnit<F>(&to)[2]) {
    if (unit >= units) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to[i].Load(w.data + (data[i] + static_cast<uint32_t>(unit * kBytes)),
                 w.scale + (scale[i] + static_cast<uint32_t>(unit * kScales)));
    }
  };
  const bool wide = w.wide;
  const uint32_t panels = SharedAddress(s.panel[0]);
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) sum[i] = total[i] = 0;
  int segment = 1;
  while (segment < kSegments && SegmentBegin(segment, units) == 0) ++segment;
  int boundary = SegmentBegin(segment, units);

  // Words of the steps in turn, two products each: as many steps as registers allow.
  constexpr int kSteps = F == Format::kFp8Block128 ? 2 : 4;
  uint32_t a[kSteps][2][4];
  const auto multiply = [&](int unit, const RawUnit<F>(&now)[2]) {
    if (unit == boundary) {
      WgmmaWait<0>();
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) total[i] += sum[i], sum[i] = 0;
      do {
        boundary = SegmentBegin(++segment, units);
      } while (segment < kSegments && boundary == unit);
    }
    const ChunkScale s0 = MakeScale<F>(now[0].scale, wide), s1 = MakeScale<F>(now[1].scale, wide);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int stage = 2 * unit + e / 2, slot = stage % kWideStages;
      if (e % 2 == 0) BarrierWait(&s.full[slot], stage / kWideStages & 1);
      WgmmaWait<kSteps - 1>();  // the step of the unit before has read its words, and its stage
      if (e % 2 == 1 && unit > 0 && lane == 0) {
        BarrierArrive(&s.empty[(stage - 2) % kWideStages]);
      }
      uint32_t upper[4], lower[4];
      now[0].Expand(e, s0, wide, upper);
      now[1].Expand(e, s1, wide, lower);
      auto& words = a[e % kSteps];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[i][0] = upper[2 * i], words[i][1] = lower[2 * i];
        words[i][2] = upper[2 * i + 1], words[i][3] = lower[2 * i + 1];
      }
      const uint64_t b = PanelDescriptor(panels + slot * (kRows * 128) + e % 2 * 64);
      WgmmaFence();
      WideWgmma(sum, words[0], b);
      WideWgmma(sum, words[1], b + (32 >> 4));
      WgmmaCommit();
    }
  };
  load(0, raw[0]);
  load(1, raw[1]);
  for (int unit = 0; unit < units; unit += 2) {
    multiply(unit, raw[0]);
    load(unit + 2, raw[0]);
    if (unit + 1 == units) break;
    multiply(unit + 1, raw[1]);
    load(unit + 3, raw[1]);
  }
  WgmmaWait<0>();
}

// As TileProduct with rows in a form of WideForm, by a block of kWideThreads with
// kWideSharedBytes<kRows> of shared memory.
template <Format F, int kRows, class RowOf, class Store>
__device__ void WideProduct(const CudaWeightView& w, int out0, int out_end,
                            const __nv_bfloat16* any_x, RowOf&& row_of, int rows, void* memory,
                            Store&& store) {
  static_assert(F == Format::kFp8Block128 || F == Format::kFp4Block32);
  static_assert(kRows * kResultStride * 4 <= kWideStages * kRows * 128);
  char* const aligned =
      static_cast<char*>(memory) + (1024 - (SharedAddress(memory) & 1023u)) % 1024;
  auto& s = *reinterpret_cast<WideShared<kRows>*>(aligned);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  if (thread == 0) {
    for (int i = 0; i < kWideStages; ++i) {
      BarrierInit(&s.full[i], 4);
      BarrierInit(&s.empty[i], 8);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (warp >= 8) {
    FewerRegisters<kWideProducerRegisters>();
    WideProduce<kRows>(any_x, row_of, 2 * (w.depth / kUnit), s);
    return;
  }
  MoreRegisters<kWideRegisters>();
  float sum[kRows / 2], total[kRows / 2];
  WideConsume<F, kRows>(w, out0, out_end, s, sum, total);

  const auto consumers = [] { asm volatile("bar.sync 1, 256;" ::: "memory"); };
  consumers();  // the stages have been read: their memory takes the results
  auto* const result = reinterpret_cast<float*>(s.panel);  // [kRows][kResultStride]
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = 8 * j + 2 * (lane % 4) + (i & 1), o = 16 * warp + lane / 4 + 8 * (i >> 1);
      result[r * kResultStride + o] = total[4 * j + i] + sum[4 * j + i];
    }
  }
  consumers();
  const int o = out0 + 4 * lane;
  for (int r = warp; r < rows; r += 8) {
    if (o < out_end) {
      store(r, o, reinterpret_cast<const float4*>(result + r * kResultStride)[lane],
            min(4, out_end - o));
    }
  }
}

}  // namespace fathom::ops::cuda
