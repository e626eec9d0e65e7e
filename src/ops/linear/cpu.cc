// LinearCpu: rows are prepared once, then panels (and blocks of rows) are shared among threads.
#include <algorithm>

#include "core/status.h"
#include "ops/linear/packed_weight.h"

namespace fathom::ops {
namespace {

// Below this many multiply-adds a second thread costs more than it brings (about 2 us of work).
constexpr int64_t kInlineWork = 60'000;

}  // namespace

void LinearCpu(const LinearArgs& args, ThreadPool& pool) {
  const CpuPackedWeight& w = Packed(*args.weight);
  const LinearKernels& kernels = CurrentLinearKernels();
  const int64_t rows = args.x.rows;
  FATHOM_CHECK(args.x.cols == w.in && args.y.cols == w.out && args.y.rows >= rows);
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

  // Each task expands its panel once and reuses it over a block of rows: 96 rows or more make the
  // expansion cheap, and there should be four tasks per thread.
  const int64_t wanted = 4 * pool.size();
  int64_t blocks = 1;
  if (!small && w.panels < wanted) {
    blocks = std::clamp<int64_t>(rows / 96, 1, (wanted + w.panels - 1) / w.panels);
  }
  const int64_t block_rows = ((rows + blocks - 1) / blocks + 5) / 6 * 6;
  blocks = (rows + block_rows - 1) / block_rows;
  const int64_t tasks = w.panels * blocks;
  const int64_t grain = small ? tasks : std::max<int64_t>(1, tasks / (8 * pool.size()));
  pool.ParallelFor(tasks, grain, [&](int64_t begin, int64_t end, int worker) {
    float* tile = worker == 0 ? tile0 : static_cast<float*>(pool.Scratch(worker, kPanelTileBytes));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t panel = task % w.panels;
      const int64_t row0 = task / w.panels * block_rows;
      PanelJob job = w.Job(panel);
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
