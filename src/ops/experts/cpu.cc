// ExpertsCpu: tokens are grouped by expert; two passes over the pool.
//
//   1. (expert, block of rows, 128 channels of I): w1 and w3 panels, SwiGLU, quantise -> a
//   2. (32 or 64 channels of D): w2 panels of every expert in ascending id, then the shared one,
//   added
//      straight into y, whose columns belong to this task alone.
//
// A "slot" is one (token, expert) pair; slots are sorted by expert, the shared expert's come last.
#include <algorithm>
#include <cstring>
#include <vector>

#include "core/cpu_features.h"
#include "core/status.h"
#include "ops/experts/experts.h"
#include "ops/experts/experts_kernels.h"
#include "ops/linear/packed_weight.h"

namespace fathom::ops {
namespace {

constexpr int64_t kBlock = 128;          // channels the activation quantiser treats together
constexpr int64_t kRowBlock = 96;        // rows of a task: enough to pay for expanding the weights
constexpr int64_t kInlineWork = 60'000;  // multiply-adds below which one thread is faster

const ExpertsKernels& Kernels() {
  switch (CpuIsa()) {
    case Isa::kAvx512: return kExpertsAvx512;
    case Isa::kAvx2: return kExpertsAvx2;
    case Isa::kScalar: break;
  }
  return kExpertsScalar;
}

// The same preparation of z serves every weight of these formats.
bool SamePreparation(WeightFormat a, WeightFormat b) {
  const auto kind = [](WeightFormat f) {
    return f == WeightFormat::kF32 ? 0 : f == WeightFormat::kBF16 ? 1 : 2;
  };
  return kind(a) == kind(b);
}

// Slots of one expert.
struct Group {
  const ExpertWeights* weights;
  const float* z;  // prepared rows for this expert's format
  int64_t first;
  int64_t rows;
  float limit;
};

struct UpTask {
  const Group* group;
  int64_t first;
  int64_t rows;
  int64_t block;
};

constexpr int64_t kDownPanels = 2;  // the most panels of one Down task
constexpr int64_t kFloats = kPanelTileBytes / sizeof(float);
constexpr int64_t kWorkerFloats = kFloats + 2 * kRowBlock * kBlock;

// One call's operands and buffers.
struct Run {
  const ExpertsArgs& args;
  const LinearKernels& linear;
  const ExpertsKernels& kernels;
  bool product;
  int64_t z_depth;                  // row stride of the prepared z
  int64_t a_depth;                  // row stride of a
  std::vector<int32_t> token = {};  // of a slot
  std::vector<float> weight = {};   // of a slot
  std::vector<Group> groups = {};
  float* a = nullptr;  // [slots, a_depth], prepared for w2

