// Kernels that have not been measured on a card yet. -DFATHOM_CUDA_CANDIDATES=ON builds with them,
// so that tests and benches of the two builds decide; what has won loses its switch, what has lost
// is deleted. Every candidate gives the same bits as what it would replace.
#pragma once

namespace fathom::ops {

#ifdef FATHOM_CUDA_CANDIDATES
inline constexpr bool kCudaCandidates = true;
#else
inline constexpr bool kCudaCandidates = false;
#endif

// What a CudaBackend computes together that the model computes one after the other, where the
// kernels can. Benches turn them off one by one.
struct CudaFusions {
  bool rotations = kCudaCandidates;  // norm and RoPE of queries, RoPE of the output: by attention
  bool norm = kCudaCandidates;       // of the query latent: by the products that take it
  bool gate = kCudaCandidates;       // with the choice of experts
  bool one_token = kCudaCandidates;  // the indexer of few tokens of short contexts: one launch
};

}  // namespace fathom::ops
