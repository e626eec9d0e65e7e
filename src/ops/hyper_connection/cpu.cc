#include <algorithm>

#include "core/cpu_features.h"
#include "core/status.h"
#include "ops/hyper_connection/hyper_connection.h"
#include "ops/hyper_connection/kernels.h"

namespace fathom::ops {

void HyperConnectionCpu(const HyperConnectionArgs& args, ThreadPool& pool) {
  const Isa isa = CpuIsa();
  if (isa == Isa::kScalar) return HyperConnectionReference(args);
  const int64_t d = args.x.cols / kStreams;
  FATHOM_CHECK(d % 16 == 0);
  const auto kernel = isa == Isa::kAvx512 ? SeamAvx512 : SeamAvx2;
  pool.ParallelFor(args.x.rows, kSeamTile, [&](int64_t begin, int64_t end, int) {
    SeamTile tile;
    tile.tokens = static_cast<int>(end - begin);
    tile.d = d;
    tile.x = args.x.f32_row(begin);
    tile.x_stride = args.x.stride;
    if (!args.o.empty()) {
      tile.o = args.o.f32_row(begin);
      tile.o_stride = args.o.stride;
    }
    // The head's collapse has neither post nor comb.
    if (args.post != nullptr) tile.post = args.post + begin * kStreams;
    if (args.comb != nullptr) tile.comb = args.comb + begin * kStreams * kStreams;
    if (args.site != nullptr) {
      tile.fn = args.site->fn;
      tile.base = args.site->base;
      tile.scale = args.site->scale;
      tile.mixes = args.site->mixes;
      tile.u = args.u.f32_row(begin);
      tile.u_stride = args.u.stride;
    }
    if (args.norm != nullptr) {
      tile.norm = args.norm;
      tile.z = args.z.f32_row(begin);
      tile.z_stride = args.z.stride;
    }
    tile.iterations = args.sinkhorn_iterations;
    tile.eps = args.eps;
    tile.norm_eps = kNormEps;
    tile.round = args.numerics == Numerics::kProduct;
    kernel(tile);
  });
}

}  // namespace fathom::ops
