#include <algorithm>

#include "ops/head/head.h"

namespace fathom::ops {

void EmbedCpu(const EmbedArgs& args, ThreadPool& pool) {
  pool.ParallelFor(args.x.rows, 64, [&](int64_t begin, int64_t end, int) {
    const int64_t d = args.x.cols / kStreams;
    for (int64_t t = begin; t < end; ++t) {
      const bf16_t* row = args.table + args.token[t] * d;
      float* x = args.x.f32_row(t);
      for (int64_t i = 0; i < d; ++i) x[i] = Bf16ToF32(row[i]);
      for (int s = 1; s < kStreams; ++s) std::copy_n(x, d, x + s * d);
    }
  });
}

void HeadCpu(const HeadArgs& args, ThreadPool& pool) {
  for (int r = 0; r < args.num_rows; ++r) {
    std::copy_n(args.x.f32_row(args.rows[r]), args.x.cols, args.gathered.f32_row(r));
  }
  HyperConnectionCpu({.x = TopRows(args.gathered, args.num_rows),
                      .site = args.site,
                      .u = args.u,
                      .norm = args.norm,
                      .z = args.z,
                      .eps = args.eps,
                      .numerics = args.numerics},
                     pool);
  LinearCpu({.x = TopRows(args.z, args.num_rows),
             .weight = args.weight,
             .y = TopRows(args.logits, args.num_rows),
             .numerics = args.numerics,
             .round_output = false},
            pool);
}

}  // namespace fathom::ops
