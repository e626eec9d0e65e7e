// The store as the engine uses it: what is written comes back, in order, whatever the backend.
#include "cache/disk_store.h"

#include <atomic>
#include <set>

#include "cache/disk_test_util.h"

namespace fathom {
namespace {

using namespace disk_test;  // NOLINT(google-build-using-namespace)

std::vector<std::shared_ptr<DiskIo>> Backends() {
  std::vector<std::shared_ptr<DiskIo>> backends = {MakePosixDiskIo()};
  auto uring = MakeUringDiskIo();  // refused in some containers
  if (uring) backends.push_back(std::move(*uring));
  auto shorts = std::make_shared<FaultyDiskIo>(MakeDiskIo());
  shorts->SetShort(777);
  backends.push_back(std::move(shorts));
  return backends;
}

TEST(DiskStore, RandomSegmentsComeBackThroughEveryBackendAndAfterReopening) {
  for (const std::shared_ptr<DiskIo>& io : Backends()) {
    SCOPED_TRACE(std::string(io->name()));
    Random random(7);
    const TemporaryFolder folder;
    DiskOptions options = Options(folder.path());
    options.io = io;
    std::vector<Segment> segments;
    {
      auto store = Open(options);
      for (const int64_t tokens : {1, 127, 128, 129, 256, 1000, 3000}) {
        segments.push_back(MakeSegment(random, tokens));
        const DiskEvent event = WriteSegment(*store, segments.back());
        ASSERT_EQ(event.kind, DiskEvent::Kind::kWritten) << event.message;
        EXPECT_TRUE(ReadsBack(*store, event.segment, segments.back()));
      }
      EXPECT_EQ(store->stats().segments, 7);
      EXPECT_EQ(store->stats().read_failures, 0);
    }
    auto store = Open(options);
    EXPECT_TRUE(store->refused().empty());
    const std::vector<SegmentInfo> listed = store->segments();
    ASSERT_EQ(listed.size(), segments.size());
    for (const SegmentInfo& info : listed) {
      const auto same = std::find_if(segments.begin(), segments.end(), [&](const Segment& s) {
        return s.header.tokens == info.header->tokens;
      });
      ASSERT_NE(same, segments.end());
      ASSERT_EQ(info.header->bundles.size(), same->header.bundles.size());
      EXPECT_EQ(info.header->bundles.back().at, same->header.end());
      EXPECT_TRUE(ReadsBack(*store, info.id, *same));
    }
  }
}

TEST(DiskStore, HeadersKeepEveryFieldAndPartsArePageAligned) {
  Random random(1);
  const TemporaryFolder folder;
  auto store = Open(Options(folder.path()));
  Segment segment = MakeSegment(random, 300, nullptr, "tenant-7");
  segment.header.session = "session \"9\"";
  const DiskEvent event = WriteSegment(*store, segment);
  ASSERT_NE(event.header, nullptr);
  store = Open(Options(folder.path()));
  ASSERT_EQ(store->segments().size(), 1U);
  const SegmentHeader& read = *store->segments()[0].header;
  EXPECT_EQ(read.root, BlockHasher().Root("tenant-7"));
  EXPECT_EQ(read.parent, read.root);
  EXPECT_EQ(read.session, segment.header.session);
  EXPECT_EQ(read.created_us, event.header->created_us);
  EXPECT_EQ(read.tokens, segment.header.tokens);
  ASSERT_EQ(read.block_names.size(), 2U);
  const std::span<const TokenId> tokens = read.tokens;
  EXPECT_EQ(read.block_names[0], BlockHasher().Next(read.root, tokens.first(128)));
  EXPECT_EQ(read.block_names[1], BlockHasher().Next(read.block_names[0], tokens.subspan(128, 128)));
  ASSERT_EQ(read.blocks.size(), 3U);
  EXPECT_EQ(read.blocks[2].at, 256);
  for (const auto& entry : read.blocks) EXPECT_EQ(entry.offset % kSegmentAlignment, 0);
  for (const auto& entry : read.bundle_parts) EXPECT_EQ(entry.offset % kSegmentAlignment, 0);
}

TEST(DiskStore, ParentsAreListedBeforeChildrenAndOrphansLast) {
  Random random(3);
  const TemporaryFolder folder;
  std::string orphaned;
  {
    auto store = Open(Options(folder.path()));
    for (int chain = 0; chain < 4; ++chain) {
      std::shared_ptr<const SegmentHeader> parent;
      for (int i = 0; i < 5; ++i) {
        const Segment segment = MakeSegment(random, 128 + 128 * (i % 3) + i, parent.get());
        const DiskEvent event = WriteSegment(*store, segment);
        ASSERT_EQ(event.kind, DiskEvent::Kind::kWritten) << event.message;
        parent = event.header;
        if (chain == 0 && i == 1) orphaned = SegmentFileName(*parent);
      }
    }
  }
  std::filesystem::remove(folder.path() + "/" + orphaned);
  auto store = Open(Options(folder.path()));
  const std::vector<SegmentInfo> listed = store->segments();
  ASSERT_EQ(listed.size(), 19U);
  std::set<BlockHash> names;
  for (size_t i = 0; i < listed.size(); ++i) {
    const SegmentHeader& header = *listed[i].header;
    EXPECT_EQ(i < 16, header.begin == 0 || names.contains(header.parent)) << i;
    if (i < 16) names.insert(header.block_names.begin(), header.block_names.end());
  }
}

TEST(DiskStore, ASegmentOfTheSameTokensReplacesTheOldOne) {
  Random random(4);
  const TemporaryFolder folder;
  auto store = Open(Options(folder.path()));
  Segment segment = MakeSegment(random, 200);
  const DiskEvent first = WriteSegment(*store, segment);
  segment.blocks[0] = RandomBytes(random, kBlockBytes);
  auto writer = StartWrite(*store, segment);
  writer->Commit();
  const std::vector<DiskEvent> events = WaitEvents(*store, 2);
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].kind, DiskEvent::Kind::kWritten);
  EXPECT_EQ(events[1].kind, DiskEvent::Kind::kRemoved);
  EXPECT_EQ(events[1].segment, first.segment);
  EXPECT_TRUE(ReadsBack(*store, events[0].segment, segment));
  std::string message;
  EXPECT_FALSE(ReadsBack(*store, first.segment, segment, &message));
  EXPECT_NE(message.find("is not on disk any more"), std::string::npos) << message;
  EXPECT_EQ(store->segments().size(), 1U);
}

