// linear: y = W x with weights at their stored precision (model.md 2.1).
//
// x [T, in], y [T, out]. W row-major [out, in] as the checkpoint stores it:
//   kF32, kBF16      plain product, f32 accumulation. kProduct rounds x of a bf16 weight to bf16,
//                    which changes nothing: stored activations are bf16 values (numerics.h).
//   kFp8Block128     e4m3 with one ue8m0 scale per 128x128 tile, scale [ceil(out/128),
//   ceil(in/128)]. kFp4Block32      e2m1, two per byte, even input in the low nibble; scale [out,
//   in/32] ue8m0.
// kProduct: for FP8 and FP4 weights x is quantised per token per 128 consecutive channels (the last
//   block may be shorter): a = max(max|x|, 1e-4), s = pow2up(a * (1/448)), e4m3(clamp(x/s)).
//   Every scale is a power of two, so q*s and w*scale are exact in bf16 and only the order of the
//   f32 sum is free; it must depend on neither T nor the row's place in the batch: element (t, o)
//   is bit-identical for every T. y is rounded to bf16 when `round_output`.
// kReference: x is used as it is, nothing is rounded.
// x and y must not overlap. All T >= 1, out >= 1, in >= 1 are legal; FP4 needs in % 32 == 0.
#pragma once

#include <cstdint>
#include <memory>

#include "core/matrix.h"
#include "core/thread_pool.h"
#include "ops/linear/weight_format.h"
#include "ops/numerics.h"

namespace fathom::ops {

// A backend's private, re-ordered form of a weight, still at stored precision.
struct PackedWeight {
  virtual ~PackedWeight() = default;
};

struct LinearWeight {
  WeightFormat format = WeightFormat::kBF16;
  int64_t out = 0;
  int64_t in = 0;
  const void* data = nullptr;            // checkpoint layout (memory-mapped)
  const uint8_t* scale = nullptr;        // ue8m0 bytes, or null
  std::shared_ptr<PackedWeight> packed;  // set by PackLinearCpu; required by LinearCpu
};

struct LinearArgs {
  MatrixView x;  // [T, in]
  const LinearWeight* weight = nullptr;
  MatrixView y;  // [T, out]
  Numerics numerics = Numerics::kProduct;
  bool round_output = true;  // kProduct only: y -> bf16; false leaves f32 (compressor, gate, head)
};

void LinearReference(const LinearArgs& args);
void LinearCpu(const LinearArgs& args, ThreadPool& pool);

// Prepares weight.packed for LinearCpu. Stored precision is kept: bytes grow by padding only.
// After it the checkpoint bytes are no longer read by LinearCpu.
void PackLinearCpu(LinearWeight& weight);

// The dequantised weight element (o, i): exact in float32. For references and tests.
float WeightAt(const LinearWeight& weight, int64_t o, int64_t i);

}  // namespace fathom::ops
