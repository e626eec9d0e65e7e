// indexer on CUDA. The pointers of the arguments are device pointers, except `step`, which the host
// reads when it launches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cuda/device.h"
#include "ops/indexer/indexer.h"

namespace fathom::ops {

// Scratch for any step of at most `max_tokens` tokens: 64 MiB for a tile of scores, 4 MiB for the
// best of every 16 and up to 16 MiB for packed queries, whatever the context. (Inline: the memory
// plan asks without a GPU.)
inline constexpr int64_t kIndexerScoreBytes = int64_t{64} << 20;
inline constexpr int64_t kIndexerGroupBytes = kIndexerScoreBytes / 16;
inline constexpr int64_t kIndexerPackedBytes = int64_t{16} << 20;
inline constexpr int64_t kIndexerPackedQuery = 64 << 10;  // 128 heads in bf16 and room to spare
constexpr int64_t IndexerCudaScratchBytes(int64_t max_tokens) {
  return kIndexerScoreBytes + kIndexerGroupBytes +
         std::min(kIndexerPackedBytes, std::max<int64_t>(max_tokens, 1) * kIndexerPackedQuery);
}

// Float32 keys, and float32 queries of keys other than kFp4Index: the exact expression of
// indexer.h, so scores and selection equal the CPU's bit for bit. Otherwise dot products by tensor
// cores, those of kFp4Index exact, and a fixed order of heads of its own: scores lie within a few
// units of the last place of the contract's chain and depend on neither the step nor its size; the
// selection is exactly the best of these scores. At most 128 heads.
// one_launch: up to 8 tokens of tables of up to 4,096 compressed rows take one launch without
//   scratch instead of three, with the same bits, where queries and weights are bf16, pages hold a
//   power of two and a multiple of 64 rows, and nobody asks for scores.
void IndexerCuda(const IndexerArgs& args, void* scratch, CudaStream stream,
                 bool one_launch = false);

}  // namespace fathom::ops
