// Tiles of 64 rows in shared memory as bulk copies bring them: codes row by row, then scales. Pages
// hold a power of two and a multiple of 64 rows, so a tile lies in one page. What a tile gives is
// cuda_scan.cuh's to the bit, with fewer instructions: a lane ends with the score of one row.
#pragma once

#include "ops/indexer/cuda_scan.cuh"

namespace fathom::ops::cuda {

template <class Keys>
constexpr int kTileBytes = kScanRows*(Keys::kDataBytes + Keys::kScaleBytes);

// Asks for the rows of tile `tile`, which lie in page `block`; `barrier` expects kTileBytes. One
// thread.
template <class Keys>
__device__ inline void CopyTile(const IndexerParams& p, int32_t block, int32_t tile, char* to,
                                uint64_t* barrier) {
  const std::byte* const page = p.keys.base + block * p.keys.block_stride;
  if (p.keys.rows_per_page == kScanRows) {
    CopyBulk(to, page, kTileBytes<Keys>, barrier);
    return;
  }
  constexpr int kData = kScanRows * Keys::kDataBytes;
  const int32_t in_page = tile * kScanRows & (p.keys.rows_per_page - 1);
  CopyBulk(to, page + in_page * Keys::kDataBytes, kData, barrier);
  if constexpr (Keys::kScaleBytes > 0) {
    CopyBulk(to + kData,
             page + p.keys.rows_per_page * Keys::kDataBytes + in_page * Keys::kScaleBytes,
             kScanRows * Keys::kScaleBytes, barrier);
  }
}

__device__ inline int32_t PageOfTile(const IndexerParams& p, int32_t tile) {
  return tile >> (p.page_shift - 6);
}

// Operands of rows g and g + 8 of the warp's sixteen, as of Keys::Tile.
template <class Keys>
struct PageTile {
  uint32_t a[Keys::kSteps][4];
  float scale;  // of LanePart::row
  bool exact;   // no row of the warp needs Slow
};

// What a lane reads of a tile, in bytes from its beginning, and which row's score it ends with.
template <class Keys>
struct LanePart {
  int32_t codes;   // of row g; row g + 8 follows at kNext
  int32_t scales;  // FP4: the lane's block's of row g; else of `row`
  int32_t row;     // g in even lanes, g + 8 in odd ones
  static constexpr int kNext = 8 * Keys::kDataBytes;
};

// Of thread `thread` of the block.
template <class Keys>
__device__ inline LanePart<Keys> PartOfLane(uint32_t thread) {
  const auto lane = static_cast<int32_t>(thread % 32);
  const int32_t g = static_cast<int32_t>(thread / 32 % 4) * 16 + lane / 4;
  const int32_t row = g + lane % 2 * 8;
  return {g * Keys::kDataBytes + lane % 4 * (Keys::kDataBytes / 4),
          kScanRows * Keys::kDataBytes + (Keys::kFp4 ? g * 4 + lane % 4 : row * 4), row};
}

// codes, scales: the lane's of the tile. odd: whether the lane is. kSigned: FP4 keys become signed
// bytes; else they are offset by 128, as those of cuda_scan.cuh.
template <bool kSigned = false>
__device__ inline void DecodePage(const char* codes, const char* at_scales, bool odd,
                                  PageTile<Fp4Keys>* out) {
  using Keys = Fp4Keys;
  const auto* const scales = reinterpret_cast<const uint8_t*>(at_scales);
  // Row g in the lower half of a word, row g + 8 in the upper one.
  const uint32_t mine = scales[0] | static_cast<uint32_t>(scales[32]) << 16;
  uint32_t least = __vminu2(mine, __shfl_xor_sync(0xffffffffu, mine, 1));
  least = __vminu2(least, __shfl_xor_sync(0xffffffffu, least, 2));
  const uint32_t shifts = mine - least;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t shift = shifts >> (16 * i) & 3u;
    // 128 + value of four codes: twice the magnitudes of the positive ones, and of all 128 less
    // theirs.
    const uint32_t low = kTwiceLow << shift, high = kTwiceHigh << shift;
    const uint32_t less_low = 0x80808080u - low, less_high = 0x80808080u - high;
    const uint4 all = *reinterpret_cast<const uint4*>(codes + i * LanePart<Keys>::kNext);
    const uint32_t words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int s = 0; s < Keys::kSteps; ++s) {
      const uint32_t unsigned_codes = words[s] & 0x77777777u;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t four = Permute(low, high, words[s] >> (16 * half)) * 2 +
                              Permute(less_low, less_high, unsigned_codes >> (16 * half));
        out->a[s][2 * half + i] = kSigned ? four ^ 0x80808080u : four;
      }
    }
  }
  out->scale = FromE8m0(static_cast<uint8_t>(odd ? least >> 16 : least)) * 0.5f;
  out->exact = __all_sync(0xffffffffu, (shifts & 0xfffcfffcu) == 0);
}

