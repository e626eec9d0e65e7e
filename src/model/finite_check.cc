#include "model/finite_check.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <vector>

namespace fathom {
namespace {

// Eight bytes at a time: an element is bad when its masked bits plus one unit of the lowest masked
// bit carry into the (masked out) sign bit, that is when all masked bits are one.
struct Pattern {
  uint64_t mask;
  uint64_t unit;
  uint64_t carry;
  bool sign_too;  // E8M0 has no sign: bad is only 0xff, so the top bit must be set as well
};

std::optional<Pattern> PatternOf(DType dtype) {
  constexpr uint64_t kBytes = 0x0101010101010101u;
  constexpr uint64_t kHalves = 0x0001000100010001u;
  constexpr uint64_t kWords = 0x0000000100000001u;
  switch (dtype) {
    case DType::kF32: return Pattern{0x7f800000 * kWords, 0x800000 * kWords, kWords << 31, false};
    case DType::kBF16: return Pattern{0x7f80 * kHalves, 0x80 * kHalves, kHalves << 15, false};
    case DType::kF16: return Pattern{0x7c00 * kHalves, 0x400 * kHalves, kHalves << 15, false};
    case DType::kF8E4M3: return Pattern{0x7f * kBytes, kBytes, kBytes << 7, false};
    case DType::kF8E8M0: return Pattern{0x7f * kBytes, kBytes, kBytes << 7, true};
    default: return std::nullopt;
  }
}

uint64_t BadBits(const Pattern& p, uint64_t word) {
  const uint64_t bits = ((word & p.mask) + p.unit) & p.carry;
  return p.sign_too ? bits & word : bits;
}

bool AnyBad(const Pattern& p, const std::byte* data, int64_t bytes) {
  uint64_t bad = 0;
  int64_t i = 0;
  for (; i + 32 <= bytes; i += 32) {
    uint64_t w[4];
    std::memcpy(w, data + i, 32);
    bad |= BadBits(p, w[0]) | BadBits(p, w[1]) | BadBits(p, w[2]) | BadBits(p, w[3]);
  }
  for (; i < bytes; i += 8) {
    uint64_t word = 0;  // zero fill is finite in every format
    std::memcpy(&word, data + i, static_cast<size_t>(std::min<int64_t>(8, bytes - i)));
    bad |= BadBits(p, word);
  }
  return bad != 0;
}

int64_t FirstBadElement(const Pattern& p, const TensorInfo& tensor) {
  const int64_t size = ElementBytes(tensor.dtype);
  for (int64_t i = 0; i * size < tensor.bytes; ++i) {
    if (AnyBad(p, tensor.data + i * size, size)) return i;
  }
  return -1;
}

constexpr int64_t kPiece = int64_t{1} << 20;  // bytes per unit of work; a multiple of every element

}  // namespace

Status CheckFinite(std::span<const TensorInfo* const> tensors, ThreadPool& pool) {
  struct Piece {
    size_t tensor;
    int64_t begin;
  };
  std::vector<Piece> pieces;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!PatternOf(tensors[i]->dtype)) continue;
    for (int64_t at = 0; at < tensors[i]->bytes; at += kPiece) pieces.push_back({i, at});
  }
  std::atomic<size_t> first_bad{tensors.size()};
  pool.ParallelFor(static_cast<int64_t>(pieces.size()), 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const TensorInfo& tensor = *tensors[pieces[i].tensor];
      const int64_t bytes = std::min(kPiece, tensor.bytes - pieces[i].begin);
      if (!AnyBad(*PatternOf(tensor.dtype), tensor.data + pieces[i].begin, bytes)) continue;
      size_t seen = first_bad.load();
      while (pieces[i].tensor < seen && !first_bad.compare_exchange_weak(seen, pieces[i].tensor)) {
      }
    }
  });
  if (first_bad < tensors.size()) {
    const TensorInfo& tensor = *tensors[first_bad];
    return Fail(Code::kDataLoss, "tensor {}: element {} is NaN or infinite", tensor.name,
                FirstBadElement(*PatternOf(tensor.dtype), tensor));
  }
  return {};
}

}  // namespace fathom
