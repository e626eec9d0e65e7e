// The inner loops of sparse_attention, one set per instruction set. Both sets compute the same
// bits: every sum has one order (vec16.h), so a result does not depend on the machine's vector
// width.
//
// A row of 512 channels is float32 or bf16. bf16 rows are read as pairs, so everything that meets
// them (query, accumulator) is in "kernel order": per 32 channels the 16 even ones, then the odd.
// float32 rows use the natural order. (The bf16-product set has orders of its own; a set's queries,
// states and finish belong together.)
#pragma once

#include <cstdint>

namespace fathom::ops {

// Heads are handled four at a time; arrays over heads are padded to a multiple of four.
inline constexpr int kAttentionHeadBlock = 4;

// One segment of one token's entries.
struct AttentionSegment {
  const float* q = nullptr;           // [heads, 512] in kernel order
  int heads = 0;                      // multiple of 4
  const void* const* rows = nullptr;  // [count], and 3 more readable rows after the last
  int count = 0;                      // 1 .. 512
  bool round_p = false;               // round p to bf16 for the sum with v
  float* p = nullptr;                 // scratch [heads, 512]
  float* max = nullptr;               // out [heads]: largest score
  float* sum = nullptr;               // out [heads]: sum of p
  float* acc = nullptr;               // out [heads, 512] in kernel order: sum of p v
};

// A partial softmax of `heads` heads: the segments seen so far.
struct AttentionState {
  float* max = nullptr;
  float* sum = nullptr;
  float* acc = nullptr;  // [heads, 512]
};

struct AttentionKernels {
  void (*segment_f32)(const AttentionSegment& segment);
  void (*segment_bf16)(const AttentionSegment& segment);
  // to <- to merged with part, which holds the entries after those of to.
  void (*merge)(const AttentionState& to, const AttentionState& part, int heads);
  // q [512] in kernel order. `pairs`: for bf16 rows.
  void (*pack_query)(const float* q, bool pairs, float* packed);
  // out [512] = acc * inverse, in natural order, rounded to bf16 if `round`.
  void (*finish)(const float* acc, float inverse, bool pairs, bool round, float* out);
  // A kFp8Main row as 512 bf16 values, exactly: an e4m3 value times a power of two is a bf16 value.
  void (*expand_fp8)(const uint8_t* data, const uint8_t* scale, uint16_t* row);
};

extern const AttentionKernels kAttentionAvx2;
extern const AttentionKernels kAttentionAvx512;
extern const AttentionKernels kAttentionAvx512Bf16;

}  // namespace fathom::ops
