// A token's query on its way to the scan: prepared in place as the contract says and, for the
// tensor cores, packed into the scratch as the scan's blocks copy it to shared memory.
//
// Packed query of H heads (padded with zeros to kHeads of the scan):
//   image   swizzled panels (ops/cuda/hopper.cuh), a row per head. FP4 keys: one panel of signed
//           bytes; else two panels of bf16, channels in the order that the scan's lanes hold keys.
//   pairs   float4 [H/2]: w of two heads; FP4: then the bits of 2^23 in float32 less what their
//           integer dots are too large by, keys being offset by 128
//   blocks  FP4 only, float4 [H]: what the integers of each block of 32 channels count
//   aligned FP4 only, int32 [H]
// FP4: twice an e2m1 value is an integer of magnitude at most 12. Where the scales of a head's
// blocks lie within a factor of 8, the integers are shifted to the smallest scale: then a whole dot
// product is one exact integer, and the scale is folded into w ("aligned").
#pragma once

#include "ops/cuda/hopper.cuh"
#include "ops/indexer/indexer.h"
#include "ops/quantise/cuda.cuh"

namespace fathom::ops::cuda {

struct IndexerParams {
  StepView step;
  int heads, top_k;
  void* q;
  void* w;
  int64_t q_stride, w_stride;
  bool q_bf16, w_bf16;
  const float* rope;
  PagedRows keys;
  int page_shift;  // log2 of its rows_per_page, or -1
  int32_t* selected;
  int32_t* counts;
  float* scores;          // of token first_token + i: scores + i * scores_stride
  uint32_t* groups;       // the same of groups of 16 rows (cuda_scores.cuh): i * scores_stride / 16
  int64_t scores_stride;  // a multiple of 64
  float* wanted_scores;   // of token 0, or null: where the caller reads those of all visible rows
  int64_t wanted_stride;
  bool product;
  float weight_scale;
  // The tokens of this pass.
  int first_token, num_tokens;
  char* packed;  // their packed queries, or null: the scan reads q and w
  int padded_heads;
  int64_t packed_stride;  // bytes
};

// Bytes from the beginning of a packed query to its parts.
struct PackedLayout {
  int heads;
  bool fp4;
  __host__ __device__ constexpr int Pairs() const {
    return heads * (fp4 ? kIndexDim : 2 * kIndexDim);
  }
  __host__ __device__ constexpr int Blocks() const { return Pairs() + heads * 8; }
  __host__ __device__ constexpr int Aligned() const { return Blocks() + (fp4 ? heads * 16 : 0); }
  __host__ __device__ constexpr int Bytes() const { return Aligned() + (fp4 ? heads * 4 : 0); }
};

// Tokens that only fill up a captured batch have a position below 0 and see nothing.
__device__ inline int32_t VisibleRows(const IndexerParams& p, int64_t token) {
  return max(p.step.position[token] + 1, 0) / 4;
}

__device__ inline bool IsScored(const IndexerParams& p, int32_t visible) {
  return p.top_k > 0 && (visible > p.top_k || (p.wanted_scores != nullptr && visible > 0));
}

// Queries are prepared where rows are scored, and all of them where scores are asked for.
__device__ inline bool IsPrepared(const IndexerParams& p, int64_t token) {
  return p.wanted_scores != nullptr || IsScored(p, VisibleRows(p, token));
}

__device__ inline float LoadFloat(const void* data, bool bf16, int64_t i) {
  return bf16 ? ToFloat(static_cast<const __nv_bfloat16*>(data)[i])
              : static_cast<const float*>(data)[i];
}

// What a lane knows of a head of FP4 values, four channels a lane.
struct Fp4Head {
  uint32_t word;  // its channels as signed bytes
  float block;    // what the integers of its block count
  float weight;   // of the head; lower lanes and upper lanes agree on what follows, too
  float excess;   // the bits of 2^23 less what integer dots are too large by
  int32_t aligned;
};

__device__ inline Fp4Head MakeFp4Head(const float (&v)[4], float w) {
  const float most = GroupMax(MaxAbs(v), 8);
  const float half = Fp4Scale(most) * 0.5f;
  // Blocks of zeros bind nobody.
  const int exponent = static_cast<int>(__float_as_uint(half) >> 23);
  int least = most > 0 ? exponent : 1000, largest = most > 0 ? exponent : -1000;
  for (int offset = 8; offset < 32; offset *= 2) {
    least = min(least, __shfl_xor_sync(0xffffffffu, least, offset));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  const bool aligned = largest - least <= 3 && least > 0;  // 0: a subnormal unit
  const int shift = aligned && most > 0 ? exponent - least : 0;
  uint32_t word = 0;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int value = __float2int_rn(__fdiv_rn(v[i], half)) * (1 << shift);
    sum += value;
    word |= (static_cast<uint32_t>(value) & 0xffu) << (8 * i);
  }
  sum = __reduce_add_sync(0xffffffffu, sum);
  const float unit =
      least == 1000 ? 1.0f : __uint_as_float(static_cast<uint32_t>(least) << 23);  // smallest half
  return {word, aligned ? 1.0f : half, aligned ? w * unit : w,
          __int_as_float(0x4b000000 - 128 * sum), aligned ? 1 : 0};
}

// Where a lane's word of an FP4 head lies in its panel.
__device__ inline uint32_t Fp4WordOffset(int head, int lane) {
  return SwizzledOffset(head, lane % 8 / 2 * 32 + lane % 2 * 16 + lane / 8 * 4);
}

__device__ inline void PackFp4Head(const float (&v)[4], float w, int head, char* packed,
                                   const PackedLayout& layout) {
  const int lane = threadIdx.x % 32;
  const Fp4Head made = MakeFp4Head(v, w);
  *reinterpret_cast<uint32_t*>(packed + Fp4WordOffset(head, lane)) = made.word;
  if (lane % 8 == 0) {
    reinterpret_cast<float*>(packed + layout.Blocks())[head * 4 + lane / 8] = made.block;
  }
  if (lane == 0) {
    auto* pair = reinterpret_cast<float*>(packed + layout.Pairs()) + head / 2 * 4 + head % 2;
    pair[0] = made.weight;
    pair[2] = made.excess;
    reinterpret_cast<int32_t*>(packed + layout.Aligned())[head] = made.aligned;
  }
}

// A head of bf16 values: lane l of a quad of the scan holds channels 32 l .. 32 l + 31 of a key.
// Where word `half` of a lane of the head's warp lies in the two panels.
__device__ inline uint32_t Bf16WordOffset(int head, int lane, int half,
                                          const PackedLayout& layout) {
  const int owner = lane / 8, step = lane % 8;
  return step / 4 * layout.heads * 128 +
         SwizzledOffset(head, step % 4 * 32 + half * 16 + owner * 4);
}

__device__ inline void PackBf16Head(const float (&v)[4], float w, int head, char* packed,
                                    const PackedLayout& layout) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    *reinterpret_cast<uint32_t*>(packed + Bf16WordOffset(head, lane, half, layout)) =
        Bf16Word(v[2 * half], v[2 * half + 1]);
  }
  if (lane == 0) {
    auto* pair = reinterpret_cast<float*>(packed + layout.Pairs()) + head / 2 * 4 + head % 2;
    pair[0] = w;
    pair[2] = 0;
  }
}

