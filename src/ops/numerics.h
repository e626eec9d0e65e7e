// Which arithmetic a run uses (design: model.md 0.3 and 2.1).
#pragma once

#include <cstdint>

namespace fathom::ops {

enum class Numerics : uint8_t {
  // REF2: activations are rounded to bf16 where model.md says so, inputs of FP8/FP4 weights are
  // quantised to e4m3, cache rows are rounded to their storage format. The product's meaning.
  kProduct,
  // float32 throughout: no activation, cache or weight-input rounding. The oracle's arithmetic.
  kReference,
};

// Activation storage: float32 on the CPU, bf16 on CUDA. In kProduct every stored activation is a
// bf16 value, so both hold the same numbers; "-> bf16" in a contract means this rounding, which
// kReference leaves out. float32 results named f32 are never rounded.

inline constexpr int kHeadDim = 512;  // d: main attention vector, key and value alike
inline constexpr int kRopeDim = 64;   // r: the last channels of a head rotate
inline constexpr int kNopeDim = kHeadDim - kRopeDim;  // 448
inline constexpr int kIndexDim = 128;                 // indexer head
inline constexpr int kStreams = 4;                    // hc_mult: residual streams
inline constexpr int kWindow = 128;                   // sliding window, own position included
inline constexpr float kNormEps = 1e-6f;

}  // namespace fathom::ops
