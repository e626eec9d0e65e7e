// LinearCpu: rows are prepared once, then panels (and blocks of rows) are shared among threads.
#include <algorithm>

#include "core/status.h"
#include "ops/linear/packed_weight.h"

namespace fathom::ops {
namespace {

// Below this many multiply-adds a second thread costs more than it brings (about 2 us of work).
constexpr int64_t kInlineWork = 60'000;

constexpr int64_t kBlockBytes = 1 << 20;  // of x in one block of rows

}  // namespace

void LinearCpu(const LinearArgs& args, ThreadPool& pool) {
  const CpuPackedWeight& w = Packed(*args.weight);
  const LinearKernels& kernels = CurrentLinearKernels();
  const int64_t rows = args.x.rows;
  FATHOM_CHECK(rows >= 1 && args.x.cols == w.in && args.y.cols == w.out && args.y.rows >= rows);
  const bool product = args.numerics == Numerics::kProduct;
  const int64_t work = rows * w.out * w.in;
  const bool small = work <= kInlineWork || pool.size() == 1;

  // Worker 0's tile stands before the prepared rows: a second Scratch(0) call could move them.
  float* tile0 = static_cast<float*>(
      pool.Scratch(0, kPanelTileBytes + rows * w.depth * static_cast<int64_t>(sizeof(float))));
  float* x = tile0 + kPanelTileBytes / sizeof(float);
  const int64_t row_grain = small ? rows : std::max<int64_t>(1, 16'384 / w.depth);
  pool.ParallelFor(rows, row_grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      PrepareRow(kernels, w.format, args.numerics, args.x.f32_row(t), w.in, w.depth,
                 x + t * w.depth);
    }
  });

  // A task is a run of panels over a block of rows. The block's x stays in the second-level cache
  // while all panels pass; expanding a panel pays off over about 50 rows or more. There should be
  // a few tasks per thread. With few rows a task takes several panels at once: the kernels work on
  // two at a time then.
  const int64_t wanted = small ? 1 : 4 * pool.size();
  int64_t block_rows = std::clamp<int64_t>(kBlockBytes / (w.depth * 4), 48, 96);
  if (w.panels < wanted) {
    block_rows = std::clamp<int64_t>(rows * w.panels / wanted, 24, block_rows);
  }
  int64_t blocks = (rows + block_rows - 1) / block_rows;
  block_rows = (rows + blocks - 1) / blocks;
  int64_t run = 1;
  if (blocks == 1) {
    run = small ? w.panels : std::clamp<int64_t>((w.panels / wanted + 1) / 2 * 2, 1, 16);
  }
  const int64_t runs = (w.panels + run - 1) / run;
  pool.ParallelFor(runs * blocks, 1, [&](int64_t begin, int64_t end, int worker) {
    float* tile = worker == 0 ? tile0 : static_cast<float*>(pool.Scratch(worker, kPanelTileBytes));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t panel = task % runs * run;
      const int64_t row0 = task / runs * block_rows;
      PanelJob job = w.Job(panel, std::min(run, w.panels - panel));
      job.x = x + row0 * w.depth;
      job.x_stride = w.depth;
      job.rows = std::min(block_rows, rows - row0);
      job.y = args.y.f32_row(row0) + panel * kPanelOutputs;
      job.y_stride = args.y.stride;
      job.round = product && args.round_output;
      job.tile = tile;
      kernels.panel(job);
    }
  });
}

}  // namespace fathom::ops
