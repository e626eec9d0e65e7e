// How one block scores rows of a sequence for one token's prepared query. Each scorer holds its
// query in shared memory, reads rows where they lie in their pages, and hands (row, score) to
// `offer(valid, row, score)`, whole warps at a time.
//
//   Fp4Scorer   kFp4Index keys, by int8 tensor cores: a block of 32 channels is one exact integer.
//   Bf16Scorer  kFp8Index and kBf16 keys with a bf16 query, by bf16 tensor cores.
//   FmaScorer   everything else, the exact chain in float32.
//
// The tensor core tiles are 16 rows by 8 heads; within a quad of lanes, lane i holds a quarter of
// the heads, i'th in order, so that the sum over heads ascending is passed on from lane to lane.
#pragma once

#include <cstdint>

#include "ops/indexer/top.cuh"
#include "ops/quantise/cuda.cuh"

namespace fathom::ops::cuda {

constexpr int kScanWarps = kTopThreads / 32;

// One token's prepared query.
struct QueryView {
  const void* q = nullptr;  // [heads, 128]
  const void* w = nullptr;  // [heads]
  bool q_bf16 = false, w_bf16 = false;
  int heads = 0;
};

__device__ inline float LoadFloat(const void* data, bool bf16, int64_t i) {
  return bf16 ? ToFloat(static_cast<const __nv_bfloat16*>(data)[i])
              : static_cast<const float*>(data)[i];
}

// The rows of one sequence.
struct KeyRows {
  PagedRows pages;
  const int32_t* blocks = nullptr;

  __device__ const std::byte* Data(int32_t row) const {
    return RowData(pages, blocks[row / pages.rows_per_page], row % pages.rows_per_page);
  }
  __device__ const std::byte* Scale(int32_t row) const {
    return RowScale(pages, blocks[row / pages.rows_per_page], row % pages.rows_per_page);
  }
};

// Sums w * relu(dot) over all heads ascending, for two rows: the lane's dots are those of heads
// [i * n, (i + 1) * n), i = lane % 4, n = kMine.
template <int kMine>
__device__ void SumHeads(const float (&dot)[2][kMine], const float* w, float* score) {
  const int lane = threadIdx.x % 32;
  w += lane % 4 * kMine;
  float a = 0, b = 0;
#pragma unroll 1
  for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      a = __fmaf_rn(w[i], dot[0][i], a);
      b = __fmaf_rn(w[i], dot[1][i], b);
    }
    a = __shfl_sync(0xffffffffu, a, (lane & ~3) | quarter);
    b = __shfl_sync(0xffffffffu, b, (lane & ~3) | quarter);
  }
  score[0] = a;
  score[1] = b;
}

// The head that column `column` of head tile `tile` holds, for kMine heads per lane of a quad.
__device__ inline int HeadOf(int tile, int column, int mine) {
  return column / 2 * mine + 2 * tile + (column & 1);
}

// Offers the two rows of a quad: lane 0 the first, lane 1 the second.
template <class Offer>
__device__ void OfferPair(const float* score, int32_t row, int32_t last, Offer&& offer) {
  const int i = threadIdx.x % 4;
  const int32_t mine = row + (i == 1 ? 8 : 0);
  offer(i < 2 && mine < last, mine, i == 1 ? score[1] : score[0]);
}

// Bytes of `low` and `high` by the nibbles of `selector`, where a set top bit asks for the byte's
// sign instead: __byte_perm ignores that bit.
__device__ inline uint32_t Permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

// Four e2m1 codes (the low 16 bits) as signed bytes of twice their value. As all magnitudes are
// positive bytes, a permutation gives those of the codes whose sign bit is clear, and 0 elsewhere.
__device__ inline uint32_t TwiceE2m1(uint32_t codes) {
  constexpr uint32_t kLow = 0x03020100u, kHigh = 0x0c080604u;
  const uint32_t positive = Permute(kLow, kHigh, codes);
  const uint32_t negative = Permute(kLow, kHigh, codes ^ 0x8888u);
  return ((positive | 0x80808080u) - negative) ^ 0x80808080u;
}

__device__ inline void MmaS8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

__device__ inline void MmaBf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// kTiles head tiles of 8. Lane i of a quad holds channels 8i .. 8i+7 of every block of 32; a head's
// bytes lie in that order: lane, block, channel.
template <int kTiles>
class Fp4Scorer {
 public:
  static constexpr int kRows = 16 * kScanWarps;
  static constexpr int kHeads = 8 * kTiles;
  static constexpr int kMine = 2 * kTiles;
  static constexpr int kPitch = kIndexDim + 16;  // bytes; keeps loads free of bank conflicts
  static constexpr int kSharedBytes = kHeads * (kPitch + 16 + 4);

