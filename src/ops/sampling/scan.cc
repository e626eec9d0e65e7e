#include "ops/sampling/scan.h"

#include "core/cpu_features.h"

namespace fathom::ops {
namespace {
#include "ops/sampling/scan_loops.inc"
}  // namespace

const ScanKernels& ScalarScan() {
  static constexpr ScanKernels kKernels{ChunkMax, Weights, ExpSum};
  return kKernels;
}

const ScanKernels& CpuScan() {
  switch (CpuIsa()) {
    case Isa::kAvx512: return Avx512Scan();
    case Isa::kAvx2: return Avx2Scan();
    case Isa::kScalar: break;
  }
  return ScalarScan();
}

}  // namespace fathom::ops
