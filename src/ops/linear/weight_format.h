// How a weight is stored. Apart from linear.h because the per-ISA files may include nothing else.
#pragma once

#include <cstdint>

namespace fathom::ops {

enum class WeightFormat : uint8_t { kF32, kBF16, kFp8Block128, kFp4Block32 };

}  // namespace fathom::ops
