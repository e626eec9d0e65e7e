// sparse_attention by plain loops: sums in double, one maximum over all entries.
#include <cmath>
#include <vector>

#include "ops/quantise/quantise.h"
#include "ops/sparse_attention/entries.h"
#include "ops/sparse_attention/sparse_attention.h"

namespace fathom::ops {
namespace {

// The rows a token attends to, decoded [entries, 512], in the contract's order.
std::vector<float> GatherRows(const SparseAttentionArgs& args, int32_t token,
                              const TokenEntries& entries) {
  const int32_t total = entries.window() + entries.compressed;
  std::vector<float> rows(int64_t{total} * kHeadDim);
  float* out = rows.data();
  const int32_t first = args.step->first_position(entries.sequence);
  for (int32_t p = entries.window_begin; p <= entries.position; ++p, out += kHeadDim) {
    const RowAddress row = WindowRow(args, entries.sequence, p);
    DecodeRow(p >= first ? args.step_rows.format : args.ring.format, kHeadDim, row.data, row.scale,
              out);
  }
  for (int32_t e = 0; e < entries.compressed; ++e, out += kHeadDim) {
    const RowAddress row =
        CompressedRow(args, entries.sequence, CompressedRowIndex(args, token, e));
    DecodeRow(args.compressed.format, kHeadDim, row.data, row.scale, out);
  }
  return rows;
}

void AttendHead(const float* q, const std::vector<float>& rows, float sink, Numerics numerics,
                float* out) {
  const int64_t count = static_cast<int64_t>(rows.size()) / kHeadDim;
  std::vector<double> score(count);
  double max = -INFINITY;
  for (int64_t j = 0; j < count; ++j) {
    double dot = 0;
    for (int ch = 0; ch < kHeadDim; ++ch) dot += double{q[ch]} * rows[j * kHeadDim + ch];
    score[j] = dot / std::sqrt(double{kHeadDim});
    max = std::max(max, score[j]);
  }
  double z = std::exp(sink - max);
  std::vector<double> sum(kHeadDim);
  for (int64_t j = 0; j < count; ++j) {
    double p = std::exp(score[j] - max);
    z += p;
    if (numerics == Numerics::kProduct) p = RoundBf16(static_cast<float>(p));
    for (int ch = 0; ch < kHeadDim; ++ch) sum[ch] += p * rows[j * kHeadDim + ch];
  }
  for (int ch = 0; ch < kHeadDim; ++ch) {
    const float value = static_cast<float>(sum[ch] / z);
    out[ch] = numerics == Numerics::kProduct ? RoundBf16(value) : value;
  }
}

}  // namespace

void SparseAttentionReference(const SparseAttentionArgs& args) {
  for (int32_t t = 0; t < args.step->num_tokens; ++t) {
    const std::vector<float> rows = GatherRows(args, t, EntriesOf(args, t));
    for (int h = 0; h < args.heads; ++h) {
      AttendHead(args.q.f32_row(t) + h * kHeadDim, rows, args.sink[h], args.numerics,
                 args.out.f32_row(t) + h * kHeadDim);
    }
  }
}

}  // namespace fathom::ops