// The contract's preparation of a head and its weight, loaded by a warp: RoPE, what the format of
// the keys asks for, the weight's factor; in registers and in place. table: cos, sin twice, of
// lanes 16 and up.
template <class T>
__device__ inline void PrepareHead(const IndexerParams& p, const float4& table, T* q, int64_t w_at,
                                   float (&v)[4], float* w) {
  const int lane = threadIdx.x % 32;
  if (lane >= 16) {
    const float c[2] = {table.x, table.z}, s[2] = {table.y, table.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float a = v[2 * i], b = v[2 * i + 1];
      v[2 * i] = RoundIf(__fsub_rn(__fmul_rn(a, c[i]), __fmul_rn(b, s[i])), p.product);
      v[2 * i + 1] = RoundIf(__fadd_rn(__fmul_rn(a, s[i]), __fmul_rn(b, c[i])), p.product);
    }
  }
  if (p.keys.format == RowFormat::kFp4Index) {
    HadamardWarpRow(v, lane, p.product);
    RoundFp4WarpRow(v);
  } else if (p.keys.format == RowFormat::kFp8Index) {
    RoundFp8WarpBlock(v);
  }
  StoreWarpRow(v, q, lane);
  *w = RoundIf(__fmul_rn(*w, p.weight_scale), p.product);
  __syncwarp();
  if (lane == 0) {
    if (p.w_bf16) {
      static_cast<__nv_bfloat16*>(p.w)[w_at] = __float2bfloat16_rn(*w);
    } else {
      static_cast<float*>(p.w)[w_at] = *w;
    }
  }
}

// A warp per (padded) head: RoPE, then what the format of the keys asks for, and the head's weight.
template <class T>
__global__ void __launch_bounds__(256) PrepareQuery(const IndexerParams p) {
  LetNextStart();
  WaitForPrevious();
  const int64_t index = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  const int64_t local = index / p.padded_heads, token = p.first_token + local;
  const int head = static_cast<int>(index % p.padded_heads), lane = threadIdx.x % 32;
  if (local >= p.num_tokens) return;
  const bool fp4 = p.keys.format == RowFormat::kFp4Index;
  float v[4] = {};
  float w = 0;
  float4 table = {};  // cos, sin twice
  T* const q = static_cast<T*>(p.q) + token * p.q_stride + head * kIndexDim;
  if (head < p.heads) {
    LoadWarpRow(q, v, lane);
    if (lane >= 16) table = reinterpret_cast<const float4*>(p.rope + token * kRopeDim)[lane - 16];
    w = LoadFloat(p.w, p.w_bf16, token * p.w_stride + head);
  }
  if (!IsPrepared(p, token)) return;
  if (head < p.heads) {
    PrepareHead(p, table, q, token * p.w_stride + head, v, &w);
  }
  if (p.packed == nullptr || !IsScored(p, VisibleRows(p, token))) return;
  const PackedLayout layout{p.padded_heads, fp4};
  char* packed = p.packed + local * p.packed_stride;
  if (fp4) {
    PackFp4Head(v, w, head, packed, layout);
  } else {
    PackBf16Head(v, w, head, packed, layout);
  }
}

}  // namespace fathom::ops::cuda
