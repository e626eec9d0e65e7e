#include "core/status.h"
#include "ops/sampling/rules.h"

namespace fathom::ops {
namespace {

std::span<float> LogitsOf(const MatrixView& logits, int32_t row) {
  FATHOM_CHECK(row >= 0 && row < logits.rows && logits.dtype == DType::kF32);
  return {static_cast<float*>(logits.data) + row * logits.stride, static_cast<size_t>(logits.cols)};
}

}  // namespace

SampledToken SampleRow(const SamplingRow& row, std::span<float> logits) {
  const TokenId token = Sample({.logits = logits,
                                .params = row.params,
                                .counts = row.counts,
                                .banned = row.banned,
                                .step = row.step});
  return {token, logits[static_cast<size_t>(token)]};
}

void SampleBatchReference(const SampleBatchArgs& args) {
  for (size_t i = 0; i < args.rows.size(); ++i) {
    args.out[i] = SampleRow(args.rows[i], LogitsOf(args.logits, args.rows[i].row));
  }
}

void SampleBatchCpu(const SampleBatchArgs& args, ThreadPool& pool) {
  pool.ParallelFor(std::ssize(args.rows), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const SamplingRow& row = args.rows[static_cast<size_t>(i)];
      args.out[i] = SampleRow(row, LogitsOf(args.logits, row.row));
    }
  });
}

}  // namespace fathom::ops
