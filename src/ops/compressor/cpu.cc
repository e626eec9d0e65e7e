// compressor on the CPU. Rows of ratio 4 are independent of each other (8 members, found in the
// chunk or in the state), so groups run in parallel and the state is advanced afterwards. At ratio
// 128 a channel's record runs through the tokens in order, so slices of channels run in parallel
// and the rows that completed are normalised and encoded afterwards.
#include <algorithm>
#include <cstring>
#include <vector>

#include "core/cpu_features.h"
#include "core/status.h"
#include "ops/compressor/compressor.h"
#include "ops/compressor/kernels.h"
#include "ops/quantise/quantise.h"

namespace fathom::ops {
namespace {

constexpr int kSlice = 64;  // channels of a ratio-128 task
alignas(64) constexpr float kNoApe[kHeadDim] = {};

class Compressor {
 public:
  Compressor(const CompressorArgs& args, const CompressorKernels& kernels, ThreadPool& pool)
      : args_(args), step_(*args.step), kernels_(kernels), pool_(pool) {
    FATHOM_CHECK(args.channels == kHeadDim || args.channels == kIndexDim);
    // Rows completed by the step: those of sequence s are [row_start_[s], row_start_[s+1]).
    row_start_.reserve(step_.num_sequences + 1);
    row_start_.push_back(0);
    for (int32_t s = 0; s < step_.num_sequences; ++s) {
      row_start_.push_back(row_start_.back() + End(s) / args.ratio - Begin(s) / args.ratio);
    }
  }

  void Run() { args_.ratio == 4 ? RunRatio4() : RunRatio128(); }

 private:
  int32_t Begin(int32_t s) const { return step_.first_position(s); }
  int32_t End(int32_t s) const { return step_.first_position(s) + step_.tokens_of(s); }
  float* StateOf(int32_t s) const { return args_.state + step_.slot[s] * args_.state_stride; }
  int32_t SequenceOfRow(int64_t row) const {
    return static_cast<int32_t>(std::upper_bound(row_start_.begin(), row_start_.end(), row) -
                                row_start_.begin() - 1);
  }

  // Calls fn(sequence, row index within the sequence, completed row) for every completed row.
  template <class Fn>
  void ForEachRow(int64_t grain, Fn&& fn) {
    pool_.ParallelFor(row_start_.back(), grain, [&](int64_t begin, int64_t end, int) {
      for (int64_t row = begin; row < end; ++row) {
        const int32_t s = SequenceOfRow(row);
        fn(s, Begin(s) / args_.ratio + static_cast<int32_t>(row - row_start_[s]), row);
      }
    });
  }

  // model.md 5.4 on a pooled row, in place, and its encoding as row j of sequence s.
  void FinishRow(int32_t s, int32_t j, float* row) const {
    if (!step_.emits(s, j, args_.ratio)) return;
    const bool product = args_.numerics == Numerics::kProduct;
    const PagedRows& rows = args_.rows;
    kernels_.norm_rope(row, args_.channels, args_.norm, kNormEps, args_.rope->f.data(),
                       static_cast<float>(int64_t{j} * args_.ratio), product);
    const int32_t block = step_.blocks_of(s)[j / rows.rows_per_page];
    const int32_t in_page = j % rows.rows_per_page;
    if (rows.format == RowFormat::kFp4Index) {
      HadamardRow(row, product);
      kernels_.encode_fp4(row, reinterpret_cast<uint8_t*>(rows.data(block, in_page)),
                          reinterpret_cast<uint8_t*>(rows.scale(block, in_page)));
      return;
    }
    // kFp8Main rounds while it encodes.
    if (product && args_.round_kv && args_.channels == kHeadDim &&
        rows.format != RowFormat::kFp8Main) {
      RoundKvRow(row);
    }
    EncodeRowCpu(rows.format, args_.channels, row, rows.data(block, in_page),
                 rows.scale(block, in_page));
  }

  // Token at `position` of sequence s as a member of a ratio-4 group: half 0 for the group after
  // its own, half 1 for its own. Older tokens are read from the state: the group before the step's
  // first one in rows 0..3, the unfinished one in rows 4..7.
  PoolMember Member(int32_t s, int32_t position, int half) const {
    const int e = args_.channels;
    const int32_t begin = Begin(s);
    if (position < begin) {
      const int row = position % 4 + (position / 4 == begin / 4 ? 4 : 0);
      const float* state = StateOf(s) + int64_t{row} * 4 * e + half * e;
      return {state, state + 2 * e, kNoApe};
    }
    const int32_t t = step_.query_start[s] + position - begin;
    return {args_.c.f32_row(t) + half * e, args_.g.f32_row(t) + half * e,
            args_.ape + position % 4 * 2 * e + half * e};
  }