  void Up(const UpTask& task, float* scratch) const;
  void Down(int64_t panel, int64_t count, float* scratch) const;
};

void Run::Up(const UpTask& task, float* scratch) const {
  const ExpertWeights& e = *task.group->weights;
  float* gate = scratch + kFloats;
  float* up = gate + kRowBlock * kBlock;
  const CpuPackedWeight& w1 = Packed(e.w1);
  const CpuPackedWeight& w3 = Packed(e.w3);
  const int64_t c0 = task.block * kBlock;
  const int64_t channels = std::min(kBlock, w1.out - c0);
  for (const bool is_up : {false, true}) {
    PanelJob job =
        (is_up ? w3 : w1).Job(c0 / kPanelOutputs, (channels + kPanelOutputs - 1) / kPanelOutputs);
    job.x = task.group->z;
    job.x_stride = z_depth;
    job.row_index = token.data() + task.first;
    job.rows = task.rows;
    job.y = is_up ? up : gate;
    job.y_stride = kBlock;
    job.round = product;
    job.tile = scratch;
    linear.panel(job);
  }
  // The last block also zero-fills what pads I to w2's depth.
  const CpuPackedWeight& w2 = Packed(e.w2);
  const int64_t padded = c0 + channels == w1.out ? w2.depth - c0 : channels;
  for (int64_t r = 0; r < task.rows; ++r) {
    float* row = gate + r * kBlock;
    kernels.swiglu(row, up + r * kBlock, channels, task.group->limit, weight[task.first + r],
                   product, row);
    PrepareRow(linear, w2.format, args.numerics, row, channels, padded,
               a + (task.first + r) * a_depth + c0);
  }
}

void Run::Down(int64_t panel, int64_t count, float* scratch) const {
  float* out = scratch + kFloats;
  const int64_t c0 = panel * kPanelOutputs;
  const int64_t cols = std::min<int64_t>(count * kPanelOutputs, args.y.cols - c0);
  for (int64_t t = 0; t < args.z.rows; ++t) {
    std::fill_n(args.y.f32_row(t) + c0, cols, 0.0f);
  }
  for (const Group& group : groups) {
    const bool last = &group == &groups.back();
    for (int64_t r0 = 0; r0 < group.rows; r0 += kRowBlock) {
      PanelJob job = Packed(group.weights->w2).Job(panel, count);
      job.x = a + (group.first + r0) * a_depth;
      job.x_stride = a_depth;
      job.rows = std::min(kRowBlock, group.rows - r0);
      job.y = out;
      job.y_stride = kDownPanels * kPanelOutputs;
      job.round = product;
      job.tile = scratch;
      linear.panel(job);
      for (int64_t r = 0; r < job.rows; ++r) {
        kernels.add(out + r * job.y_stride, cols, product && last,
                    args.y.f32_row(token[group.first + r0 + r]) + c0);
      }
    }
  }
}

// Sorts the slots by expert (a token's order among experts is the id, so any stable order does).
void GroupByExpert(Run& run, const float* z_routed, const float* z_shared) {
  const ExpertsArgs& args = run.args;
  const int64_t rows = args.z.rows;
  const int64_t routed = rows * args.top_k;
  std::vector<int64_t> start(args.num_experts + 1, 0);
  for (int64_t i = 0; i < routed; ++i) {
    FATHOM_CHECK(args.chosen[i] >= 0 && args.chosen[i] < args.num_experts);
    ++start[args.chosen[i] + 1];
  }
  for (int e = 0; e < args.num_experts; ++e) {
    const int64_t count = start[e + 1];
    start[e + 1] += start[e];
    if (count > 0) run.groups.push_back({args.experts + e, z_routed, start[e], count, args.limit});
  }
  run.groups.push_back({args.shared, z_shared, routed, rows, args.shared_limit});
  run.token.resize(routed + rows);
  run.weight.resize(routed + rows);
  for (int64_t i = 0; i < routed; ++i) {
    const int64_t slot = start[args.chosen[i]]++;
    run.token[slot] = static_cast<int32_t>(i / args.top_k);
    run.weight[slot] = args.weights[i];
  }
  for (int64_t t = 0; t < rows; ++t) {
    run.token[routed + t] = static_cast<int32_t>(t);
    run.weight[routed + t] = 1.0f;
  }
}

}  // namespace

void ExpertsCpu(const ExpertsArgs& args, ThreadPool& pool) {
  const int64_t rows = args.z.rows;
  FATHOM_CHECK(rows >= 1);
  const CpuPackedWeight& shared = Packed(args.shared->w1);
  const WeightFormat shared_format = shared.format;
  const WeightFormat routed_format =
      args.top_k > 0 ? Packed(args.experts[0].w1).format : shared_format;
  const bool same = SamePreparation(routed_format, shared_format);
  int64_t a_depth = Packed(args.shared->w2).depth;
  for (int e = 0; e < args.num_experts; ++e) {
    const ExpertWeights& w = args.experts[e];
    FATHOM_CHECK(SamePreparation(Packed(w.w1).format, routed_format));
    FATHOM_CHECK(SamePreparation(Packed(w.w1).format, Packed(w.w3).format));
    FATHOM_CHECK(Packed(w.w1).in == args.z.cols && Packed(w.w2).out == args.y.cols);
    a_depth = std::max(a_depth, Packed(w.w2).depth);
  }
  Run run{.args = args,
          .linear = CurrentLinearKernels(),
          .kernels = Kernels(),
          .product = args.numerics == Numerics::kProduct,
          .z_depth = shared.depth,
          .a_depth = a_depth};

  const int64_t slots = rows * (args.top_k + 1);
  const int64_t z_floats = rows * run.z_depth;
  float* scratch0 = static_cast<float*>(pool.Scratch(
      0, sizeof(float) * (kWorkerFloats + z_floats * (same ? 1 : 2) + slots * run.a_depth)));
  const auto scratch = [&](int worker) {
    return worker == 0 ? scratch0
                       : static_cast<float*>(pool.Scratch(worker, sizeof(float) * kWorkerFloats));
  };
  float* z_shared = scratch0 + kWorkerFloats;
  float* z_routed = same ? z_shared : z_shared + z_floats;
  run.a = z_routed + z_floats;
  GroupByExpert(run, z_routed, z_shared);

  const int64_t work = slots * args.z.cols * args.shared->w1.out;
  const bool small = work <= kInlineWork;
  const int64_t row_grain = std::max<int64_t>(1, 16'384 / run.z_depth);
  pool.ParallelFor(rows, row_grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const float* z = args.z.f32_row(t);
      PrepareRow(run.linear, shared_format, args.numerics, z, args.z.cols, run.z_depth,
                 z_shared + t * run.z_depth);
      if (same) continue;
      PrepareRow(run.linear, routed_format, args.numerics, z, args.z.cols, run.z_depth,
                 z_routed + t * run.z_depth);
    }
  });

  std::vector<UpTask> tasks;
  for (const Group& group : run.groups) {
    const int64_t blocks = (group.weights->w1.out + kBlock - 1) / kBlock;
    for (int64_t r = 0; r < group.rows; r += kRowBlock) {
      for (int64_t block = 0; block < blocks; ++block) {
        tasks.push_back({&group, group.first + r, std::min(kRowBlock, group.rows - r), block});
      }
    }
  }
  const int64_t count = static_cast<int64_t>(tasks.size());
  pool.ParallelFor(count, small ? count : 1, [&](int64_t begin, int64_t end, int worker) {
    float* mine = scratch(worker);
    for (int64_t i = begin; i < end; ++i) run.Up(tasks[i], mine);
  });

  // With few rows the kernels work on two panels at a time.
  const int64_t panels = (args.y.cols + kPanelOutputs - 1) / kPanelOutputs;
  const int64_t run_panels = rows <= 4 && panels >= kDownPanels * pool.size() ? kDownPanels : 1;
  const int64_t downs = (panels + run_panels - 1) / run_panels;
  pool.ParallelFor(downs, small ? downs : 1, [&](int64_t begin, int64_t end, int worker) {
    float* mine = scratch(worker);
    for (int64_t i = begin; i < end; ++i) {
      run.Down(i * run_panels, std::min(run_panels, panels - i * run_panels), mine);
    }
  });
}

}  // namespace fathom::ops
