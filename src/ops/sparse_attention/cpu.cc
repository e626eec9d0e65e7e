// sparse_attention on the CPU. Work is cut in one of two ways, with the same results to the bit,
// because a segment is computed and merged by the same code in the same order in both:
//   tiles    a worker takes up to kAttentionTile neighbouring tokens of a sequence and goes through
//            their segments, expanding shared rows once;
//   segments when there are fewer tokens than would keep the workers busy (decode), a worker takes
//            one segment of some heads of one token, and the partial results are merged in order.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/cpu_features.h"
#include "ops/sparse_attention/entries.h"
#include "ops/sparse_attention/kernels.h"
#include "ops/sparse_attention/row_store.h"
#include "ops/sparse_attention/sparse_attention.h"

namespace fathom::ops {
namespace {

// (token, head) pairs of a tile: their states fill an eighth of L2.
constexpr int kTileQueries = 128;

int PadHeads(int heads) {
  return (heads + kAttentionHeadBlock - 1) / kAttentionHeadBlock * kAttentionHeadBlock;
}

// Floats of an AttentionState.
int64_t StateFloats(int heads) {
  return int64_t{heads} * (kHeadDim + 16);
}

AttentionState StateAt(float* memory, int heads) {
  return {memory + int64_t{heads} * kHeadDim, memory + int64_t{heads} * (kHeadDim + 8), memory};
}

struct Tile {
  int32_t sequence, begin, end;  // tokens
};

class Attention {
 public:
  Attention(const SparseAttentionArgs& args, const AttentionKernels& kernels, ThreadPool& pool)
      : args_(args), kernels_(kernels), pool_(pool) {
    const auto is_f32 = [](const PagedRows& rows) {
      return rows.base != nullptr && rows.format == RowFormat::kF32;
    };
    bf16_rows_ = args.numerics == Numerics::kProduct && !is_f32(args.step_rows) &&
                 !is_f32(args.ring) && !is_f32(args.compressed);
  }

  void Run() {
    const int32_t tokens = args_.step->num_tokens;
    if (pool_.size() > 1 && tokens < 2 * pool_.size()) {
      RunSegments();
    } else {
      RunTiles();
    }
  }

 private:
  // What a worker's scratch holds, in order: the row store, one packed query, p, one partial state
  // and `states` running ones.
  struct Scratch {
    std::byte* rows;
    float* q;
    float* p;
    float* part;
    float* states;
  };

  size_t ScratchBytes(int heads, int states) const {
    return RowStore::ScratchBytes(bf16_rows_) +
           sizeof(float) * (int64_t{heads} * (kHeadDim + kAttentionSegment) +
                            (1 + states) * StateFloats(heads));
  }

  Scratch ScratchOf(int worker, int heads, int states) {
    auto* memory = static_cast<std::byte*>(pool_.Scratch(worker, ScratchBytes(heads, states)));
    Scratch scratch;
    scratch.rows = memory;
    scratch.q = reinterpret_cast<float*>(memory + RowStore::ScratchBytes(bf16_rows_));
    scratch.p = scratch.q + int64_t{heads} * kHeadDim;
    scratch.part = scratch.p + int64_t{heads} * kAttentionSegment;
    scratch.states = scratch.part + StateFloats(heads);
    return scratch;
  }

  // Packs heads [begin, begin + count) of a token; heads beyond the last are zero.
  void PackQueries(int32_t token, int begin, int count, float* packed) const {
    for (int h = 0; h < count; ++h, packed += kHeadDim) {
      if (begin + h < args_.heads) {
        kernels_.pack_query(args_.q.f32_row(token) + (begin + h) * kHeadDim, bf16_rows_, packed);
      } else {
        std::fill_n(packed, kHeadDim, 0.0f);
      }
    }
  }

  void Attend(const float* q, int heads, const void* const* rows, int32_t count, float* p,
              const AttentionState& out) const {
    AttentionSegment segment;
    segment.q = q;
    segment.heads = heads;
    segment.rows = rows;
    segment.count = count;
    segment.round_p = args_.numerics == Numerics::kProduct;
    segment.p = p;
    segment.max = out.max;
    segment.sum = out.sum;
    segment.acc = out.acc;
    bf16_rows_ ? kernels_.segment_bf16(segment) : kernels_.segment_f32(segment);
  }

  // Divides by Z and writes heads [begin, begin + count) of a token.
  void Finish(int32_t token, int begin, int count, const AttentionState& state) const {
    for (int h = 0; h < count && begin + h < args_.heads; ++h) {
      const float z = state.sum[h] + std::exp(args_.sink[begin + h] - state.max[h]);
      kernels_.finish(state.acc + int64_t{h} * kHeadDim, 1.0f / z, bf16_rows_,
                      args_.numerics == Numerics::kProduct,
                      args_.out.f32_row(token) + (begin + h) * kHeadDim);
    }
  }

