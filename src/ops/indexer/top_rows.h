// The best k of rows offered in ascending order, in bounded memory: candidates collect in a buffer
// until it is full, then the best k stay and their smallest score becomes the bar. Equal scores
// after that lose, which is the tie rule (the lower row wins). The buffer stays in row order, so
// the result of a full sort comes out ascending, for any split into batches or ranges.
#pragma once

#include <cstdint>

#include "ops/indexer/kernels.h"

namespace fathom::ops {

class TopRows {
 public:
  // Elements that `keys` and `rows` need for k.
  static int64_t Capacity(int64_t k) { return 2 * k + 4 * kBatchRows; }

  void Start(int32_t k, int32_t* keys, int32_t* rows) {
    k_ = k;
    keys_ = keys;
    rows_ = rows;
    count_ = 0;
    floor_ = k > 0 ? INT32_MIN : INT32_MAX;
  }

  // Scores of rows [first_row, first_row + n), n <= kBatchRows.
  void Offer(const IndexerKernels& kernels, const float* scores, int32_t n, int32_t first_row) {
    count_ = kernels.append(scores, n, first_row, floor_, keys_, rows_, count_);
    if (count_ > Capacity(k_) - 2 * kBatchRows) Keep(kernels);
  }

  // Rows with their keys, ascending, each above all rows offered so far.
  void OfferKeys(const IndexerKernels& kernels, const int32_t* keys, const int32_t* rows,
                 int32_t n);

  // Leaves the best k (fewer when fewer were offered).
  void Keep(const IndexerKernels& kernels);

  int32_t count() const { return count_; }
  const int32_t* keys() const { return keys_; }
  const int32_t* rows() const { return rows_; }

 private:
  int32_t k_ = 0;
  int32_t count_ = 0;
  int32_t floor_ = INT32_MIN;  // keys below it cannot be among the best
  int32_t* keys_ = nullptr;
  int32_t* rows_ = nullptr;
};

}  // namespace fathom::ops
