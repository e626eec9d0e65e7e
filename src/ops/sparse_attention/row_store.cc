#include "ops/sparse_attention/row_store.h"

#include <algorithm>

#include "core/dtype.h"
#include "ops/quantise/quantise.h"

namespace fathom::ops {
namespace {

constexpr int kPad = 3;  // the kernels read rows in fours

// One cache line more than the row, so that the same channels of successive rows fall into
// different sets of the first-level cache.
int64_t ScratchRowBytes(bool bf16_rows) {
  return kHeadDim * (bf16_rows ? 2 : 4) + 64;
}

constexpr size_t kWindowPointerBytes = (kWindowRows + kPad + 6) * sizeof(void*);
constexpr size_t kPointerBytes = (kAttentionSegment + kPad + 5) * sizeof(void*);
static_assert(kWindowPointerBytes % 64 == 0 && kPointerBytes % 64 == 0);

const void* const* Pad(const void** pointers, int32_t count) {
  for (int i = 0; i < kPad; ++i) pointers[count + i] = pointers[count - 1];
  return pointers;
}

void Prefetch(const std::byte* data, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(data + i);
}

}  // namespace

size_t RowStore::ScratchBytes(bool bf16_rows) {
  return kWindowPointerBytes + kPointerBytes + kCachedRows * (2 * sizeof(int32_t) + sizeof(void*)) +
         (kWindowRows + kAttentionSegment + kCachedRows) * ScratchRowBytes(bf16_rows);
}

RowStore::RowStore(const SparseAttentionArgs& args, const AttentionKernels& kernels, bool bf16_rows,
                   std::byte* scratch)
    : args_(args),
      kernels_(kernels),
      bf16_rows_(bf16_rows),
      row_bytes_(ScratchRowBytes(bf16_rows)) {
  const auto take = [&scratch](size_t bytes) {
    std::byte* taken = scratch;
    scratch += bytes;
    return taken;
  };
  window_space_ = take(kWindowRows * row_bytes_);
  spill_space_ = take(kAttentionSegment * row_bytes_);
  cached_space_ = take(kCachedRows * row_bytes_);
  window_pointers_ = reinterpret_cast<const void**>(take(kWindowPointerBytes));
  pointers_ = reinterpret_cast<const void**>(take(kPointerBytes));
  cached_pointer_ = reinterpret_cast<const void**>(take(kCachedRows * sizeof(void*)));
  cached_row_ = reinterpret_cast<int32_t*>(take(kCachedRows * sizeof(int32_t)));
  cached_use_ = reinterpret_cast<int32_t*>(take(kCachedRows * sizeof(int32_t)));
}

void RowStore::Reset(int32_t sequence) {
  sequence_ = sequence;
  use_ = 0;
  if (args_.selected != nullptr) {
    std::fill_n(cached_row_, kCachedRows, -1);
    std::fill_n(cached_use_, kCachedRows, 0);
  }
}

const void* RowStore::Materialise(const RowAddress& row, RowFormat format, std::byte* space) const {
  if (!bf16_rows_) {
    if (format == RowFormat::kF32) return row.data;
    DecodeRow(format, kHeadDim, row.data, row.scale, reinterpret_cast<float*>(space));
    return space;
  }
  if (format == RowFormat::kBf16) return row.data;
  FATHOM_CHECK(format == RowFormat::kFp8Main);
  kernels_.expand_fp8(reinterpret_cast<const uint8_t*>(row.data),
                      reinterpret_cast<const uint8_t*>(row.scale),
                      reinterpret_cast<uint16_t*>(space));
  return space;
}

const void* const* RowStore::Window(int32_t first, int32_t last) {
  FATHOM_CHECK(last - first < kWindowRows);
  const int32_t own = args_.step->first_position(sequence_);
  for (int32_t p = first; p <= last; ++p) {
    window_pointers_[p - first] = Materialise(WindowRow(args_, sequence_, p),
                                              p >= own ? args_.step_rows.format : args_.ring.format,
                                              window_space_ + (p - first) * row_bytes_);
  }
  return Pad(window_pointers_, last - first + 1);
}

const void* const* RowStore::Consecutive(int32_t first, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    pointers_[i] = Materialise(CompressedRow(args_, sequence_, first + i), args_.compressed.format,
                               spill_space_ + i * row_bytes_);
  }
  return Pad(pointers_, count);
}

const void* const* RowStore::Selected(const int32_t* rows, int32_t count) {
  constexpr int kAhead = 6;  // rows lie anywhere in memory: fetch this many before they are needed
  const int64_t data_bytes = RowDataBytes(args_.compressed.format, kHeadDim);
  ++use_;
  int32_t spilled = 0;
  for (int32_t i = 0; i < count; ++i) {
    if (i + kAhead < count && cached_row_[rows[i + kAhead] % kCachedRows] != rows[i + kAhead]) {
      const RowAddress ahead = CompressedRow(args_, sequence_, rows[i + kAhead]);
      Prefetch(ahead.data, data_bytes);
      __builtin_prefetch(ahead.scale);
    }
    const int32_t place = rows[i] % kCachedRows;
    if (cached_row_[place] != rows[i]) {
      const RowAddress row = CompressedRow(args_, sequence_, rows[i]);
      if (cached_use_[place] == use_) {
        // The place holds another row of this very segment.
        pointers_[i] =
            Materialise(row, args_.compressed.format, spill_space_ + spilled++ * row_bytes_);
        continue;
      }
      cached_row_[place] = rows[i];
      cached_pointer_[place] =
          Materialise(row, args_.compressed.format, cached_space_ + place * row_bytes_);
    }
    cached_use_[place] = use_;
    pointers_[i] = cached_pointer_[place];
  }
  return Pad(pointers_, count);
}

}  // namespace fathom::ops
