// The order "most likely first" (sampling.h) over a row of logits: the maximum, and the first k
// without sorting the row.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/ids.h"

namespace fathom::ops {

struct RankedToken {
  int32_t key;  // LogitKey of its logit
  TokenId token;
  friend bool operator<(const RankedToken& a, const RankedToken& b) {  // more likely first
    return a.key != b.key ? a.key > b.key : a.token < b.token;
  }
};

// Holds the maxima of chunks of a row; the row must not change while it is in use.
class Ranking {
 public:
  explicit Ranking(std::span<const float> logits);

  // The most likely token: largest key, lowest id.
  RankedToken first() const { return first_; }

  // The k most likely tokens above -inf in no order (fewer when there are not as many).
  void Top(int64_t k, std::vector<RankedToken>& out) const;

 private:
  std::span<const float> logits_;
  std::vector<int32_t>& chunk_max_;  // this thread's, reused from row to row
  RankedToken first_;
};

}  // namespace fathom::ops
