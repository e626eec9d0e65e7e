// Puts a model's weights on the GPU, if it is one that the kernels take.
#pragma once

#include "core/status.h"
#include "model/config.h"
#include "model/weights.h"
#include "ops/cuda/cuda_backend.h"

namespace fathom {

// kInvalidArgument names the key of config.json and its value when a kernel does not take it.
Status CheckForCuda(const ModelConfig& config);

// Copies every weight to the device, once: matrices at stored precision into one reservation
// (LinearWeight::packed), small vectors, hash tables and the embedding into another. Afterwards the
// host copies are no longer read. kResourceExhausted with the bytes that are missing.
Status UploadForCuda(Weights& weights, const ModelConfig& config, ops::CudaBackend& backend);

}  // namespace fathom
