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
  // Of the rows at the bar the first ones stay.
  count_ = kernels.keep(keys_, rows_, count_, bar, k_ - above);
  floor_ = bar == INT32_MAX ? bar : bar + 1;
}

}  // namespace fathom::ops
