// The CPU indexer: queries are prepared in place, then groups of tokens of one sequence scan ranges
// of its rows. A batch of rows is expanded once and scored for every token of the group; scores
// live only until they are offered to the token's TopRows. Ranges of one group are merged at the
// end. Neither groups nor ranges change a result, so they follow the number of threads.
#include "ops/indexer/indexer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/cpu_features.h"
#include "core/dtype.h"
#include "core/status.h"
#include "ops/indexer/kernels.h"
#include "ops/indexer/scan.h"
#include "ops/indexer/top_rows.h"

namespace fathom::ops {
namespace {

const IndexerKernels& Kernels() {
  switch (CpuIsa()) {
    case Isa::kAvx512: return kIndexerAvx512;
    case Isa::kAvx2: return kIndexerAvx2;
    case Isa::kScalar: break;
  }
  return kIndexerScalar;
}

int32_t VisibleRows(const StepView& step, int64_t token) {
  return (step.position[token] + 1) / 4;
}

bool IsScored(const IndexerArgs& args, int64_t token) {
  return args.scores != nullptr || VisibleRows(*args.step, token) > args.top_k;
}

void PrepareToken(const IndexerArgs& args, const IndexerKernels& kernels, int64_t token) {
  const bool product = args.numerics == Numerics::kProduct;
  const QueryRounding rounding = args.keys.format == RowFormat::kFp4Index   ? QueryRounding::kFp4
                                 : args.keys.format == RowFormat::kFp8Index ? QueryRounding::kFp8
                                                                            : QueryRounding::kNone;
  kernels.prepare(args.q.f32_row(token), args.heads, args.rope + token * kRopeDim, rounding,
                  product);
  const float scale = static_cast<float>(1.0 / std::sqrt(double{kIndexDim} * args.heads));
  float* w = args.w.f32_row(token);
  for (int h = 0; h < args.heads; ++h) {
    w[h] = product ? RoundBf16(w[h] * RoundBf16(scale)) : w[h] * scale;
  }
}

void TakeAll(const IndexerArgs& args, int64_t token) {
  const int32_t visible = VisibleRows(*args.step, token);
  int32_t* selected = args.selected + token * args.top_k;
  std::iota(selected, selected + visible, 0);
  std::fill(selected + visible, selected + args.top_k, -1);
  args.counts[token] = visible;
}

void TakeBest(const IndexerArgs& args, int64_t token, const TopRows& top) {
  int32_t* selected = args.selected + token * args.top_k;
  std::copy(top.rows(), top.rows() + top.count(), selected);
  std::fill(selected + top.count(), selected + args.top_k, -1);
  args.counts[token] = top.count();
}

// Tokens [begin, end) of one sequence, all scored.
struct Group {
  int64_t begin;
  int64_t end;
  int32_t rows;  // visible to the last token
};

// How the work is cut.
struct Cut {
  std::vector<Group> groups;
  int max_tokens;      // of a group
  int ranges;          // of rows, per group
  int32_t range_rows;  // a multiple of kBatchRows
};

int32_t CeilDiv(int64_t a, int64_t b) {
  return static_cast<int32_t>((a + b - 1) / b);
}

Cut CutWork(const IndexerArgs& args, int threads) {
  const StepView& step = *args.step;
  Cut cut;
  // Enough tokens to pay for the expansion, few enough for their queries to stay in the L2 cache.
  cut.max_tokens = std::clamp(256 / args.heads, 4, 32);
  int32_t most_rows = 0;
  for (int32_t s = 0; s < step.num_sequences; ++s) {
    int64_t t = step.query_start[s];
    const int64_t end = step.query_start[s + 1];
    while (t < end && !IsScored(args, t)) ++t;  // the visible count only grows
    while (t < end) {
      const int64_t next = std::min<int64_t>(end, t + cut.max_tokens);
      cut.groups.push_back({t, next, VisibleRows(step, next - 1)});
      most_rows = std::max(most_rows, cut.groups.back().rows);
      t = next;
    }
  }
  // Four pieces of work per thread; a range below some 10 us of scoring is not worth a merge.
  constexpr int64_t kLeastWork = 1 << 15;  // rows * heads * tokens
  cut.ranges = 1;
  const int64_t groups = static_cast<int64_t>(cut.groups.size());
  if (threads > 1 && groups > 0 && groups < 4 * threads) {
    const int64_t tokens = cut.groups[0].end - cut.groups[0].begin;
    const int64_t least = std::max<int64_t>(2 * kBatchRows, kLeastWork / (args.heads * tokens));
    cut.ranges = static_cast<int>(std::clamp<int64_t>(CeilDiv(4 * threads, groups), 1,
                                                      std::max<int64_t>(1, most_rows / least)));
  }
  cut.range_rows = std::max(CeilDiv(CeilDiv(most_rows, cut.ranges), kBatchRows), 1) * kBatchRows;
  return cut;
}

constexpr int64_t Align(int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

constexpr int kMostTokens = 32;  // of a group

// Best rows of every (range, token) of a group, kept until all ranges are done.
struct Partial {
  int32_t* keys;
  int32_t* rows;
  int32_t* count;
};

}  // namespace

void IndexerCpu(const IndexerArgs& args, ThreadPool& pool) {
  const StepView& step = *args.step;
  FATHOM_CHECK(args.keys.channels == kIndexDim && args.keys.rows_per_page > 0 && args.heads > 0);
  const IndexerKernels& kernels = Kernels();
  const Cut cut = CutWork(args, pool.size());
  const int64_t per_chunk = cut.groups.empty() ? 64 : 1;
  pool.ParallelFor(step.num_tokens, per_chunk, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      if (IsScored(args, t)) PrepareToken(args, kernels, t);
      else TakeAll(args, t);
    }
  });
  if (cut.groups.empty()) return;