  int32_t SegmentRows(const TokenEntries& entries, int segment) const {
    if (segment == 0) return entries.window();
    const int32_t before = (segment - 1) * kAttentionSegment;
    return std::min(entries.compressed - before, kAttentionSegment);
  }

  void RunTiles() {
    const StepView& step = *args_.step;
    const int heads = PadHeads(args_.heads);
    const int32_t most = std::clamp(kTileQueries / heads, 1, kAttentionTile);
    const int32_t size = std::clamp(step.num_tokens / (4 * pool_.size()), 1, most);
    std::vector<Tile> tiles;
    for (int32_t s = 0; s < step.num_sequences; ++s) {
      for (int32_t t = step.query_start[s]; t < step.query_start[s + 1]; t += size) {
        tiles.push_back({s, t, std::min(t + size, step.query_start[s + 1])});
      }
    }
    pool_.ParallelFor(static_cast<int64_t>(tiles.size()), 1,
                      [&](int64_t begin, int64_t end, int worker) {
                        const Scratch scratch = ScratchOf(worker, heads, size);
                        for (int64_t i = begin; i < end; ++i) RunTile(tiles[i], heads, scratch);
                      });
  }

  // Segments of rows that all tokens share (HCA) are expanded once, so the tile's tokens keep their
  // states while the segments go by; where only one such segment exists, or every token selects its
  // own rows, a token is finished before the next and its query and state stay in the first-level
  // cache. The order within a token is the same.
  void RunTile(const Tile& tile, int heads, const Scratch& scratch) const {
    RowStore store(args_, kernels_, bf16_rows_, scratch.rows);
    store.Reset(tile.sequence);
    TokenEntries entries[kAttentionTile];
    const int32_t count = tile.end - tile.begin;
    for (int32_t i = 0; i < count; ++i) entries[i] = EntriesOf(args_, tile.begin + i);
    const TokenEntries& last = entries[count - 1];  // sees the most shared rows
    const void* const* window = store.Window(entries[0].window_begin, last.position);

    const auto attend = [&](int32_t i, int segment, const void* const* shared, int state) {
      const int32_t token = tile.begin + i;
      const int32_t before = (segment - 1) * kAttentionSegment;
      const int32_t rows = SegmentRows(entries[i], segment);
      const AttentionState to = StateAt(scratch.states + state * StateFloats(heads), heads);
      if (segment == 0) {
        const int32_t skip = entries[i].window_begin - entries[0].window_begin;
        return Attend(scratch.q, heads, window + skip, rows, scratch.p, to);
      }
      const AttentionState part = StateAt(scratch.part, heads);
      const void* const* pointers =
          args_.selected == nullptr
              ? shared
              : store.Selected(args_.selected + int64_t{token} * args_.top_k + before, rows);
      Attend(scratch.q, heads, pointers, rows, scratch.p, part);
      kernels_.merge(to, part, heads);
    };

    if (args_.selected != nullptr || last.segments() <= 2) {
      const void* const* shared = args_.selected == nullptr && last.compressed > 0
                                      ? store.Consecutive(0, last.compressed)
                                      : nullptr;
      for (int32_t i = 0; i < count; ++i) {
        PackQueries(tile.begin + i, 0, heads, scratch.q);
        for (int s = 0; s < entries[i].segments(); ++s) attend(i, s, shared, 0);
        Finish(tile.begin + i, 0, heads, StateAt(scratch.states, heads));
      }
      return;
    }
    for (int s = 0; s < last.segments(); ++s) {
      const int32_t before = (s - 1) * kAttentionSegment;
      const void* const* shared =
          s == 0 ? nullptr
                 : store.Consecutive(before, std::min(last.compressed - before, kAttentionSegment));
      for (int32_t i = 0; i < count; ++i) {
        if (s >= entries[i].segments()) continue;
        PackQueries(tile.begin + i, 0, heads, scratch.q);
        attend(i, s, shared, i);
      }
    }
    for (int32_t i = 0; i < count; ++i) {
      Finish(tile.begin + i, 0, heads, StateAt(scratch.states + i * StateFloats(heads), heads));
    }
  }

  // One segment of heads [group * group_heads, ...) of a token.
  struct Item {
    int32_t token;
    int group, segment;
  };

