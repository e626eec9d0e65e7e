#include "ops/sampling/ranking.h"

#include <algorithm>
#include <functional>

#include "ops/sampling/scan.h"

namespace fathom::ops {
namespace {

std::vector<int32_t>& ThreadChunkMax() {
  thread_local std::vector<int32_t> chunk_max;
  return chunk_max;
}

}  // namespace

Ranking::Ranking(std::span<const float> logits)
    : logits_(logits), chunk_max_(ThreadChunkMax()), first_{} {
  const int64_t n = static_cast<int64_t>(logits.size());
  chunk_max_.resize((n + kScanChunk - 1) / kScanChunk);
  CpuScan().chunk_max(logits.data(), n, chunk_max_.data());
  const auto best = std::max_element(chunk_max_.begin(), chunk_max_.end());  // the first of equals
  first_.key = *best;
  int64_t i = (best - chunk_max_.begin()) * kScanChunk;
  while (LogitKey(logits_[i]) != first_.key) ++i;
  first_.token = static_cast<TokenId>(i);
}

void Ranking::Top(int64_t k, std::vector<RankedToken>& out) const {
  out.clear();
  if (k <= 0) return;
  // k chunks have a maximum of at least `bound`, so nothing below it is among the first k.
  int32_t bound = kMinusInfinityKey + 1;
  if (k < static_cast<int64_t>(chunk_max_.size())) {
    thread_local std::vector<int32_t> maxima;
    maxima.assign(chunk_max_.begin(), chunk_max_.end());
    std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<>());
    bound = std::max(bound, maxima[k - 1]);
  }
  const int64_t n = static_cast<int64_t>(logits_.size());
  for (size_t chunk = 0; chunk < chunk_max_.size(); ++chunk) {
    if (chunk_max_[chunk] < bound) continue;
    const int64_t begin = static_cast<int64_t>(chunk) * kScanChunk;
    const int64_t end = std::min(n, begin + kScanChunk);
    for (int64_t i = begin; i < end; ++i) {
      const int32_t key = LogitKey(logits_[i]);
      if (key >= bound) out.push_back({key, static_cast<TokenId>(i)});
    }
  }
  if (static_cast<int64_t>(out.size()) > k) {
    std::nth_element(out.begin(), out.begin() + k, out.end());
    out.resize(k);
  }
}

}  // namespace fathom::ops
