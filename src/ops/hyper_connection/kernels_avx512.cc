#include "ops/hyper_connection/kernels.h"
#include "ops/vec16.h"
// clang-format off
#include "ops/hyper_connection/kernels.inc"
// clang-format on

namespace fathom::ops {

void SeamAvx512(const SeamTile& tile) {
  tile.round ? Seam<true>(tile) : Seam<false>(tile);
}

}  // namespace fathom::ops