template <bool kSigned = false>
__device__ inline void DecodePage(const char* codes, const char* scales, bool,
                                  PageTile<Fp8Keys>* out) {
  using Keys = Fp8Keys;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      const uint4 all =
          *reinterpret_cast<const uint4*>(codes + i * LanePart<Keys>::kNext + piece * 16);
      const uint32_t words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
      for (int s = 0; s < 4; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto two = static_cast<__nv_fp8x2_storage_t>(words[s] >> (16 * half));
          const float2 value = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
          out->a[4 * piece + s][2 * half + i] = Bf16Word(value.x, value.y);
        }
      }
    }
  }
  out->scale = *reinterpret_cast<const float*>(scales);
  out->exact = true;
}

template <bool kSigned = false>
__device__ inline void DecodePage(const char* codes, const char* scales, bool,
                                  PageTile<Bf16Keys>* out) {
  using Keys = Bf16Keys;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int s = 0; s < Keys::kSteps; ++s) {
      const uint2 two = *reinterpret_cast<const uint2*>(codes + i * LanePart<Keys>::kNext + s * 8);
      out->a[s][i] = two.x;
      out->a[s][2 + i] = two.y;
    }
  }
  out->scale = 1.0f;
  out->exact = true;
}

// SumQuad of `a` in even lanes, of `b` in odd ones: neighbours exchange the row that the other
// keeps.
__device__ inline float SumPair(float a, float b, bool odd) {
  const float sum = __fadd_rn(odd ? b : a, __shfl_xor_sync(0xffffffffu, odd ? a : b, 1));
  return __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
}

// The score of LanePart::row. pairs: those of the query from the lane's first one on, that of its
// place in the quad. Warpgroup.
template <class Keys, int kHeads>
__device__ inline float ScoreOwnRow(const PageTile<Keys>& tile, uint64_t image, const float4* pairs,
                                    bool odd) {
  constexpr int kN = kHeads >= 64 ? 64 : 8;
  float a = 0, b = 0;
#pragma unroll
  for (int first = 0; first < kHeads; first += kN) {
    typename Keys::Sum sum[kN / 2];
    Keys::template Multiply<kN>(sum, tile.a, image, kHeads, first);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float4 pair = pairs[first / 2 + 4 * j];
      a = __fmaf_rn(pair.x, Keys::ReluDot(sum[4 * j], pair.z), a);
      a = __fmaf_rn(pair.y, Keys::ReluDot(sum[4 * j + 1], pair.w), a);
      b = __fmaf_rn(pair.x, Keys::ReluDot(sum[4 * j + 2], pair.z), b);
      b = __fmaf_rn(pair.y, Keys::ReluDot(sum[4 * j + 3], pair.w), b);
    }
  }
  return __fmul_rn(SumPair(a, b, odd), tile.scale);
}

template <class Keys, int kHeads>
__device__ inline ScanQuery QueryAt(const char* packed) {
  constexpr PackedLayout kLayout{kHeads, Keys::kFp4};
  return {packed, reinterpret_cast<const float4*>(packed + kLayout.Pairs()),
          reinterpret_cast<const float4*>(packed + kLayout.Blocks())};
}

// Whether a head of an FP4 query is not aligned: then every row takes Slow. Warp.
template <class Keys, int kHeads>
__device__ inline bool Unaligned(const char* packed) {
  if constexpr (Keys::kFp4) {
    constexpr PackedLayout kLayout{kHeads, true};
    const auto* const aligned = reinterpret_cast<const int32_t*>(packed + kLayout.Aligned());
    bool all = true;
    for (int head = threadIdx.x % 32; head < kHeads; head += 32) all = all && aligned[head] != 0;
    return __any_sync(0xffffffffu, !all);
  }
  return false;
}

// The same as the slow way gives it, which serves any row: the row's score of a lane whose two rows
// begin with `row` among `rows`. Warp.
template <int kHeads>
__device__ inline float SlowOwnRow(const KeyRows& keys, int32_t row, int32_t rows,
                                   const ScanQuery& query) {
  const int32_t both[2] = {min(row, rows - 1), min(row + 8, rows - 1)};
  float scores[2];
  Fp4Keys::Slow<kHeads>(keys, both, query, scores);
  return threadIdx.x % 2 == 0 ? scores[0] : scores[1];
}

}  // namespace fathom::ops::cuda