  void RunSegments() {
    const int32_t tokens = args_.step->num_tokens;
    const int heads = PadHeads(args_.heads);
    int total = 0;
    for (int32_t t = 0; t < tokens; ++t) total += EntriesOf(args_, t).segments();
    // Heads are split only as far as it takes to give every worker something to do: each group
    // expands the rows again.
    const int wanted = 2 * pool_.size();
    const int blocks = heads / kAttentionHeadBlock;
    const int most_groups = std::clamp((wanted + total - 1) / total, 1, blocks);
    const int group_heads = (blocks + most_groups - 1) / most_groups * kAttentionHeadBlock;
    const int groups = (heads + group_heads - 1) / group_heads;

    std::vector<Item> items;
    for (int32_t t = 0; t < tokens; ++t) {
      for (int group = 0; group < groups; ++group) {
        for (int s = 0; s < EntriesOf(args_, t).segments(); ++s) items.push_back({t, group, s});
      }
    }
    // Partial states exist for one wave of items at a time, so memory does not grow with context.
    const int wave = 2 * wanted;
    const int64_t state_floats = StateFloats(group_heads);
    const size_t own_bytes = ScratchBytes(group_heads, 0);
    auto* shared = reinterpret_cast<float*>(
        static_cast<std::byte*>(pool_.Scratch(
            0, own_bytes + sizeof(float) * (wave + int64_t{tokens} * groups) * state_floats)) +
        own_bytes);
    float* running = shared + wave * state_floats;
    const auto item_count = static_cast<int64_t>(items.size());
    for (int64_t first = 0; first < item_count; first += wave) {
      const int64_t count = std::min<int64_t>(wave, item_count - first);
      pool_.ParallelFor(count, 1, [&](int64_t begin, int64_t end, int worker) {
        const Scratch scratch = ScratchOf(worker, group_heads, 0);
        for (int64_t i = begin; i < end; ++i) {
          RunItem(items[first + i], group_heads, scratch,
                  StateAt(shared + i * state_floats, group_heads));
        }
      });
      pool_.ParallelFor(int64_t{tokens} * groups, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t unit = begin; unit < end; ++unit) {
          const AttentionState state = StateAt(running + unit * state_floats, group_heads);
          for (int64_t i = 0; i < count; ++i) {
            const Item& item = items[first + i];
            if (int64_t{item.token} * groups + item.group != unit) continue;
            const AttentionState part = StateAt(shared + i * state_floats, group_heads);
            if (item.segment == 0) {
              std::copy_n(part.acc, state_floats, state.acc);
            } else {
              kernels_.merge(state, part, group_heads);
            }
            if (item.segment + 1 == EntriesOf(args_, item.token).segments()) {
              Finish(item.token, item.group * group_heads, group_heads, state);
            }
          }
        }
      });
    }
  }

  void RunItem(const Item& item, int heads, const Scratch& scratch,
               const AttentionState& out) const {
    const TokenEntries entries = EntriesOf(args_, item.token);
    RowStore store(args_, kernels_, bf16_rows_, scratch.rows);
    store.Reset(entries.sequence);
    PackQueries(item.token, item.group * heads, heads, scratch.q);
    const int32_t rows = SegmentRows(entries, item.segment);
    const int32_t before = (item.segment - 1) * kAttentionSegment;
    const void* const* pointers =
        item.segment == 0 ? store.Window(entries.window_begin, entries.position)
        : args_.selected == nullptr
            ? store.Consecutive(before, rows)
            : store.Selected(args_.selected + int64_t{item.token} * args_.top_k + before, rows);
    Attend(scratch.q, heads, pointers, rows, scratch.p, out);
  }

  const SparseAttentionArgs& args_;
  const AttentionKernels& kernels_;
  ThreadPool& pool_;
  bool bf16_rows_;
};

}  // namespace

void SparseAttentionWith(const SparseAttentionArgs& args, const AttentionKernels& kernels,
                         ThreadPool& pool) {
  Attention(args, kernels, pool).Run();
}

void SparseAttentionCpu(const SparseAttentionArgs& args, ThreadPool& pool) {
  // AMD's cores run the bf16 product at twice the multiply-adds of f32 (Zen 4: 470 against 230
  // GFLOP/s on two cores); Intel's at half (Sapphire Rapids: 85 against 170 on one).
  static const bool bf16_is_faster = __builtin_cpu_is("amd");
  switch (CpuIsa()) {
    case Isa::kAvx512:
      return SparseAttentionWith(args, bf16_is_faster ? kAttentionAvx512Bf16 : kAttentionAvx512,
                                 pool);
    case Isa::kAvx2: return SparseAttentionWith(args, kAttentionAvx2, pool);
    case Isa::kScalar: return SparseAttentionReference(args);
  }
}

}  // namespace fathom::ops