  // Ends without a barrier.
  __device__ Fp4Scorer(const QueryView& query, char* shared)
      : q_(shared),
        scale_(reinterpret_cast<float4*>(shared + kHeads * kPitch)),
        w_(reinterpret_cast<float*>(shared + kHeads * (kPitch + 16))) {
    const int lane = threadIdx.x % 32;
    for (int h = threadIdx.x / 32; h < kHeads; h += kScanWarps) {
      float v[4] = {};
      if (h < query.heads) {
        for (int i = 0; i < 4; ++i) {
          v[i] = LoadFloat(query.q, query.q_bf16, int64_t{h} * kIndexDim + 4 * lane + i);
        }
      }
      const float half = Fp4Scale(GroupMax(MaxAbs(v), 8)) * 0.5f;
      uint32_t word = 0;
      for (int i = 0; i < 4; ++i) {
        word |= (static_cast<uint32_t>(__float2int_rn(__fdiv_rn(v[i], half))) & 0xffu) << (8 * i);
      }
      const int block = lane / 8, owner = lane % 8 / 2;
      *reinterpret_cast<uint32_t*>(q_ + h * kPitch + owner * 32 + block * 8 + lane % 2 * 4) = word;
      if (lane % 8 == 0) reinterpret_cast<float*>(scale_ + h)[block] = half;
      if (lane == 0) w_[h] = h < query.heads ? LoadFloat(query.w, query.w_bf16, h) : 0.0f;
    }
  }

  // Rows [first, min(first + kRows, last)).
  template <class Offer>
  __device__ void Score(const KeyRows& keys, int32_t first, int32_t last, Offer&& offer) const {
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const int32_t row = first + threadIdx.x / 32 * 16 + group;
    uint32_t a[4][4];
    float key_scale[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t r = min(row + 8 * i, last - 1);
      const auto* data = reinterpret_cast<const uint32_t*>(keys.Data(r));
      const uint32_t scales = *reinterpret_cast<const uint32_t*>(keys.Scale(r));
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint32_t codes = data[4 * b + quad];
        a[b][i] = TwiceE2m1(codes & 0xffffu);
        a[b][2 + i] = TwiceE2m1(codes >> 16);
        key_scale[i][b] = FromE8m0(static_cast<uint8_t>(scales >> (8 * b))) * 0.5f;
      }
    }
    float dot[2][kMine];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const auto* q =
          reinterpret_cast<const uint4*>(q_ + HeadOf(tile, group, kMine) * kPitch + quad * 32);
      const uint4 low = q[0], high = q[1];
      int32_t sum[4][4];
      MmaS8(sum[0], a[0], low.x, low.y);
      MmaS8(sum[1], a[1], low.z, low.w);
      MmaS8(sum[2], a[2], high.x, high.y);
      MmaS8(sum[3], a[3], high.z, high.w);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float4 scale = scale_[HeadOf(tile, 2 * quad + j, kMine)];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // Block sums are exact, scaled ones too: fma rounds as the addition does.
          const auto block = [&](int b) {
            return __fmul_rn(__int2float_rn(sum[b][2 * i + j]), key_scale[i][b]);
          };
          float d = __fmul_rn(block(0), scale.x);
          d = __fmaf_rn(block(1), scale.y, d);
          d = __fmaf_rn(block(2), scale.z, d);
          d = __fmaf_rn(block(3), scale.w, d);
          dot[i][2 * tile + j] = fmaxf(d, 0.0f);
        }
      }
    }
    float score[2];
    SumHeads(dot, w_, score);
    OfferPair(score, row, last, offer);
  }

 private:
  char* q_;
  float4* scale_;  // [heads]: of the four blocks, halved
  float* w_;
};

// Lane i of a quad holds channels 16i .. 16i+15 of either half of a row.
template <int kTiles>
class Bf16Scorer {
 public:
  static constexpr int kRows = 16 * kScanWarps;
  static constexpr int kHeads = 8 * kTiles;
  static constexpr int kMine = 2 * kTiles;
  static constexpr int kPitch = 2 * kIndexDim + 16;
  static constexpr int kSharedBytes = kHeads * (kPitch + 4);

  __device__ Bf16Scorer(const QueryView& query, char* shared)
      : q_(shared), w_(reinterpret_cast<float*>(shared + kHeads * kPitch)) {
    const int lane = threadIdx.x % 32;
    const auto* q = static_cast<const uint2*>(query.q);
    for (int h = threadIdx.x / 32; h < kHeads; h += kScanWarps) {
      reinterpret_cast<uint2*>(q_ + h * kPitch)[lane] =
          h < query.heads ? q[h * 32 + lane] : uint2{0, 0};
      if (lane == 0) w_[h] = h < query.heads ? LoadFloat(query.w, query.w_bf16, h) : 0.0f;
    }
  }

