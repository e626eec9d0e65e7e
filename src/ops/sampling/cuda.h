// sampling on CUDA: the contract of SampleBatch in sampling.h, bit for bit. args.logits on the
// device, the rest on the host.
#pragma once

#include "ops/cuda/device.h"
#include "ops/sampling/sampling.h"

namespace fathom::ops {

// Whether rows of so many logits are sampled on the device. Larger vocabularies than any V4's do
// not fit into the shared memory of a cluster.
bool SamplesOnCuda(int64_t vocabulary);

// Bytes of scratch for `rows` rows, 256-byte aligned memory.
int64_t SampleCudaScratchBytes(int64_t rows, int64_t vocabulary);

// `scratch` is device memory of SampleCudaScratchBytes(max_rows, V); `host` pinned memory of as
// many bytes. args.rows may be more than max_rows. Waits for the result.
void SampleBatchCuda(const SampleBatchArgs& args, int64_t max_rows, void* scratch, void* host,
                     CudaStream stream);

}  // namespace fathom::ops
