// sparse_attention on CUDA. The pointers of the arguments are device pointers, except `step`, which
// the host reads when it launches.
#pragma once

#include "ops/cuda/device.h"
#include "ops/sparse_attention/sparse_attention.h"

namespace fathom::ops {

// Scratch for any step: a fixed number of partial results (about 70 MB), whatever the context, the
// batch and the heads.
int64_t SparseAttentionCudaScratchBytes();

// Compressed entries are cut into segments of 128, a token's result is the ordered merge of its
// segments, and whether one block runs through them or many share them changes no bit. kProduct
// with bf16 queries and no float32 rows computes on tensor cores, everything else in float32.
void SparseAttentionCuda(const SparseAttentionArgs& args, void* scratch, CudaStream stream);

}  // namespace fathom::ops