TEST(DiskStore, AnAbandonedWriterLeavesNothing) {
  Random random(5);
  const TemporaryFolder folder;
  auto store = Open(Options(folder.path()));
  const Segment segment = MakeSegment(random, 500);
  { auto writer = StartWrite(*store, segment); }  // by its destructor
  auto writer = store->Write(segment.header);
  writer->Append(segment.blocks[0]);
  while (writer->backlog_bytes() > 0) std::this_thread::yield();
  writer->Abandon();
  const DiskEvent event = WriteSegment(*store, MakeSegment(random, 10));
  EXPECT_EQ(event.kind, DiskEvent::Kind::kWritten);
  EXPECT_EQ(folder.Names().size(), 1U);
  EXPECT_EQ(store->write_backlog_bytes(), 0);
  EXPECT_EQ(store->stats().write_failures, 0);
}

TEST(DiskStore, AWriterMayOutliveItsStore) {
  Random random(6);
  const TemporaryFolder folder;
  auto store = Open(Options(folder.path()));
  const Segment segment = MakeSegment(random, 500);
  auto writer = store->Write(segment.header);
  writer->Append(segment.blocks[0]);
  store.reset();
  for (size_t i = 1; i < segment.blocks.size(); ++i) writer->Append(segment.blocks[i]);
  for (const auto& bundle : segment.bundles) writer->Append(bundle);
  EXPECT_EQ(writer->backlog_bytes(), 0);
  writer->Commit();
  writer.reset();
  EXPECT_TRUE(folder.Names().empty());
}

TEST(DiskStore, FlushWaitsForCommittedWritersOnly) {
  Random random(8);
  const TemporaryFolder folder;
  auto store = Open(Options(folder.path()));
  const Segment open_segment = MakeSegment(random, 300);
  auto open_writer = store->Write(open_segment.header);
  open_writer->Append(open_segment.blocks[0]);
  for (int i = 0; i < 8; ++i) StartWrite(*store, MakeSegment(random, 2000))->Commit();
  EXPECT_TRUE(store->Flush(Deadline()));
  store.reset();
  store = Open(Options(folder.path()));
  EXPECT_EQ(store->segments().size(), 8U);
  EXPECT_EQ(folder.Names().size(), 8U);
}

TEST(DiskStore, ReadingPausesAtTheBoundOfUnclaimedBytes) {
  Random random(9);
  const TemporaryFolder folder;
  DiskOptions options = Options(folder.path());
  options.max_unclaimed_bytes = 3 * kBlockBytes;
  auto store = Open(options);
  const Segment segment = MakeSegment(random, 128 * 40);
  const DiskEvent written = WriteSegment(*store, segment);
  const int64_t before = store->stats().bytes_read;
  store->Read(written.segment, segment.Parts());
  EXPECT_TRUE(WaitUntil([&] { return store->stats().bytes_read - before == 3 * kBlockBytes; }));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(store->stats().bytes_read - before, 3 * kBlockBytes);
  size_t parts = 0;
  while (parts < segment.Parts().size()) {
    int64_t bytes = 0;
    const auto events = WaitEvents(*store, 1);
    ASSERT_FALSE(events.empty());
    for (const DiskEvent& event : events) bytes += static_cast<int64_t>(event.data.size());
    EXPECT_LE(bytes, 2 * 3 * kBlockBytes + 9000);  // WaitEvents may take twice
    parts += events.size();
  }
  // A part larger than the bound still comes, alone.
  store.reset();
  options.max_unclaimed_bytes = 100;
  store = Open(options);
  EXPECT_TRUE(ReadsBack(*store, store->segments()[0].id, segment));
}

