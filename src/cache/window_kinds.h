// The four windowed kinds of cache (window_kv, csa_state, index_state, hca_state) under one
// interface: what a sequence needs besides its blocks to go on at a token.
//
//   advance     the forward pass, from any token to any later one
//   save        copy Runs(t) from the slot into a bundle
//   restore     the same runs the other way: the slot is as after t tokens
//   roll back   KeepsWindow(from, to): the rings still hold what `to` needs after speculation went
//               on to `from`; StateRuns(to) brings back the rest, saved before
//   serialise   a bundle is its own serial form: its layout depends on the geometry and on t alone,
//               not on the ring's length
//
// A bundle at t tokens holds: every layer's window, row (position mod 128) of a page of 128 rows;
// of the ratio-4 states the previous group as far as the next row reads it (first e of the 2e
// channels of c and g); at t mod 4 > 0 also the unfinished group; at t mod 128 > 0 also the online
// records of ratio 128. Kept are 3.5 MiB (Flash) and 4.9 MiB (Pro) at multiples of 128.
//
// What a restore leaves out of a slot is never read: whether a member of a group or window exists
// follows from the position (compressor.h, sparse_attention.h).
#pragma once

#include <cstdint>
#include <vector>

#include "cache/geometry.h"

namespace fathom {

// `bytes` bytes at offset `slot` of a slot and offset `bundle` of a bundle.
struct ByteRun {
  int64_t slot = 0;
  int64_t bundle = 0;
  int64_t bytes = 0;
};

class WindowKinds {
 public:
  // Keeps what it needs of the geometry.
  explicit WindowKinds(const Geometry& geometry);

  // Bytes of a bundle at `tokens` > 0 tokens. The largest is a BundlePool unit.
  int64_t BundleBytes(int64_t tokens) const;
  int64_t aligned_bundle_bytes() const { return window_bytes_ + previous_bytes_; }
  int64_t max_bundle_bytes() const {
    return aligned_bundle_bytes() + current_bytes_ + record_bytes_;
  }

  // What a bundle at `tokens` copies, in ascending bundle order; together BundleBytes(tokens).
  std::vector<ByteRun> Runs(int64_t tokens) const;
  // The part of Runs(tokens) that is not windows.
  std::vector<ByteRun> StateRuns(int64_t tokens) const;

  // Whether the rings of a slot that has advanced to `from` tokens still hold the windows of `to`.
  bool KeepsWindow(int64_t from, int64_t to) const;

 private:
  void AddWindows(int64_t tokens, std::vector<ByteRun>* runs) const;
  void AddStates(int64_t tokens, std::vector<ByteRun>* runs) const;

  KindGeometry window_, csa_, index_, hca_;
  int64_t window_bytes_ = 0, previous_bytes_ = 0, current_bytes_ = 0, record_bytes_ = 0;
};

}  // namespace fathom
