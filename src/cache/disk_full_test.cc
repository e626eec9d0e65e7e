// Disks that are full, and folders that take no files: what is held makes room, nothing else is
// lost, and where there is no room to be made the disk is left alone for a while.
#include <algorithm>

#include "cache/disk_test_util.h"

namespace fathom {
namespace {

using namespace disk_test;  // NOLINT(google-build-using-namespace)

TEST(DiskFull, AtAnyOperationItMakesRoomAndHarmsNothing) {
  Random random(38);
  int failures = 0;
  bool reached_the_end = false;
  for (int64_t at = 1; !reached_the_end; ++at) {
    SCOPED_TRACE(at);
    ASSERT_LT(at, 200);
    const TemporaryFolder folder;
    auto io = std::make_shared<FaultyDiskIo>(MakePosixDiskIo());
    DiskOptions options = Options(folder.path());
    options.io = io;
    auto store = Open(options);
    std::vector<Segment> old;
    std::vector<SegmentId> ids;
    for (int i = 0; i < 3; ++i) {
      old.push_back(MakeSegment(random, 300));
      ids.push_back(WriteSegment(*store, old.back()).segment);
    }
    const int64_t first = io->operations();
    io->FailAt(at, ENOSPC);
    const Segment segment = MakeSegment(random, 300);
    const DiskEvent event = WriteSegment(*store, segment);
    reached_the_end = io->operations() - first < at;
    io->Heal();
    const DiskStats stats = store->stats();
    EXPECT_LE(stats.evicted, 2);
    for (auto i = static_cast<size_t>(stats.evicted); i < old.size(); ++i) {
      EXPECT_TRUE(ReadsBack(*store, ids[i], old[i])) << i;
    }
    for (const std::string& name : folder.Names()) EXPECT_TRUE(name.ends_with(kSegmentSuffix));
    if (event.kind == DiskEvent::Kind::kWritten) {
      EXPECT_TRUE(ReadsBack(*store, event.segment, segment));
      EXPECT_EQ(folder.Names().size(), 4U - static_cast<size_t>(stats.evicted));
      continue;
    }
    ++failures;  // what a sync has lost is not written again
    EXPECT_TRUE(event.disk_full);
    EXPECT_NE(event.message.find(ErrnoText(-ENOSPC)), std::string::npos) << event.message;
    const DiskEvent next = WriteSegment(*store, segment);
    ASSERT_EQ(next.kind, DiskEvent::Kind::kWritten) << next.message;
  }
  EXPECT_GE(failures, 1);
  EXPECT_LE(failures, 2);
}

// A disk of 200,000 bytes, where --kv-disk-size says nothing.
TEST(DiskFull, ItKeepsTheLatestSegments) {
  Random random(39);
  const TemporaryFolder folder;
  auto io = std::make_shared<FaultyDiskIo>(MakePosixDiskIo());
  DiskOptions options = Options(folder.path());
  options.io = io;
  options.full_pause = std::chrono::milliseconds(1);  // the limit is found again and again
  auto store = Open(options);
  io->SetCapacity(folder.path(), 200'000);
  std::vector<Segment> segments;
  int named = 0;
  for (int i = 0; i < 40; ++i) {
    segments.push_back(MakeSegment(random, 500));
    auto writer = StartWrite(*store, segments.back());
    writer->Commit();
    ASSERT_TRUE(store->Flush(Deadline()));
    for (const DiskEvent& event : store->TakeEvents()) {
      EXPECT_NE(event.kind, DiskEvent::Kind::kWriteFailed) << event.message;
      if (event.kind != DiskEvent::Kind::kDiskFull) continue;
      ++named;
      EXPECT_EQ(event.message.find(folder.path() + ": the disk is full: "), 0U) << event.message;
    }
  }
  EXPECT_EQ(named, 1);
  const DiskStats stats = store->stats();
  EXPECT_GT(stats.disk_full, 1);
  EXPECT_EQ(stats.write_failures, 0);
  EXPECT_EQ(stats.write_pauses, 0);
  EXPECT_EQ(stats.evicted + stats.segments, 40);
  const std::vector<SegmentInfo> there = store->segments();
  EXPECT_GE(there.size(), 3U);
  for (const SegmentInfo& info : there) {  // the last ones
    const auto at = std::find_if(segments.begin(), segments.end(), [&](const Segment& segment) {
      return segment.header.tokens == info.header->tokens;
    });
    EXPECT_GE(at - segments.begin(), 40 - static_cast<ptrdiff_t>(there.size()));
    EXPECT_TRUE(ReadsBack(*store, info.id, *at));
  }
}

TEST(DiskFull, WhatItCouldNotHoldEvictsNothing) {
  Random random(40);
  const TemporaryFolder folder;
  auto io = std::make_shared<FaultyDiskIo>(MakePosixDiskIo());
  DiskOptions options = Options(folder.path());
  options.io = io;
  auto store = Open(options);
  io->SetCapacity(folder.path(), 100'000);
  const Segment small = MakeSegment(random, 300);
  const SegmentId id = WriteSegment(*store, small).segment;
  const DiskEvent event = WriteSegment(*store, MakeSegment(random, 4000));
  EXPECT_EQ(event.kind, DiskEvent::Kind::kWriteFailed);
  EXPECT_TRUE(event.disk_full);
  EXPECT_NE(event.message.find(" that fit on the full disk"), std::string::npos) << event.message;
  EXPECT_EQ(store->stats().evicted, 0);
  EXPECT_FALSE(store->write_paused());  // others may fit
  EXPECT_TRUE(ReadsBack(*store, id, small));
  EXPECT_EQ(WriteSegment(*store, MakeSegment(random, 300)).kind, DiskEvent::Kind::kWritten);
}

TEST(DiskFull, WhereNothingCanBeEvictedWritingPauses) {
  Random random(41);
  const TemporaryFolder folder;
  auto io = std::make_shared<FaultyDiskIo>(MakePosixDiskIo());
  DiskOptions options = Options(folder.path());
  options.io = io;
  options.full_pause = std::chrono::milliseconds(3'600'500);  // not over before the test is
  auto store = Open(options);
  io->FailAlways("write", ENOSPC);
  EXPECT_FALSE(store->write_paused());
  const DiskEvent event = WriteSegment(*store, MakeSegment(random, 300));
  EXPECT_EQ(event.kind, DiskEvent::Kind::kWriteFailed);
  const int64_t operations = io->operations();
  EXPECT_NE(event.message.find(": No space left on device: nothing can be evicted, and nothing is "
                               "written for 3600.5 s"),
            std::string::npos)
      << event.message;
  EXPECT_TRUE(store->write_paused());
  EXPECT_EQ(store->stats().write_pauses, 1);
  const DiskEvent again = WriteSegment(*store, MakeSegment(random, 300));
  EXPECT_EQ(again.kind, DiskEvent::Kind::kWriteFailed);
  EXPECT_TRUE(again.disk_full);
  EXPECT_EQ(io->operations(), operations);  // the disk is left alone
}

TEST(DiskFull, APauseEndsByItself) {
  Random random(43);
  const TemporaryFolder folder;
  auto io = std::make_shared<FaultyDiskIo>(MakePosixDiskIo());
  DiskOptions options = Options(folder.path());
  options.io = io;
  options.full_pause = std::chrono::milliseconds(100);
  auto store = Open(options);
  io->FailAlways("write", ENOSPC);
  const DiskEvent event = WriteSegment(*store, MakeSegment(random, 300));
  EXPECT_EQ(event.kind, DiskEvent::Kind::kWriteFailed);
  EXPECT_EQ(store->stats().write_pauses, 1);
  io->Heal();
  ASSERT_TRUE(WaitUntil([&] { return !store->write_paused(); }));
  EXPECT_EQ(WriteSegment(*store, MakeSegment(random, 300)).kind, DiskEvent::Kind::kWritten);
}

TEST(DiskFull, RoomThatSomebodyElseTakesIsNotMadeForEver) {
  Random random(42);
  const TemporaryFolder folder;
  auto io = std::make_shared<FaultyDiskIo>(MakePosixDiskIo());
  DiskOptions options = Options(folder.path());
  options.io = io;
  options.full_pause = std::chrono::hours(1);  // not over before it is looked at
  auto store = Open(options);
  for (int i = 0; i < 20; ++i) WriteSegment(*store, MakeSegment(random, 300));
  io->FailAlways("write", ENOSPC);  // whatever is evicted
  const DiskEvent event = WriteSegment(*store, MakeSegment(random, 300));
  EXPECT_EQ(event.kind, DiskEvent::Kind::kWriteFailed);
  EXPECT_NE(event.message.find("made no room"), std::string::npos) << event.message;
  EXPECT_TRUE(store->write_paused());
  EXPECT_LE(store->stats().evicted, 8);
}

TEST(DiskFull, AFolderInWhichNoFileCanBeWrittenIsRefused) {
  for (const auto& [operation, error] : std::vector<std::pair<std::string, int>>{
           {"create", EROFS}, {"write", EIO}, {"sync", EIO}, {"remove", EPERM}}) {
    const TemporaryFolder folder;
    DiskOptions options = Options(folder.path());
    auto io = std::make_shared<FaultyDiskIo>(MakePosixDiskIo());
    options.io = io;
    io->FailAlways(operation, error);
    const auto store = DiskStore::Open(options);
    ASSERT_FALSE(store.has_value()) << operation;
    EXPECT_EQ(store.error().code, Code::kInvalidArgument);
    EXPECT_EQ(store.error().message,
              folder.path() + ": no file can be written there: " + ErrnoText(-error));
  }
  const auto proc = DiskStore::Open(Options("/proc"));
  ASSERT_FALSE(proc.has_value());
  EXPECT_EQ(proc.error().message.find("/proc: "), 0U) << proc.error().message;
  // What a full disk holds is still of use.
  for (const char* operation : {"create", "write", "sync"}) {
    const TemporaryFolder folder;
    auto io = std::make_shared<FaultyDiskIo>(MakePosixDiskIo());
    DiskOptions options = Options(folder.path());
    options.io = io;
    io->FailAlways(operation, ENOSPC);
    EXPECT_TRUE(DiskStore::Open(options).has_value()) << operation;
    EXPECT_TRUE(folder.Names().empty());
  }
}

}  // namespace
}  // namespace fathom
