#include "ops/indexer/top_rows.h"

namespace fathom::ops {

void TopRows::OfferKeys(const IndexerKernels& kernels, const int32_t* keys, const int32_t* rows,
                        int32_t n) {
  for (int32_t i = 0; i < n; ++i) {
    if (keys[i] < floor_) continue;
    keys_[count_] = keys[i];
    rows_[count_] = rows[i];
    if (++count_ > Capacity(k_) - 2 * kBatchRows) Keep(kernels);
  }
}

void TopRows::Keep(const IndexerKernels& kernels) {
  if (count_ <= k_) return;
  if (k_ == 0) {
    count_ = 0;
    return;
  }
  const int32_t bar = kernels.kth_largest(keys_, count_, k_);
  int32_t above = 0;
  for (int32_t i = 0; i < count_; ++i) above += keys_[i] > bar;
  int32_t equal = k_ - above;  // how many rows at the bar stay: the first ones
  int32_t kept = 0;
  for (int32_t i = 0; i < count_; ++i) {
    const int32_t key = keys_[i];
    const int32_t row = rows_[i];
    const bool at_bar = key == bar;
    const bool keep = key > bar || (at_bar && equal > 0);
    equal -= at_bar;
    keys_[kept] = key;
    rows_[kept] = row;
    kept += keep;
  }
  count_ = kept;
  floor_ = bar == INT32_MAX ? bar : bar + 1;
}

}  // namespace fathom::ops
