// sparse_attention on CUDA. The pointers of the arguments are device pointers, except `step`, which
// the host reads when it launches.
#pragma once

#include "ops/cuda/candidates.h"
#include "ops/cuda/device.h"
#include "ops/sparse_attention/sparse_attention.h"

namespace fathom::ops {

// Scratch for any step: a fixed number of partial results of float32 attention (about 70 MB),
// whatever the context, the batch and the heads.
int64_t SparseAttentionCudaScratchBytes();

// Whether `rope` may be set: where the kernel on tensor cores (cuda_rows.cuh) is taken.
bool SparseAttentionCudaFuses(const SparseAttentionArgs& args);

// kProduct with bf16 queries and outputs and rows that are all FP8 or all bf16 computes on tensor
// cores (cuda_rows.cuh), everything else in float32 multiply-adds. Either way a token's entries are
// cut into ranges by their number alone, each with a softmax of its own, and the ranges are merged
// in order: the result has the same bits in every step.
//
// trial: what a build with candidates (ops/cuda/candidates.h) does otherwise. The numbers of ranges
// must be the same in all steps of a process.
struct AttentionTrial {
  bool candidate = kCudaCandidates;  // the candidate of the kernel on tensor cores
  int range_tiles = 5;               // of 64 entries, of a range while there are few ranges
  int max_ranges = 0;                // up to 16; 0: as many as let eight tokens run at once
  bool prefetch = true;              // of rows to L2, more than a tile before they are fetched
};
void SparseAttentionCuda(const SparseAttentionArgs& args, void* scratch, CudaStream stream,
                         const AttentionTrial& trial = {});

// How many tokens of so many ranges (up to 16) and up to 64 heads the candidate works on at once.
int SparseAttentionCudaClusters(int ranges);

}  // namespace fathom::ops