  template <class Offer>
  __device__ void Score(const KeyRows& keys, int32_t first, int32_t last, Offer&& offer) const {
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const int32_t row = first + threadIdx.x / 32 * 16 + group;
    uint32_t a[8][4];  // of 16 channels each: four of the lane's
    float key_scale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t r = min(row + 8 * i, last - 1);
      const auto* data = reinterpret_cast<const uint4*>(keys.Data(r));
      const bool fp8 = keys.pages.format == RowFormat::kFp8Index;
      key_scale[i] = fp8 ? *reinterpret_cast<const float*>(keys.Scale(r)) : 1.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t pairs[8];
        if (fp8) {
          const uint4 codes = data[4 * half + quad];
          const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            const uint32_t two = words[k / 2] >> (16 * (k % 2));
            pairs[k] = Bf16Word(FromE4m3(static_cast<uint8_t>(two)),
                                FromE4m3(static_cast<uint8_t>(two >> 8)));
          }
        } else {
          const uint4 x = data[8 * half + 2 * quad], y = data[8 * half + 2 * quad + 1];
          pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
          pairs[4] = y.x, pairs[5] = y.y, pairs[6] = y.z, pairs[7] = y.w;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          a[4 * half + k][i] = pairs[2 * k];
          a[4 * half + k][2 + i] = pairs[2 * k + 1];
        }
      }
    }
    float dot[2][kMine];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const char* q = q_ + HeadOf(tile, group, kMine) * kPitch + quad * 32;
      float sum[4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto* four = reinterpret_cast<const uint4*>(q + half * 128);
        const uint4 x = four[0], y = four[1];
        MmaBf16(sum, a[4 * half], x.x, x.y);
        MmaBf16(sum, a[4 * half + 1], x.z, x.w);
        MmaBf16(sum, a[4 * half + 2], y.x, y.y);
        MmaBf16(sum, a[4 * half + 3], y.z, y.w);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dot[i / 2][2 * tile + i % 2] = fmaxf(__fmul_rn(sum[i], key_scale[i / 2]), 0.0f);
      }
    }
    float score[2];
    SumHeads(dot, w_, score);
    OfferPair(score, row, last, offer);
  }

 private:
  char* q_;
  float* w_;
};

// A thread per row.
class FmaScorer {
 public:
  static constexpr int kRows = kTopThreads;

  static int64_t SharedBytes(int heads) { return int64_t{heads} * (kIndexDim + 4) * 4; }

  __device__ FmaScorer(const QueryView& query, char* shared)
      : heads_(query.heads),
        q_(reinterpret_cast<float*>(shared)),
        w_(q_ + query.heads * kIndexDim) {
    for (int i = threadIdx.x; i < heads_ * kIndexDim; i += kTopThreads) {
      q_[i] = LoadFloat(query.q, query.q_bf16, i);
    }
    for (int h = threadIdx.x; h < heads_; h += kTopThreads) {
      w_[h] = LoadFloat(query.w, query.w_bf16, h);
    }
  }

  template <class Offer>
  __device__ void Score(const KeyRows& keys, int32_t first, int32_t last, Offer&& offer) const {
    const int32_t row = first + threadIdx.x;
    const int32_t r = min(row, last - 1);
    const std::byte* data = keys.Data(r);
    const std::byte* scale = keys.Scale(r);
    float key[kIndexDim];
#pragma unroll
    for (int c = 0; c < kIndexDim; ++c) {
      key[c] = DecodeChannel(keys.pages.format, data, scale, c);
    }
    float score = 0;
#pragma unroll 1
    for (int h = 0; h < heads_; ++h) {
      const auto* q = reinterpret_cast<const float4*>(q_ + h * kIndexDim);
      float dot = 0;
#pragma unroll
      for (int c = 0; c < kIndexDim; c += 4) {
        const float4 four = q[c / 4];
        dot = __fmaf_rn(four.x, key[c], dot);
        dot = __fmaf_rn(four.y, key[c + 1], dot);
        dot = __fmaf_rn(four.z, key[c + 2], dot);
        dot = __fmaf_rn(four.w, key[c + 3], dot);
      }
      score = __fmaf_rn(w_[h], fmaxf(dot, 0.0f), score);
    }
    offer(row < last, row, score);
  }

 private:
  int heads_;
  float* q_;
  float* w_;
};

}  // namespace fathom::ops::cuda
