// OutputProjectionCpu: the rotated heads are the product's input as they stand, so nothing is
// copied: a group's input is a column range of o.
#include <algorithm>

#include "core/cpu_features.h"
#include "core/status.h"
#include "ops/linear/packed_weight.h"
#include "ops/output_projection/output_projection.h"
#include "ops/output_projection/rotate_kernels.h"

namespace fathom::ops {
namespace {

using RotateHeads = void (*)(float* o, int heads, const float* table, bool round);

RotateHeads CurrentRotateHeads() {
  switch (CpuIsa()) {
    case Isa::kAvx512:
    case Isa::kAvx2: return InverseRotateHeadsAvx2;
    case Isa::kScalar: break;
  }
  return InverseRotateHeadsScalar;
}

// Columns [begin, end) of panel `panel` for the rows of `job`, whose x is set. A panel that lies
// in one group is written in place; one that straddles groups goes through `spare` [rows, 32].
void GroupColumns(const LinearKernels& kernels, PanelJob job, int begin, int end, float* y,
                  int64_t y_stride, float* spare) {
  if (begin == 0 && end == job.cols) {
    job.y = y;
    job.y_stride = y_stride;
    kernels.panel(job);
    return;
  }
  job.y = spare;
  job.y_stride = kPanelOutputs;
  kernels.panel(job);
  for (int64_t r = 0; r < job.rows; ++r) {
    std::copy(spare + r * kPanelOutputs + begin, spare + r * kPanelOutputs + end,
              y + r * y_stride + begin);
  }
}

}  // namespace

void OutputProjectionCpu(const OutputProjectionArgs& args, ThreadPool& pool) {
  const CpuPackedWeight& w = Packed(*args.wo_a);
  const int64_t rows = args.o.rows;
  const int64_t depth = int64_t{kHeadDim} * args.heads / args.groups;
  const int64_t rank = w.out / args.groups;
  FATHOM_CHECK(rows >= 1 && args.heads % args.groups == 0 && w.out % args.groups == 0);
  FATHOM_CHECK(w.in == depth && w.depth == depth && args.y.cols == w.out);
  const LinearKernels& kernels = CurrentLinearKernels();
  const bool product = args.numerics == Numerics::kProduct;

  const RotateHeads rotate = CurrentRotateHeads();
  pool.ParallelFor(rows, std::max(1, 256 / args.heads), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      rotate(args.o.f32_row(t), args.heads, args.rope + t * kRopeDim, product);
    }
  });

  constexpr int64_t kRowBlock = 96;
  const int64_t blocks = (rows + kRowBlock - 1) / kRowBlock;
  const int64_t block_rows = ((rows + blocks - 1) / blocks + 5) / 6 * 6;
  const int64_t tasks = w.panels * blocks;
  const bool small = rows * w.out * depth <= 60'000;  // not worth a second thread
  const int64_t grain = small ? tasks : std::max<int64_t>(1, tasks / (8 * pool.size()));
  pool.ParallelFor(tasks, grain, [&](int64_t begin, int64_t end, int worker) {
    float* tile = static_cast<float*>(pool.Scratch(
        worker, kPanelTileBytes + block_rows * kPanelOutputs * int64_t{sizeof(float)}));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t panel = task % w.panels;
      const int64_t row0 = task / w.panels * block_rows;
      if (row0 >= rows) continue;
      PanelJob job = w.Job(panel);
      const int64_t first = panel * kPanelOutputs;
      job.x_stride = args.o.stride;
      job.rows = std::min(block_rows, rows - row0);
      job.round = product;
      job.tile = tile;
      for (int64_t group = first / rank; group * rank < first + job.cols; ++group) {
        job.x = args.o.f32_row(row0) + group * depth;
        const int64_t from = std::max<int64_t>(0, group * rank - first);
        const int64_t to = std::min<int64_t>(job.cols, (group + 1) * rank - first);
        GroupColumns(kernels, job, static_cast<int>(from), static_cast<int>(to),
                     args.y.f32_row(row0) + first, args.y.stride,
                     tile + kPanelTileBytes / sizeof(float));
      }
    }
  });
}

}  // namespace fathom::ops
