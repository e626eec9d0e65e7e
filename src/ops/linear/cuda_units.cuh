// What a product with few rows (cuda_skinny.cuh) is made of: a lane's share of a unit of weights,
// activations in shared memory, the ring through which a warp's weights stream.
#pragma once

#include "ops/cuda/hopper.cuh"
#include "ops/linear/cuda_prepare.cuh"

namespace fathom::ops::cuda {

// What lies at an address of shared memory.
template <class T>
__device__ inline const T& SharedAt(uint32_t at) {
  return *static_cast<const T*>(__cvta_shared_to_generic(at));
}

// One lane's 32 weights of a unit, as stored.
template <Format F>
struct RawUnit {
  uint4 load[kUnitPieces<F>];
  uint32_t scale;

  // at: the lane's 16 bytes of the unit's first piece.
  __device__ void Load(const uint8_t* at, const uint8_t* scale_at) {
#pragma unroll
    for (int i = 0; i < kUnitPieces<F>; ++i) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(load[i].x), "=r"(load[i].y), "=r"(load[i].z), "=r"(load[i].w)
                   : "l"(at + kTilePieceBytes * i));
    }
    scale = F == Format::kBF16 ? 0 : __ldg(scale_at);
  }
  // From shared memory.
  __device__ void LoadShared(uint32_t at) {
#pragma unroll
    for (int i = 0; i < kUnitPieces<F>; ++i) load[i] = SharedAt<uint4>(at + kTilePieceBytes * i);
  }

  __device__ void Expand(int e, const ChunkScale& s, bool wide, uint32_t word[4]) const {
    if constexpr (F == Format::kBF16) {
      word[0] = load[e].x, word[1] = load[e].y, word[2] = load[e].z, word[3] = load[e].w;
    } else if constexpr (F == Format::kFp8Block128) {
      const uint4& v = load[e / 2];
      if (e % 2 == 0) {
        ExpandFp8(v.x, v.y, s, wide, word);
      } else {
        ExpandFp8(v.z, v.w, s, wide, word);
      }
    } else {
      const uint4& v = load[0];
      ExpandFp4(e == 0 ? v.x : e == 1 ? v.y : e == 2 ? v.z : v.w, s, wide, word);
    }
  }
};

// Activations in shared memory, a pointer to them in elements. Within a unit they lie in the order
// in which a product of the weight's format takes them, chunk e of the four quarters side by side:
// eight lanes read 64 bytes in one piece.
template <Format F>
struct FreshRow {
  uint32_t at;

  __device__ FreshRow operator+(int64_t elements) const {
    return {at + static_cast<uint32_t>(elements) * 2};
  }
};

// Where chunk e of quarter q begins within a unit, and its eight values.
template <Format F>
__device__ constexpr int ChunkOf(const __nv_bfloat16*, int q, int e) {
  return UnitChunk<F>(q, e);
}
template <Format F>
__device__ constexpr int ChunkOf(FreshRow<F>, int q, int e) {
  return 32 * e + 8 * q;
}
__device__ inline uint4 LoadChunk(const __nv_bfloat16* x) {
  return *reinterpret_cast<const uint4*>(x);
}
template <Format F>
__device__ inline uint4 LoadChunk(FreshRow<F> x) {
  return SharedAt<uint4>(x.at);
}

// Four units of a row on their way to a FreshRow, by a warp: eight lanes a unit, 16 inputs a lane.
template <class T>
struct FourUnits {
  static constexpr int kInputs = 16, kLoads = kInputs * sizeof(T) / 16;
  uint4 raw[kLoads];

  // Units from `first` on, of which those before `end` are wanted. vector: Preparation's.
  __device__ void Load(const T* row, int in, bool vector, int first, int end) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int unit = first + lane / 8, k = unit * kUnit + lane % 8 * kInputs;
    if (vector && unit < end && k + kInputs <= in) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) raw[i] = reinterpret_cast<const uint4*>(row + k)[i];
      return;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      T some[16 / sizeof(T)];
#pragma unroll
      for (int j = 0; j < static_cast<int>(16 / sizeof(T)); ++j) {
        const int at = k + i * static_cast<int>(16 / sizeof(T)) + j;
        some[j] = unit < end && at < in ? row[at] : T(0.0f);
      }
      raw[i] = *reinterpret_cast<const uint4*>(some);
    }
  }

  // Quantises them (QuantiseUnit's values) and stores those that are wanted.
  template <Format F>
  __device__ void Store(int first, int end, FreshRow<F> row) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, j = lane % 8;
    float v[kInputs], most = 0;
#pragma unroll
    for (int i = 0; i < kInputs / 4; ++i) {
      float four[4];
      LoadFour(reinterpret_cast<const T*>(raw) + 4 * i, four);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        v[4 * i + n] = four[n];
        most = fmaxf(most, fabsf(four[n]));
      }
    }
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) {
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
    }
    if (first + lane / 8 >= end) return;
    const float scale = ActivationScale(most);
    // Its inverse, as exact: 254 - exponent; 0 of infinity, as there.
    const int inverse_bits = max(0x7f000000 - static_cast<int>(__float_as_uint(scale)), 0);
    const float inverse = __uint_as_float(static_cast<uint32_t>(inverse_bits));
    uint32_t words[kInputs / 2];
#pragma unroll
    for (int i = 0; i < kInputs / 2; ++i) {
      const __nv_fp8x2_storage_t codes = __nv_cvt_float2_to_fp8x2(
          make_float2(v[2 * i] * inverse, v[2 * i + 1] * inverse), __NV_SATFINITE, __NV_E4M3);
      const float2 back = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3)));
      const __nv_bfloat162 pair = __floats2bfloat162_rn(back.x * scale, back.y * scale);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    // Inputs 16 j .. of the unit: two chunks.
    const int q = F == Format::kFp4Block32 ? j / 2 : j % 4;
    const int e = F == Format::kFp4Block32 ? j % 2 * 2 : j / 4 * 2;
    const uint32_t at = (row + ((first + lane / 8) * kUnit + ChunkOf<F>(row, q, e))).at;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at + 64 * i), "r"(words[4 * i]),
                   "r"(words[4 * i + 1]), "r"(words[4 * i + 2]), "r"(words[4 * i + 3])
                   : "memory");
    }
  }
};

// A warp's weights on their way: stages of whole units of one job, of about 4 KiB each.
template <Format F>
struct SkinnyStage {
  static constexpr int kUnits = 4096 / (kTile * kUnitBytes<F>);
  static constexpr int kCodes = kUnits * kTile * kUnitBytes<F>;
  static constexpr int kScales = F == Format::kFp4Block32 ? kUnits * kTile * 4 : 0;
  static constexpr int kBytes = kCodes + kScales;
};
struct SkinnyRing {
  static constexpr int kStages = 2;
  alignas(128) uint8_t bytes[kStages * SkinnyStage<Format::kFp4Block32>::kBytes];  // the largest
  uint64_t here[kStages];  // barriers of the stages
};

}  // namespace fathom::ops::cuda
