// compressor token by token, as model.md 5.3-5.5 states it: the state is advanced by one token at a
// time and a row is written whenever a group completes.
#include <cmath>
#include <cstring>
#include <vector>

#include "core/dtype.h"
#include "ops/compressor/compressor.h"
#include "ops/quantise/quantise.h"

namespace fathom::ops {
namespace {

// Step 5.4 on a pooled row, in place, and its encoding as row j of sequence s.
void FinishRow(const CompressorArgs& args, int32_t s, int32_t j, float* row) {
  if (!args.step->emits(s, j, args.ratio)) return;
  const bool product = args.numerics == Numerics::kProduct;
  const int e = args.channels;
  double squares = 0;
  for (int ch = 0; ch < e; ++ch) {
    if (product) row[ch] = RoundBf16(row[ch]);
    squares += double{row[ch]} * row[ch];
  }
  const float inverse = 1.0f / std::sqrt(static_cast<float>(squares / e) + kNormEps);
  for (int ch = 0; ch < e; ++ch) {
    row[ch] = args.norm[ch] * (row[ch] * inverse);
    if (product) row[ch] = RoundBf16(row[ch]);
  }
  float table[kRopeDim];
  RopeTableRow(*args.rope, int64_t{j} * args.ratio, table);
  float* rotated = row + e - kRopeDim;
  RotateRow(rotated, table, /*inverse=*/false);
  for (int i = 0; product && i < kRopeDim; ++i) rotated[i] = RoundBf16(rotated[i]);
  if (args.rows.format == RowFormat::kFp4Index) HadamardRow(row, product);
  if (product && args.round_kv && e == kHeadDim) RoundKvRow(row);
  const int32_t block = args.step->blocks_of(s)[j / args.rows.rows_per_page];
  const int32_t in_page = j % args.rows.rows_per_page;
  EncodeRow(args.rows.format, e, row, args.rows.data(block, in_page),
            args.rows.scale(block, in_page));
}

void AdvanceRatio4(const CompressorArgs& args, int32_t s, int32_t t) {
  const int e = args.channels, width = 4 * e;  // floats of a state row: c (2e) | g (2e)
  const int32_t position = args.step->position[t];
  float* state = args.state + args.step->slot[s] * args.state_stride;
  float* mine = state + (4 + position % 4) * width;
  for (int ch = 0; ch < 2 * e; ++ch) {
    mine[ch] = args.c.f32_row(t)[ch];
    mine[2 * e + ch] = args.g.f32_row(t)[ch] + args.ape[(position % 4) * 2 * e + ch];
  }
  if (position % 4 != 3) return;
  std::vector<float> row(e);
  for (int ch = 0; ch < e; ++ch) {
    const int first = position < 4 ? 4 : 0;  // row 0 has no previous group
    const auto gate = [&](int i) { return state[i * width + 2 * e + (i < 4 ? 0 : e) + ch]; };
    const auto value = [&](int i) { return state[i * width + (i < 4 ? 0 : e) + ch]; };
    float max = gate(first);
    for (int i = first; i < 8; ++i) max = std::max(max, gate(i));
    double sum = 0, weights = 0;
    for (int i = first; i < 8; ++i) {
      const double weight = std::exp(double{gate(i)} - max);
      weights += weight;
      sum += weight * value(i);
    }
    row[ch] = static_cast<float>(sum / weights);
  }
  FinishRow(args, s, position / 4, row.data());
  std::memcpy(state, state + 4 * width, sizeof(float) * 4 * width);
}

void AdvanceRatio128(const CompressorArgs& args, int32_t s, int32_t t) {
  const int e = args.channels;
  const int32_t position = args.step->position[t];
  float* m = args.state + args.step->slot[s] * args.state_stride;
  float* l = m + e;
  float* a = l + e;
  for (int ch = 0; ch < e; ++ch) {
    const float c = args.c.f32_row(t)[ch];
    const float g = args.g.f32_row(t)[ch] + args.ape[(position % 128) * e + ch];
    if (position % 128 == 0) {
      m[ch] = g, l[ch] = 1, a[ch] = c;
      continue;
    }
    const float max = std::max(m[ch], g);
    const float keep = std::exp(m[ch] - max), weight = std::exp(g - max);
    m[ch] = max;
    l[ch] = l[ch] * keep + weight;
    a[ch] = a[ch] * keep + c * weight;
  }
  if (position % 128 != 127) return;
  std::vector<float> row(e);
  for (int ch = 0; ch < e; ++ch) row[ch] = a[ch] / l[ch];
  FinishRow(args, s, position / 128, row.data());
}

}  // namespace

void CompressorReference(const CompressorArgs& args) {
  const StepView& step = *args.step;
  for (int32_t s = 0; s < step.num_sequences; ++s) {
    for (int32_t t = step.query_start[s]; t < step.query_start[s + 1]; ++t) {
      args.ratio == 4 ? AdvanceRatio4(args, s, t) : AdvanceRatio128(args, s, t);
    }
  }
}

}  // namespace fathom::ops
