// linear on CUDA: the device form of a weight, and the product of linear.h.
//
// Order of the sum. Activations and weights of FP8, FP4 and BF16 products are exact in bf16 and are
// multiplied by the tensor cores (mma m16n8k16, f32 accumulators). The depth is padded to units of
// 128 inputs and cut into 8 segments at units s*U/8; each segment is one chain of mma from zero,
// the 8 results are added in ascending order. Few rows (streaming) and many rows (tiles) run the
// same instructions in the same order, so that y[t] has the same bits for every T: decode equals
// prefill. Float products (kReference, or F32 weights) are f32 FMA in ascending order, one kernel
// for every T, no TF32.
//
// NaN codes of e4m3 (0x7f, 0xff) are read as +-480: loading refuses such checkpoints.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "ops/cuda/device.h"
#include "ops/linear/linear.h"

namespace fathom::ops {

inline constexpr int64_t kCudaUnit = 128;  // inputs; the padding of a weight's rows
inline constexpr int64_t kCudaTile = 16;   // outputs; the padding of a weight's columns
inline constexpr int64_t kCudaPiece = 64;  // bytes of a row that lie together

inline int64_t CudaTiles(int64_t out) {
  return (out + kCudaTile - 1) / kCudaTile;
}
inline int64_t CudaDepth(int64_t in) {
  return (in + kCudaUnit - 1) / kCudaUnit * kCudaUnit;
}

// What the kernels read of a weight; all pointers are device addresses.
struct CudaWeightView {
  // [ceil(out/16)][pieces of a row][16][64 bytes] at stored precision, 0 beyond in and out; F32
  // [out, depth].
  const uint8_t* data = nullptr;
  // ue8m0. FP8 [ceil(out/128), depth/128]; FP4 [ceil(out/16)][depth/128][16][4].
  const uint8_t* scale = nullptr;
  int32_t out = 0;
  int32_t in = 0;
  int32_t depth = 0;  // CudaDepth(in)
  WeightFormat format = WeightFormat::kBF16;
  bool wide = false;  // a scale is so large that expanding takes a second multiplication
};

// The device form: tiles of CudaWeightView, codes in the order of fp8_words.h and fp4_words.h.
struct CudaWeight : PackedWeight {
  CudaWeightView view;
  // Set on experts[0].w1 by PackExpertsCuda: device array [E + 1][w1, w2, w3], shared last.
  const CudaWeightView* experts = nullptr;
  void* owned[2] = {};  // what the destructor frees: this weight's memory, the expert table
  CudaWeight() = default;
  CudaWeight(const CudaWeight&) = delete;
  CudaWeight& operator=(const CudaWeight&) = delete;
  ~CudaWeight() override;
};

// Device memory of at least `bytes`, 256-byte aligned, that outlives the weight.
using CudaAllocate = std::function<void*(int64_t bytes)>;

// Device bytes PackLinearCuda asks for.
int64_t CudaWeightBytes(const LinearWeight& weight);

// Copies the weight to the device and sets weight.packed. With no `allocate` the weight owns memory
// of its own. Waits for the copy; weight.data is not read again.
void PackLinearCuda(LinearWeight& weight, const CudaAllocate& allocate = {});

// The device form of `weight`; ends the process when PackLinearCuda has not run.
const CudaWeight& PackedCuda(const LinearWeight& weight);

// Bytes of scratch for up to `rows` rows of a weight with `in` inputs. 256-byte aligned memory.
int64_t LinearCudaScratchBytes(int64_t rows, int64_t in);

// How a product of more than 32 rows is computed: past the streaming weight, in tiles of outputs
// and rows, or whichever is faster. All give the same bits.
enum class CudaWay : uint8_t { kFaster, kStream, kTiles };

// x and y may be f32 or bf16 in either numerics. Two launches at most.
void LinearCuda(const LinearArgs& args, void* scratch, CudaStream stream,
                CudaWay way = CudaWay::kFaster);

// Products of the same x in one launch, each with the bits of LinearCuda. Taken: 2 to kMostTogether
// products in kProduct of FP8 and BF16 weights, of so few rows that every block quantises them for
// itself (4 of 4,096 inputs, 8 of 2,048), which are bf16 in whole units.
inline constexpr int kMostTogether = 8;
bool LinearsCudaTake(std::span<const LinearArgs> products);  // LinearsCuda needs it to hold
void LinearsCuda(std::span<const LinearArgs> products, CudaStream stream);

}  // namespace fathom::ops
