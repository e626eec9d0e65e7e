#include "ops/sampling/scan.h"

namespace fathom::ops {
namespace {
#include "ops/sampling/scan_loops.inc"
}  // namespace

const ScanKernels& Avx2Scan() {
  static constexpr ScanKernels kKernels{ChunkMax, Weights, ExpSum};
  return kKernels;
}

}  // namespace fathom::ops
