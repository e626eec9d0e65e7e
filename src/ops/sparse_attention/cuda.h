// sparse_attention on CUDA. The pointers of the arguments are device pointers, except `step`, which
// the host reads when it launches.
#pragma once

#include "ops/cuda/device.h"
#include "ops/sparse_attention/sparse_attention.h"

namespace fathom::ops {

// Scratch for any step: results of 2,560 ranges of 64 heads, whatever the context, the batch and
// the heads.
inline constexpr int64_t kSparseAttentionCudaScratchBytes = int64_t{2560} * 66'560;

// kProduct with bf16 queries and outputs and rows that are all FP8 or all bf16 computes on tensor
// cores (cuda_rows.cuh), everything else in float32 multiply-adds. Either way a token's entries are
// cut into ranges by their number and that of the heads alone, each with a softmax of its own, and
// the ranges are merged in order: the result has the same bits in every step.
//
// blocks: that share a token's ranges on tensor cores, up to one for each range; 0: as many as
// promise the shortest time. No bit depends on it.
void SparseAttentionCuda(const SparseAttentionArgs& args, void* scratch, CudaStream stream,
                         int blocks = 0);

}  // namespace fathom::ops