TEST(DiskStore, ACancelledReadSaysNothingMoreAndOthersGoOn) {
  Random random(10);
  const TemporaryFolder folder;
  auto io = std::make_shared<FaultyDiskIo>(MakeDiskIo());
  DiskOptions options = Options(folder.path());
  options.io = io;
  auto store = Open(options);
  const Segment segment = MakeSegment(random, 128 * 30);
  const SegmentId id = WriteSegment(*store, segment).segment;
  for (int round = 0; round < 200; ++round) {
    const ReadTicket first = store->Read(id, segment.Parts());
    const ReadTicket second = store->Read(id, {BlockPart(5)});
    bool cancelled = false, done = false;
    const auto take = [&] {
      for (const DiskEvent& event : store->TakeEvents()) {
        EXPECT_FALSE(cancelled && event.ticket == first);
        if (event.ticket != second) continue;
        EXPECT_EQ(event.data, segment.blocks[5]);
        done = true;
      }
    };
    if (round % 3 > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    if (round % 3 == 2) take();
    store->CancelRead(first);
    store->CancelRead(first);
    cancelled = true;
    const auto deadline = Deadline();
    while (!done && std::chrono::steady_clock::now() < deadline) take();
    ASSERT_TRUE(done);
  }
  EXPECT_TRUE(ReadsBack(*store, id, segment));
  EXPECT_EQ(store->stats().read_failures, 0);
}

TEST(DiskStore, DestroyedWithReadsInFlightAndWritesQueued) {
  Random random(11);
  const TemporaryFolder folder;
  const Segment segment = MakeSegment(random, 128 * 30);
  { WriteSegment(*Open(Options(folder.path())), segment); }
  for (int round = 0; round < 40; ++round) {
    auto store = Open(Options(folder.path()));
    ASSERT_EQ(store->segments().size(), 1U);
    std::atomic<int> wakes = 0;
    store->SetWake([&] { ++wakes; });
    for (int i = 0; i < 5; ++i) store->Read(store->segments()[0].id, segment.Parts());
    auto writer = StartWrite(*store, MakeSegment(random, 1000));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
    if (round % 2 == 0) writer.reset();
    store.reset();
  }
  EXPECT_EQ(folder.Names().size(), 1U);
}

TEST(DiskStore, WakesOnceForEventsNobodyHasTaken) {
  Random random(12);
  const TemporaryFolder folder;
  auto store = Open(Options(folder.path()));
  const Segment segment = MakeSegment(random, 128 * 10);
  std::atomic<int> wakes = 0;
  store->SetWake([&] { ++wakes; });
  const SegmentId id = WriteSegment(*store, segment).segment;
  ASSERT_TRUE(WaitUntil([&] { return wakes == 1; }));  // it may come after the event was taken
  wakes = 0;
  store->Read(id, segment.Parts());
  const auto deadline = Deadline();
  const int64_t all = store->stats().bytes_written;
  while (store->stats().bytes_read < all && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  store->SetWake(nullptr);  // waits for a call in progress
  EXPECT_EQ(wakes, 1);
  EXPECT_EQ(store->TakeEvents().size(), segment.Parts().size());
}

TEST(DiskStore, ReadsOfWhatIsNotThereFailByName) {
  Random random(13);
  const TemporaryFolder folder;
  auto store = Open(Options(folder.path()));
  const Segment segment = MakeSegment(random, 200);
  const SegmentId id = WriteSegment(*store, segment).segment;
  store->Read(SegmentId{999}, {BlockPart(0)});
  store->Read(id, {});
  store->Read(id, {BlockPart(0), BundlePart(7)});
  store->Read(id, {BlockPart(-1)});
  const auto events = WaitEvents(*store, 5);
  ASSERT_EQ(events.size(), 5U);
  EXPECT_NE(events[0].message.find("segment 999 is not on disk"), std::string::npos);
  EXPECT_NE(events[1].message.find("no part was asked for"), std::string::npos);
  EXPECT_EQ(events[2].kind, DiskEvent::Kind::kPart);
  EXPECT_NE(events[3].message.find("has no bundle 7"), std::string::npos) << events[3].message;
  EXPECT_NE(events[4].message.find("has no block -1"), std::string::npos);
  EXPECT_TRUE(ReadsBack(*store, id, segment));  // none of this was the file's fault
}

TEST(DiskStore, UnusableFoldersAreErrorsThatNameThem) {
  const TemporaryFolder folder;
  WriteFile(folder.path() + "/file", "x");
  for (const std::string& path :
       {folder.path() + "/file", folder.path() + "/missing/below", std::string()}) {
    const auto store = DiskStore::Open(Options(path));
    ASSERT_FALSE(store.has_value()) << path;
    EXPECT_NE(store.error().message.find(path), std::string::npos) << store.error().message;
  }
  EXPECT_TRUE(DiskStore::Open(Options(folder.path() + "/new")).has_value());
}

}  // namespace
}  // namespace fathom
