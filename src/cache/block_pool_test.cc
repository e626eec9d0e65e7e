#include "cache/block_pool.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

namespace fathom {
namespace {

TEST(Reservation, IsZeroedAndMovable) {
  Reservation memory = *Reservation::Make(1 << 16, "test");
  EXPECT_TRUE(std::all_of(memory.data(), memory.data() + memory.size(),
                          [](std::byte b) { return b == std::byte{0}; }));
  std::byte* data = memory.data();
  Reservation moved = std::move(memory);
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(moved.size(), 1 << 16);
  EXPECT_EQ(memory.data(), nullptr);  // NOLINT(bugprone-use-after-move): the promise under test
  moved = *Reservation::Make(0, "nothing");
  EXPECT_EQ(moved.size(), 0);
}

TEST(Reservation, RefusalNamesBytesAndPurpose) {
  constexpr int64_t kTooMuch = int64_t{1} << 50;  // beyond the address space of x86-64 processes
  const auto memory = Reservation::Make(kTooMuch, "KV blocks");
  ASSERT_FALSE(memory.has_value());
  EXPECT_EQ(memory.error().code, Code::kResourceExhausted);
  EXPECT_NE(memory.error().message.find("KV blocks"), std::string::npos);
  EXPECT_NE(memory.error().message.find(std::to_string(kTooMuch)), std::string::npos);
  EXPECT_FALSE(Reservation::Make(-1, "x").has_value());
}

TEST(BlockPool, HandsOutUnitsInOrderAndTheLastReleasedFirst) {
  BlockPool pool(nullptr, 64, 3);
  EXPECT_EQ(pool.Allocate()->value, 0);
  EXPECT_EQ(pool.Allocate()->value, 1);
  EXPECT_EQ(pool.Allocate()->value, 2);
  EXPECT_FALSE(pool.Allocate().has_value());
  pool.Release(BlockId{1});
  EXPECT_EQ(pool.Allocate()->value, 1);
}

TEST(BlockPool, SharedBlocksReturnAtTheLastRelease) {
  BlockPool pool(nullptr, 64, 1);
  const BlockId block = *pool.Allocate();
  pool.Retain(block);
  EXPECT_EQ(pool.references(block), 2);
  pool.Release(block);
  EXPECT_EQ(pool.free_count(), 0);
  pool.Release(block);
  EXPECT_EQ(pool.free_count(), 1);
}

TEST(BlockPool, AddressesAreUnitsOfTheReservation) {
  Reservation memory = *Reservation::Make(4 * 1'002'240, "blocks");
  BlockPool pool(memory.data(), 1'002'240, 4);
  EXPECT_EQ(pool.address(BlockId{3}), memory.data() + 3 * 1'002'240);
}

TEST(PoolDeathTest, DoubleReleaseAndStrangersAbort) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  BlockPool blocks(nullptr, 64, 2);
  const BlockId block = *blocks.Allocate();
  blocks.Release(block);
  EXPECT_DEATH(blocks.Release(block), "internal error");
  EXPECT_DEATH(blocks.Retain(block), "internal error");
  EXPECT_DEATH(blocks.Release(BlockId{2}), "internal error");
  EXPECT_DEATH(blocks.Release(BlockId{-1}), "internal error");
  SlotPool slots(nullptr, 64, 2);
  EXPECT_DEATH(slots.Release(SlotId{0}), "internal error");
  EXPECT_DEATH(slots.Release(SlotId{7}), "internal error");
}

// Random operations against a map of reference counts.
RC_GTEST_PROP(BlockPool, AgreesWithAPlainModel, ()) {
  const int count = *rc::gen::inRange(1, 40);
  BlockPool pool(nullptr, 64, count);
  std::map<int32_t, int> model;
  for (const int op : *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 1'000))) {
    const auto pick = [&] { return std::next(model.begin(), op / 3 % model.size()); };
    if (op % 3 == 0) {
      const auto block = pool.Allocate();
      RC_ASSERT(block.has_value() == (static_cast<int>(model.size()) < count));
      if (!block) continue;
      RC_ASSERT(model.emplace(block->value, 1).second);  // not handed out twice
    } else if (model.empty()) {
      continue;
    } else if (op % 3 == 1) {
      const auto it = pick();
      pool.Retain(BlockId{it->first});
      ++it->second;
    } else {
      const auto it = pick();
      pool.Release(BlockId{it->first});
      if (--it->second == 0) model.erase(it);
    }
    RC_ASSERT(pool.used_count() == static_cast<int>(model.size()));
    RC_ASSERT(pool.free_count() + pool.used_count() == count);
  }
  for (const auto& [block, references] : model) {
    RC_ASSERT(pool.references(BlockId{block}) == references);
    for (int i = 0; i < references; ++i) pool.Release(BlockId{block});
  }
  RC_ASSERT(pool.free_count() == count);
}

RC_GTEST_PROP(SlotPool, NeverHandsOutASlotTwice, ()) {
  const int count = *rc::gen::inRange(1, 20);
  SlotPool pool(nullptr, 64, count);
  std::set<int32_t> held;
  for (const int op : *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 1'000))) {
    if (op % 2 == 0) {
      const auto slot = pool.Allocate();
      RC_ASSERT(slot.has_value() == (static_cast<int>(held.size()) < count));
      if (slot) RC_ASSERT(held.insert(slot->value).second);
    } else if (!held.empty()) {
      const auto it = std::next(held.begin(), op / 2 % held.size());
      pool.Release(SlotId{*it});
      held.erase(it);
    }
    RC_ASSERT(pool.used_count() == static_cast<int>(held.size()));
  }
}

}  // namespace
}  // namespace fathom