  void RunRatio4() {
    ForEachRow(args_.channels == kHeadDim ? 4 : 8, [&](int32_t s, int32_t j, int64_t) {
      PoolMember members[8];
      int count = 0;
      for (int i = j == 0 ? 4 : 0; i < 8; ++i) members[count++] = Member(s, 4 * j - 4 + i, i / 4);
      alignas(64) float row[kHeadDim];
      kernels_.pool(members, count, args_.channels, row);
      FinishRow(s, j, row);
    });
    pool_.ParallelFor(step_.num_sequences, 4, [&](int64_t begin, int64_t end, int) {
      for (int64_t s = begin; s < end; ++s) AdvanceState4(static_cast<int32_t>(s));
    });
  }

  // Leaves in the state what a run token by token leaves: rows 0..3 hold the last complete group,
  // row 4 + i the last token with remainder i.
  void AdvanceState4(int32_t s) const {
    const int64_t width = int64_t{4} * args_.channels;
    float* state = StateOf(s);
    const int32_t begin = Begin(s), end = End(s);
    if (end / 4 > begin / 4) {
      for (int i = 0; i < 4; ++i) {
        const int32_t position = end / 4 * 4 - 4 + i;
        if (position < begin) {
          std::memcpy(state + i * width, state + (4 + i) * width, sizeof(float) * width);
        } else {
          StoreToken(s, position, state + i * width);
        }
      }
    }
    for (int32_t position = std::max(begin, end - 4); position < end; ++position) {
      StoreToken(s, position, state + (4 + position % 4) * width);
    }
  }

  // [c | g + ape] of a token of the step.
  void StoreToken(int32_t s, int32_t position, float* row) const {
    const int width = 2 * args_.channels;
    const int32_t t = step_.query_start[s] + position - Begin(s);
    std::memcpy(row, args_.c.f32_row(t), sizeof(float) * width);
    kernels_.add(args_.g.f32_row(t), args_.ape + position % 4 * width, width, row + width);
  }

  void RunRatio128() {
    FATHOM_CHECK(args_.channels == kHeadDim);
    constexpr int kSlices = kHeadDim / kSlice;
    auto* pooled =
        static_cast<float*>(pool_.Scratch(0, sizeof(float) * kHeadDim * (row_start_.back() + 1)));
    // A slice of a token takes about 20 ns; a task should take several microseconds.
    const int64_t tokens = std::max(1, step_.num_tokens / std::max(1, step_.num_sequences));
    const int64_t grain = std::max<int64_t>(1, 256 / tokens);
    pool_.ParallelFor(int64_t{step_.num_sequences} * kSlices, grain,
                      [&](int64_t begin, int64_t end, int) {
                        for (int64_t i = begin; i < end; ++i) {
                          AdvanceSlice(static_cast<int32_t>(i / kSlices),
                                       static_cast<int>(i % kSlices) * kSlice, pooled);
                        }
                      });
    ForEachRow(
        4, [&](int32_t s, int32_t j, int64_t row) { FinishRow(s, j, pooled + row * kHeadDim); });
  }

  // Runs channels [channel, channel + kSlice) of sequence s through the step's tokens.
  void AdvanceSlice(int32_t s, int channel, float* pooled) const {
    const int32_t first = Begin(s), end = End(s);
    float* state = StateOf(s) + channel;
    int64_t row = row_start_[s];
    for (int32_t position = first; position < end;) {
      const int32_t stop = std::min(end, (position / 128 + 1) * 128);
      const int32_t t = step_.query_start[s] + position - first;
      RecordRun run;
      run.c = args_.c.f32_row(t) + channel;
      run.g = args_.g.f32_row(t) + channel;
      run.ape = args_.ape + position % 128 * kHeadDim + channel;
      run.c_stride = args_.c.stride;
      run.g_stride = args_.g.stride;
      run.ape_stride = kHeadDim;
      run.tokens = stop - position;
      run.channels = kSlice;
      run.fresh = position % 128 == 0;
      run.m = state;
      run.l = state + kHeadDim;
      run.a = state + 2 * kHeadDim;
      kernels_.advance(run);
      if (stop % 128 == 0) {
        kernels_.divide(run.a, run.l, kSlice, pooled + row++ * kHeadDim + channel);
      }
      position = stop;
    }
  }

  const CompressorArgs& args_;
  const StepView& step_;
  const CompressorKernels& kernels_;
  ThreadPool& pool_;
  std::vector<int64_t> row_start_;
};

}  // namespace

void CompressorCpu(const CompressorArgs& args, ThreadPool& pool) {
  switch (CpuIsa()) {
    case Isa::kAvx512: return Compressor(args, kCompressorAvx512, pool).Run();
    case Isa::kAvx2: return Compressor(args, kCompressorAvx2, pool).Run();
    case Isa::kScalar: return CompressorReference(args);
  }
}

}  // namespace fathom::ops