  const IndexerScan scan(args, kernels, cut.max_tokens);
  const int64_t groups = static_cast<int64_t>(cut.groups.size());
  const int64_t items = groups * cut.ranges;
  // Where ranges are merged, worker 0's scratch holds their results before its own.
  const int64_t slots = cut.ranges > 1 ? items * cut.max_tokens : 0;
  const int64_t k = args.top_k;
  const int64_t shared = Align(slots * (2 * k + 1) * 4);
  auto* base = static_cast<std::byte*>(pool.Scratch(0, shared + scan.scratch_bytes()));
  auto partial = [&](int64_t item, int64_t token) {
    const int64_t slot = item * cut.max_tokens + token;
    auto* counts = reinterpret_cast<int32_t*>(base);
    int32_t* keys = counts + slots + slot * 2 * k;
    return Partial{keys, keys + k, counts + slot};
  };
  auto scratch = [&](int worker) {
    return worker == 0 ? base + shared
                       : static_cast<std::byte*>(pool.Scratch(worker, scan.scratch_bytes()));
  };

  pool.ParallelFor(items, 1, [&](int64_t begin, int64_t end, int worker) {
    TopRows tops[kMostTokens];
    for (int64_t item = begin; item < end; ++item) {
      const Group& group = cut.groups[item / cut.ranges];
      const int32_t range = static_cast<int32_t>(item % cut.ranges);
      const int32_t first = std::min(range * cut.range_rows, group.rows);
      const int32_t last = std::min(first + cut.range_rows, group.rows);
      scan.Run(group.begin, group.end, first, last, scratch(worker), tops);
      for (int64_t t = group.begin; t < group.end; ++t) {
        const TopRows& top = tops[t - group.begin];
        if (cut.ranges == 1) {
          TakeBest(args, t, top);
          continue;
        }
        const Partial out = partial(item, t - group.begin);
        std::copy(top.keys(), top.keys() + top.count(), out.keys);
        std::copy(top.rows(), top.rows() + top.count(), out.rows);
        *out.count = top.count();
      }
    }
  });
  if (cut.ranges == 1) return;

  pool.ParallelFor(groups, 1, [&](int64_t begin, int64_t end, int worker) {
    for (int64_t g = begin; g < end; ++g) {
      const Group& group = cut.groups[g];
      for (int64_t t = group.begin; t < group.end; ++t) {
        auto* keys = reinterpret_cast<int32_t*>(scratch(worker));
        TopRows top;
        top.Start(args.top_k, keys, keys + TopRows::Capacity(k));
        for (int range = 0; range < cut.ranges; ++range) {
          const Partial in = partial(g * cut.ranges + range, t - group.begin);
          top.OfferKeys(kernels, in.keys, in.rows, *in.count);
        }
        top.Keep(kernels);
        TakeBest(args, t, top);
      }
    }
  });
}

}  // namespace fathom::ops
