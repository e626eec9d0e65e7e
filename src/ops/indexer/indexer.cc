// The CPU indexer: queries are prepared in place, then groups of tokens of one sequence scan ranges
// of its rows. A batch of rows is expanded once and scored for every token of the group; scores
// live only until they are offered to the token's TopRows. Ranges of one group are merged at the
// end. Neither groups nor ranges change a result, so they follow the number of threads.
#include "ops/indexer/indexer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "core/cpu_features.h"
#include "core/dtype.h"
#include "core/status.h"
#include "ops/indexer/kernels.h"
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

// Bytes of one worker's scratch, laid out in this order, every part 64-byte aligned.
struct Layout {
  int64_t tiles;    // kBatchTiles tiles
  int64_t queries;  // [max_tokens, head groups]
  int64_t stage;    // 16 rows copied together where a tile crosses pages
  int64_t buffers;  // [max_tokens, 2, capacity]
  int64_t total;
};

constexpr int64_t Align(int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

class Scan {
 public:
  Scan(const IndexerArgs& args, const IndexerKernels& kernels, const Cut& cut)
      : args_(args),
        kernels_(kernels),
        fp4_(args.keys.format == RowFormat::kFp4Index),
        head_groups_((args.heads + kHeadGroup - 1) / kHeadGroup),
        capacity_(TopRows::Capacity(args.top_k)),
        data_bytes_(RowDataBytes(args.keys.format, kIndexDim)),
        scale_bytes_(RowScaleBytes(args.keys.format)) {
    query_bytes_ =
        head_groups_ * static_cast<int64_t>(fp4_ ? sizeof(Fp4Heads) : sizeof(FloatHeads));
    tile_bytes_ = fp4_ ? sizeof(Fp4Tile) : sizeof(FloatTile);
    layout_.tiles = 0;
    layout_.queries = Align(kBatchTiles * tile_bytes_);
    layout_.stage = layout_.queries + Align(cut.max_tokens * query_bytes_);
    layout_.buffers = layout_.stage + Align(kTileRows * (data_bytes_ + scale_bytes_));
    layout_.total = layout_.buffers + Align(cut.max_tokens * 2 * capacity_ * 4);
  }

  int64_t scratch_bytes() const { return layout_.total; }

  // Scans rows [first, last) for the tokens of `group`; tops[i] receives the best of token i.
  void Run(const Group& group, int32_t first, int32_t last, std::byte* scratch, TopRows* tops) {
    const int tokens = static_cast<int>(group.end - group.begin);
    auto* buffers = reinterpret_cast<int32_t*>(scratch + layout_.buffers);
    for (int i = 0; i < tokens; ++i) {
      int32_t* keys = buffers + 2 * i * capacity_;
      tops[i].Start(args_.top_k, keys, keys + capacity_);
      PackQuery(group.begin + i, scratch + layout_.queries + i * query_bytes_);
    }
    const StepView& step = *args_.step;
    const int32_t* blocks = step.blocks_of(step.sequence[group.begin]);
    alignas(64) float scores[kBatchRows];
    for (int32_t row = first; row < last; row += kBatchRows) {
      if (row + kBatchRows < last) Prefetch(blocks, row + kBatchRows, last);
      const int count = CeilDiv(std::min(kBatchRows, last - row), kTileRows);
      for (int i = 0; i < count; ++i) {
        Expand(blocks, row + i * kTileRows, last, scratch, i);
      }
      for (int i = 0; i < tokens; ++i) {
        const int64_t token = group.begin + i;
        const int32_t n =
            std::min(std::min(kBatchRows, last - row), VisibleRows(step, token) - row);
        if (n <= 0) continue;
        Score(scratch, CeilDiv(n, kTileRows), scratch + layout_.queries + i * query_bytes_, scores);
        if (args_.scores != nullptr) {
          std::copy(scores, scores + n, args_.scores + token * args_.scores_stride + row);
        }
        tops[i].Offer(kernels_, scores, n, row);
      }
    }
    for (int i = 0; i < tokens; ++i) tops[i].Keep(kernels_);
  }

 private:
  void PackQuery(int64_t token, std::byte* out) const {
    const float* q = args_.q.f32_row(token);
    const float* w = args_.w.f32_row(token);
    if (fp4_) {
      kernels_.pack_fp4(q, w, args_.heads, reinterpret_cast<Fp4Heads*>(out));
      return;
    }
    auto* heads = reinterpret_cast<FloatHeads*>(out);
    for (int first = 0; first < args_.heads; first += kHeadGroup, ++heads) {
      const int count = std::min(kHeadGroup, args_.heads - first);
      if (count < kHeadGroup) std::memset(heads, 0, sizeof(*heads));
      std::memcpy(heads->q, q + first * kIndexDim, sizeof(float) * kIndexDim * count);
      std::memcpy(heads->w, w + first, sizeof(float) * count);
    }
  }

  // Rows [row, row + 16) as tile `index`; rows at and beyond `last` may hold anything.
  void Expand(const int32_t* blocks, int32_t row, int32_t last, std::byte* scratch,
              int index) const {
    const PagedRows& keys = args_.keys;
    const int32_t in_page = row % keys.rows_per_page;
    const int32_t block = blocks[row / keys.rows_per_page];
    const auto* data = reinterpret_cast<const uint8_t*>(keys.data(block, in_page));
    const auto* scale = reinterpret_cast<const uint8_t*>(keys.scale(block, in_page));
    if (in_page + kTileRows > keys.rows_per_page) {
      auto* stage = reinterpret_cast<uint8_t*>(scratch + layout_.stage);
      for (int i = 0; i < kTileRows; ++i) {
        const int32_t r = std::min(row + i, last - 1);
        const int32_t b = blocks[r / keys.rows_per_page];
        std::memcpy(stage + i * data_bytes_, keys.data(b, r % keys.rows_per_page), data_bytes_);
        std::memcpy(stage + kTileRows * data_bytes_ + i * scale_bytes_,
                    keys.scale(b, r % keys.rows_per_page), scale_bytes_);
      }
      data = stage;
      scale = stage + kTileRows * data_bytes_;
    }
    std::byte* tile = scratch + layout_.tiles + index * tile_bytes_;
    switch (keys.format) {
      case RowFormat::kFp4Index:
        return kernels_.expand_fp4(data, scale, reinterpret_cast<Fp4Tile*>(tile));
      case RowFormat::kFp8Index:
        return kernels_.expand_fp8(data, scale, reinterpret_cast<FloatTile*>(tile));
      case RowFormat::kBf16:
        return kernels_.expand_bf16(data, scale, reinterpret_cast<FloatTile*>(tile));
      case RowFormat::kF32:
        return kernels_.expand_f32(data, scale, reinterpret_cast<FloatTile*>(tile));
      case RowFormat::kFp8Main: break;
    }
    FATHOM_CHECK(false);
  }

  void Score(std::byte* scratch, int count, std::byte* query, float* scores) const {
    std::byte* tiles = scratch + layout_.tiles;
    if (fp4_) {
      kernels_.score_fp4(reinterpret_cast<Fp4Tile*>(tiles), count,
                         reinterpret_cast<Fp4Heads*>(query), head_groups_, scores);
    } else {
      kernels_.score_float(reinterpret_cast<FloatTile*>(tiles), count,
                           reinterpret_cast<FloatHeads*>(query), head_groups_, scores);
    }
  }

  // Pages lie a block apart, so the hardware's prefetcher starts anew on each.
  void Prefetch(const int32_t* blocks, int32_t row, int32_t last) const {
    const PagedRows& keys = args_.keys;
    const int32_t end = std::min(row + kBatchRows, last);
    for (; row < end; row += kTileRows) {
      const int32_t block = blocks[row / keys.rows_per_page];
      const int32_t in_page = row % keys.rows_per_page;
      const std::byte* data = keys.data(block, in_page);
      for (int64_t i = 0; i < kTileRows * data_bytes_; i += 64) __builtin_prefetch(data + i, 0, 2);
      __builtin_prefetch(keys.scale(block, in_page), 0, 2);
    }
  }

  const IndexerArgs& args_;
  const IndexerKernels& kernels_;
  bool fp4_;
  int head_groups_;
  int64_t capacity_;
  int64_t data_bytes_;
  int64_t scale_bytes_;
  int64_t query_bytes_;
  int64_t tile_bytes_;
  Layout layout_;
};

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

  Scan scan(args, kernels, cut);
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
      scan.Run(group, first, last, scratch(worker), tops);
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
