#include <algorithm>
#include <cstring>

#include "core/cpu_features.h"
#include "core/status.h"
#include "ops/norm_rope_insert/kernels.h"
#include "ops/norm_rope_insert/norm_rope_insert.h"
#include "ops/quantise/quantise.h"

namespace fathom::ops {
namespace {

const NormKernels* Kernels() {
  switch (CpuIsa()) {
    case Isa::kAvx512: return &kNormAvx512;
    case Isa::kAvx2: return &kNormAvx2;
    case Isa::kScalar: break;
  }
  return nullptr;
}

}  // namespace

void RmsNormCpu(const RmsNormArgs& args, ThreadPool& pool) {
  const NormKernels* kernels = Kernels();
  if (kernels == nullptr || args.x.cols % 16 != 0) return RmsNormReference(args);
  pool.ParallelFor(args.x.rows, 64, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      kernels->rms_norm(args.x.f32_row(t), args.weight, args.y.f32_row(t), args.x.cols, kNormEps,
                        args.numerics == Numerics::kProduct);
    }
  });
}

void NormRopeInsertCpu(const NormRopeInsertArgs& args, ThreadPool& pool) {
  const NormKernels* kernels = Kernels();
  if (kernels == nullptr) return NormRopeInsertReference(args);
  FATHOM_CHECK(args.step_rows.rows_per_page >= args.kv.rows);
  const bool round = args.numerics == Numerics::kProduct;
  pool.ParallelFor(args.kv.rows, 16, [&](int64_t begin, int64_t end, int) {
    alignas(64) float row[kHeadDim];
    for (int64_t t = begin; t < end; ++t) {
      const float* rope = args.rope + t * kRopeDim;
      float* q = args.q.f32_row(t);
      for (int h = 0; h < args.heads; ++h) {
        kernels->query_head(q + int64_t{h} * kHeadDim, rope, kNormEps, round);
      }
      kernels->key_row(args.kv.f32_row(t), args.kv_norm, rope, row, kNormEps, round);
      const PagedRows& out = args.step_rows;
      const auto r = static_cast<int32_t>(t);
      if (args.round_kv && out.format == RowFormat::kBf16) RoundKvRow(row);
      EncodeRowCpu(out.format, kHeadDim, row, out.data(0, r), out.scale(0, r));
    }
  });
}

void WindowCommitCpu(const WindowCommitArgs& args, ThreadPool& pool) {
  // A few hundred bytes per sequence: copying them costs less than waking a thread.
  WindowCommitReference(args);
}

}  // namespace fathom::ops
