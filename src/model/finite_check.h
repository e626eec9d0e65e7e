// Refuses weights that are NaN or infinite, before they turn an answer into garbage.
#pragma once

#include <span>

#include "core/status.h"
#include "core/thread_pool.h"
#include "model/safetensors.h"

namespace fathom {

// kDataLoss naming the first bad tensor in order and its first bad element. NaN codes: BF16, F16,
// F32 all-ones exponent; F8_E4M3 0x7f and 0xff; F8_E8M0 0xff. Integer tensors (and packed FP4,
// which has no NaN) are not read at all.
Status CheckFinite(std::span<const TensorInfo* const> tensors, ThreadPool& pool);

}  // namespace fathom
