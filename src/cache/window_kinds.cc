#include "cache/window_kinds.h"

#include <algorithm>

#include "core/status.h"
#include "ops/numerics.h"

namespace fathom {
namespace {

constexpr int64_t kGroupRows = 4;  // rows 0..3 of a ratio-4 state: previous group, 4..7: current
constexpr int64_t kFloat = sizeof(float);

int64_t Layers(const KindGeometry& kind) {
  return static_cast<int64_t>(kind.layers.size());
}

// Of a ratio-4 state row [c (2e) | g (2e)]: channels = 4e.
int64_t PreviousBytes(const KindGeometry& kind) {
  return Layers(kind) * kGroupRows * 2 * (kind.channels / 4) * kFloat;
}
int64_t CurrentBytes(const KindGeometry& kind) {
  return Layers(kind) * kGroupRows * kind.channels * kFloat;
}

// Appends a run, or lengthens the last one that it continues.
void Add(int64_t slot, int64_t bundle, int64_t bytes, std::vector<ByteRun>* runs) {
  if (!runs->empty()) {
    ByteRun& last = runs->back();
    if (last.slot + last.bytes == slot && last.bundle + last.bytes == bundle) {
      last.bytes += bytes;
      return;
    }
  }
  runs->push_back({slot, bundle, bytes});
}

}  // namespace

WindowKinds::WindowKinds(const Geometry& geometry)
    : window_(geometry.of(CacheKind::kWindowKv)),
      csa_(geometry.of(CacheKind::kCsaState)),
      index_(geometry.of(CacheKind::kIndexState)),
      hca_(geometry.of(CacheKind::kHcaState)),
      window_bytes_(geometry.window_bytes()),
      previous_bytes_(PreviousBytes(csa_) + PreviousBytes(index_)),
      current_bytes_(CurrentBytes(csa_) + CurrentBytes(index_)),
      record_bytes_(Layers(hca_) * hca_.rows_per_page * hca_.row_bytes) {}

int64_t WindowKinds::BundleBytes(int64_t tokens) const {
  return aligned_bundle_bytes() + (tokens % 4 != 0 ? current_bytes_ : 0) +
         (tokens % 128 != 0 ? record_bytes_ : 0);
}

bool WindowKinds::KeepsWindow(int64_t from, int64_t to) const {
  return to <= from && from - to <= window_.rows_per_page - ops::kWindow;
}

void WindowKinds::AddWindows(int64_t tokens, std::vector<ByteRun>* runs) const {
  const int64_t ring = window_.rows_per_page;
  const int64_t data = ops::RowDataBytes(window_.format, window_.channels);
  const int64_t scale = ops::RowScaleBytes(window_.format);
  // The last 128 positions in bundle order. Before token 128 the rows past the end hold nothing;
  // they are copied all the same, so that a bundle's size depends on t mod 128 alone.
  const int64_t first = std::max<int64_t>(0, tokens - ops::kWindow);
  int64_t bundle = 0;
  for (int64_t i = 0; i < Layers(window_); ++i) {
    const int64_t page = window_.offset + i * window_.page_bytes;
    for (const auto& [offset, bytes] : {std::pair{page, data}, {page + ring * data, scale}}) {
      if (bytes == 0) continue;
      for (int64_t row = 0; row < ops::kWindow; ++row) {
        const int64_t position = first + (row - first % ops::kWindow + ops::kWindow) % ops::kWindow;
        Add(offset + position % ring * bytes, bundle, bytes, runs);
        bundle += bytes;
      }
    }
  }
  FATHOM_CHECK(bundle == window_bytes_);
}

void WindowKinds::AddStates(int64_t tokens, std::vector<ByteRun>* runs) const {
  int64_t bundle = window_bytes_;
  for (const KindGeometry* kind : {&csa_, &index_}) {
    const int64_t half = kind->channels / 4 * kFloat;  // e floats
    for (int64_t i = 0; i < Layers(*kind); ++i) {
      for (int64_t row = 0; row < kGroupRows; ++row) {
        const int64_t slot = kind->offset + i * kind->page_bytes + row * kind->row_bytes;
        for (const int64_t part : {int64_t{0}, 2 * half}) {  // of c, of g
          Add(slot + part, bundle, half, runs);
          bundle += half;
        }
      }
    }
  }
  if (tokens % 4 != 0) {
    for (const KindGeometry* kind : {&csa_, &index_}) {
      const int64_t bytes = kGroupRows * kind->row_bytes;
      for (int64_t i = 0; i < Layers(*kind); ++i) {
        Add(kind->offset + i * kind->page_bytes + bytes, bundle, bytes, runs);
        bundle += bytes;
      }
    }
  }
  if (tokens % 128 != 0) {
    const int64_t bytes = hca_.rows_per_page * hca_.row_bytes;
    for (int64_t i = 0; i < Layers(hca_); ++i) {
      Add(hca_.offset + i * hca_.page_bytes, bundle, bytes, runs);
      bundle += bytes;
    }
  }
  FATHOM_CHECK(bundle == BundleBytes(tokens));
}

std::vector<ByteRun> WindowKinds::Runs(int64_t tokens) const {
  std::vector<ByteRun> runs;
  AddWindows(tokens, &runs);
  AddStates(tokens, &runs);
  return runs;
}

std::vector<ByteRun> WindowKinds::StateRuns(int64_t tokens) const {
  std::vector<ByteRun> runs;
  AddStates(tokens, &runs);
  return runs;
}

}  // namespace fathom
