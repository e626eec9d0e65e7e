// Integers that must not be mixed up are distinct types: a token position is not a row index.
//
//   BlockId block{7};
//   pages + block.value * stride;   // .value is the only way out
#pragma once

#include <compare>
#include <cstdint>
#include <functional>

namespace fathom {

template <class Tag, class Rep>
struct StrongId {
  using rep = Rep;
  Rep value{};
  constexpr StrongId() = default;
  constexpr explicit StrongId(Rep v) : value(v) {}
  friend constexpr auto operator<=>(StrongId, StrongId) = default;
};

using TokenId = int32_t;  // a vocabulary id; flat arrays of these cross every boundary

using Position = StrongId<struct PositionTag, int64_t>;   // absolute token position, from 0
using BlockId = StrongId<struct BlockTag, int32_t>;       // a slab of BlockPool
using SlotId = StrongId<struct SlotTag, int32_t>;         // a slot of SlotPool
using BundleId = StrongId<struct BundleTag, int32_t>;     // a saved slot of BundlePool
using LayerId = StrongId<struct LayerTag, int32_t>;       // model layer, from 0
using RequestId = StrongId<struct RequestTag, uint64_t>;  // one request branch in the engine

}  // namespace fathom

template <class Tag, class Rep>
struct std::hash<fathom::StrongId<Tag, Rep>> {
  size_t operator()(fathom::StrongId<Tag, Rep> id) const noexcept {
    return std::hash<Rep>{}(id.value);
  }
};
