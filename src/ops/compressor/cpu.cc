#include "ops/compressor/compressor.h"

namespace fathom::ops {

void CompressorCpu(const CompressorArgs& args, ThreadPool& pool) {
  CompressorReference(args);
}

}  // namespace fathom::ops
