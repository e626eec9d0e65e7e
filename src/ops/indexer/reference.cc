// The oracle of the indexer: plain loops, every score in memory, a full sort.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/dtype.h"
#include "core/status.h"
#include "ops/indexer/indexer.h"
#include "ops/norm_rope_insert/rope.h"
#include "ops/quantise/quantise.h"

namespace fathom::ops {
namespace {

constexpr int kBlock = 32;  // channels that share a scale in kFp4Index

void PrepareHead(const IndexerArgs& args, const float* rope, float* q) {
  const bool round = args.numerics == Numerics::kProduct;
  float* tail = q + kIndexDim - kRopeDim;
  RotateRow(tail, rope, /*inverse=*/false);
  if (round) {
    for (int i = 0; i < kRopeDim; ++i) tail[i] = RoundBf16(tail[i]);
  }
  if (args.keys.format == RowFormat::kFp4Index) {
    HadamardRow(q, round);
    RoundFp4Row(q);
  } else if (args.keys.format == RowFormat::kFp8Index) {
    RoundFp8IndexRow(q);
  }
}

void PrepareWeights(const IndexerArgs& args, float* w) {
  const float scale = static_cast<float>(1.0 / std::sqrt(double{kIndexDim} * args.heads));
  const bool round = args.numerics == Numerics::kProduct;
  for (int h = 0; h < args.heads; ++h) {
    w[h] = round ? RoundBf16(w[h] * RoundBf16(scale)) : w[h] * scale;
  }
}

float Dot(RowFormat format, const float* q, const float* k) {
  float dot = 0.0f;
  if (format != RowFormat::kFp4Index) {
    for (int c = 0; c < kIndexDim; ++c) dot = std::fma(q[c], k[c], dot);
    return dot;
  }
  for (int begin = 0; begin < kIndexDim; begin += kBlock) {
    float block = 0.0f;
    for (int c = begin; c < begin + kBlock; ++c) block += q[c] * k[c];
    dot += block;
  }
  return dot;
}

// NaN below every number.
float Rank(float score) {
  return std::isnan(score) ? -std::numeric_limits<float>::infinity() : score;
}

void Select(const std::vector<float>& scores, int top_k, int32_t* selected, int32_t* count) {
  std::vector<int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const bool nan_a = std::isnan(scores[a]);
    const bool nan_b = std::isnan(scores[b]);
    if (nan_a != nan_b) return nan_b;
    return Rank(scores[a]) > Rank(scores[b]);
  });
  order.resize(std::min<size_t>(order.size(), top_k));
  std::sort(order.begin(), order.end());
  *count = static_cast<int32_t>(order.size());
  std::copy(order.begin(), order.end(), selected);
  std::fill(selected + order.size(), selected + top_k, -1);
}

}  // namespace

void IndexerReference(const IndexerArgs& args) {
  const StepView& step = *args.step;
  FATHOM_CHECK(args.keys.channels == kIndexDim && args.keys.rows_per_page > 0);
  std::vector<float> scores;
  float key[kIndexDim];
  for (int32_t t = 0; t < step.num_tokens; ++t) {
    const int32_t visible = (step.position[t] + 1) / 4;
    int32_t* selected = args.selected + int64_t{t} * args.top_k;
    if (visible <= args.top_k && args.scores == nullptr) {
      std::iota(selected, selected + visible, 0);
      std::fill(selected + visible, selected + args.top_k, -1);
      args.counts[t] = visible;
      continue;
    }
    float* q = args.q.f32_row(t);
    float* w = args.w.f32_row(t);
    for (int h = 0; h < args.heads; ++h) {
      PrepareHead(args, args.rope + int64_t{t} * kRopeDim, q + h * kIndexDim);
    }
    PrepareWeights(args, w);
    scores.assign(visible, 0.0f);
    const int32_t* blocks = step.blocks_of(step.sequence[t]);
    for (int32_t j = 0; j < visible; ++j) {
      const int32_t block = blocks[j / args.keys.rows_per_page];
      const int32_t row = j % args.keys.rows_per_page;
      DecodeRow(args.keys.format, kIndexDim, args.keys.data(block, row),
                args.keys.scale(block, row), key);
      for (int h = 0; h < args.heads; ++h) {
        const float dot = Dot(args.keys.format, q + h * kIndexDim, key);
        scores[j] = std::fma(w[h], dot > 0.0f ? dot : 0.0f, scores[j]);
      }
    }
    if (args.scores != nullptr) {
      std::copy(scores.begin(), scores.end(), args.scores + t * args.scores_stride);
    }
    Select(scores, args.top_k, selected, args.counts + t);
  }
}

}  // namespace fathom::ops
