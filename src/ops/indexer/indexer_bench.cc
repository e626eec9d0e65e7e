// The indexer over context length: T = 1, 16 and 256 tokens at the end of one sequence, and decode
// of 32 sequences. Bound: the larger of one read of the rows per sequence and the multiply-adds at
// the measured f32 peak, four times that for kFp4Index, whose byte products do four per lane.
//
//   indexer_bench [threads] [heads] [top_k]      default: all CPUs, 8, 128
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ops/bench_util.h"
#include "ops/indexer/indexer.h"
#include "ops/quantise/quantise.h"

namespace fathom::ops {
namespace {

struct Setup {
  RowFormat format;
  const char* name;
  int heads;
  int top_k;
};

void Measure(const Setup& setup, int32_t context, int32_t sequences, int32_t tokens,
             ThreadPool& pool, const bench::Peaks& peaks) {
  constexpr int kRowsPerPage = 64;
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  const int32_t rows = context / 4;
  const int32_t pages = (rows + kRowsPerPage - 1) / kRowsPerPage;
  const int64_t row_bytes = RowDataBytes(setup.format, kIndexDim) + RowScaleBytes(setup.format);
  PagedRows keys;
  keys.block_stride = (row_bytes * kRowsPerPage + 575) / 576 * 576;
  keys.rows_per_page = kRowsPerPage;
  keys.channels = kIndexDim;
  keys.format = setup.format;
  std::vector<std::byte> memory(keys.block_stride * pages * sequences);
  keys.base = memory.data();
  // A thousand drawn rows, repeated: the time does not depend on them.
  std::vector<float> drawn(1000 * kIndexDim);
  for (float& x : drawn) x = normal(random);
  for (int32_t page = 0; page < pages * sequences; ++page) {
    for (int32_t r = 0; r < kRowsPerPage; ++r) {
      const float* row = drawn.data() + random() % 1000 * kIndexDim;
      EncodeRow(setup.format, kIndexDim, row, keys.data(page, r), keys.scale(page, r));
    }
  }
  const int32_t total = sequences * tokens;
  std::vector<int32_t> position, sequence, start{0}, table;
  for (int32_t s = 0; s < sequences; ++s) {
    for (int32_t i = 0; i < tokens; ++i) {
      position.push_back(context - tokens + i);
      sequence.push_back(s);
    }
    start.push_back((s + 1) * tokens);
    for (int32_t page = 0; page < pages; ++page) table.push_back(s * pages + page);
  }
  StepView step;
  step.num_tokens = total;
  step.num_sequences = sequences;
  step.position = position.data();
  step.sequence = sequence.data();
  step.query_start = start.data();
  step.block_table = table.data();
  step.max_blocks = pages;
  std::vector<float> q0(int64_t{total} * setup.heads * kIndexDim), w0(total * setup.heads);
  for (float& x : q0) x = normal(random);
  for (float& x : w0) x = normal(random);
  std::vector<float> q = q0, w = w0, rope(int64_t{total} * 64, 0.5f);
  std::vector<int32_t> selected(int64_t{total} * setup.top_k), counts(total);
  IndexerArgs args;
  args.step = &step;
  args.heads = setup.heads;
  args.top_k = setup.top_k;
  args.q = F32Matrix(q.data(), total, int64_t{setup.heads} * kIndexDim);
  args.w = F32Matrix(w.data(), total, setup.heads);
  args.rope = rope.data();
  args.keys = keys;
  args.selected = selected.data();
  args.counts = counts.data();
  // The op works in place; restoring q and w is timed alone and taken off.
  auto restore = [&] {
    std::memcpy(q.data(), q0.data(), q.size() * sizeof(float));
    std::memcpy(w.data(), w0.data(), w.size() * sizeof(float));
  };
  const double us = bench::TimeUs([&] {
    restore();
    IndexerCpu(args, pool);
  });
  const double restore_us = bench::TimeUs(restore, 20);
  const double flops = 2.0 * total * rows * setup.heads * kIndexDim;
  const double bytes = static_cast<double>(sequences) * rows * row_bytes;
  const std::string shape = std::string(setup.name) + " context=" + std::to_string(context) +
                            " seqs=" + std::to_string(sequences) + " T=" + std::to_string(tokens) +
                            " heads=" + std::to_string(setup.heads) +
                            " k=" + std::to_string(setup.top_k);
  const double lanes = setup.format == RowFormat::kFp4Index ? 4.0 : 1.0;
  bench::Print({.op = "indexer",
                .shape = shape,
                .threads = pool.size(),
                .us = us - restore_us,
                .flops = flops,
                .bytes = bytes,
                .bound_us = bench::BoundUs(peaks, flops / lanes, bytes, /*bf16=*/false)});
}

}  // namespace
}  // namespace fathom::ops

int main(int argc, char** argv) {
  using namespace fathom;
  ThreadPool pool(argc > 1 ? std::atoi(argv[1]) : 0);
  const int heads = argc > 2 ? std::atoi(argv[2]) : 8;
  const int top_k = argc > 3 ? std::atoi(argv[3]) : 128;
  const bench::Peaks peaks = bench::MeasurePeaks(pool);
  bench::PrintHeader();
  const ops::Setup fp4{ops::RowFormat::kFp4Index, "fp4", heads, top_k};
  for (int32_t context = 4096; context <= 1 << 20; context *= 4) {
    for (const int32_t tokens : {1, 16, 256}) {
      if (int64_t{context} * tokens * heads > int64_t{1} << 30) continue;  // seconds per call
      ops::Measure(fp4, context, 1, tokens, pool, peaks);
    }
  }
  ops::Measure(fp4, 16384, 32, 1, pool, peaks);
  for (const ops::Setup& setup : {ops::Setup{ops::RowFormat::kFp8Index, "fp8", heads, top_k},
                                  ops::Setup{ops::RowFormat::kBf16, "bf16", heads, top_k},
                                  ops::Setup{ops::RowFormat::kF32, "f32", heads, top_k}}) {
    ops::Measure(setup, 65536, 1, 1, pool, peaks);
    ops::Measure(setup, 65536, 1, 16, pool, peaks);
  }
  return 0;
}
