// indexer on CUDA. The pointers of the arguments are device pointers, except `step`, which the host
// reads when it launches.
#pragma once

#include "ops/cuda/device.h"
#include "ops/indexer/indexer.h"

namespace fathom::ops {

// Scratch for any step of at most `max_tokens` tokens; it does not grow with the context, and
// beyond a few hundred tokens not with their number either.
int64_t IndexerCudaScratchBytes(int64_t max_tokens, int top_k);

// kFp4Index keys: the exact expression of indexer.h, so scores and selection equal the CPU's bit
// for bit. Float32 queries or keys: likewise. kFp8Index and kBf16 keys with bf16 queries: dot
// products by tensor cores, each within a few units of the last place of the exact chain.
void IndexerCuda(const IndexerArgs& args, void* scratch, CudaStream stream);

}  // namespace fathom::ops
