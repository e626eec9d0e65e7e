// experts on CUDA (experts.h).
//
// Token-slot pairs are sorted by expert on the device; the shared expert is one more group, chosen
// by every token in slot k. Products run over tiles of an expert's pairs, on grids of the worst
// case whose surplus blocks end at once: nothing returns to the host. Few pairs take the streaming
// product of linear, in tiles of 8, many the tiled one; both give the same bits (linear/cuda.h).
// Every pair's result goes to its own row of the scratch and one kernel adds a token's rows in
// ascending slot, shared last. A single token of FP4 experts and an FP8 shared one, the formats of
// a checkpoint, takes two launches instead, to the same bits (cuda_single.cuh).
#pragma once

#include <cstdint>

#include "ops/experts/experts.h"
#include "ops/linear/cuda.h"

namespace fathom::ops {

// Packs every matrix of a layer and builds the device table that ExpertsCuda reads; the table hangs
// on experts[0].w1. All routed experts have the same shapes and formats, w1 and w3 the same format.
void PackExpertsCuda(ExpertWeights* experts, int num_experts, ExpertWeights& shared,
                     const CudaAllocate& allocate = {});

// Device bytes PackExpertsCuda asks for.
int64_t CudaExpertsBytes(const ExpertWeights* experts, int num_experts,
                         const ExpertWeights& shared);

// Bytes of scratch for up to `rows` tokens with args' weights, top_k and numerics; args.z and
// args.y are not read. 256-byte aligned memory. About
// rows * (top_k + 1) * (hidden + 3 * inner) * 2 bytes.
int64_t ExpertsCudaScratchBytes(const ExpertsArgs& args, int64_t rows);

// Arguments of experts.h, z and y in device memory; args.experts and args.shared are host structs.
void ExpertsCuda(const ExpertsArgs& args, void* scratch, CudaStream stream);

}  // namespace fathom::ops
