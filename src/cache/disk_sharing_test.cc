// Limits, eviction, and several stores on one folder: in threads, in processes, and killed.
#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>

#include <algorithm>
#include <set>

#include "cache/disk_test_util.h"

namespace fathom {
namespace {

using namespace disk_test;  // NOLINT(google-build-using-namespace)

int64_t BytesIn(const std::string& folder) {
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::error_code vanished;
    const auto size = entry.file_size(vanished);
    if (!vanished) bytes += static_cast<int64_t>(size);
  }
  return bytes;
}

TEST(DiskLimit, TheLeastRecentlyUsedLeafGoesAndEvictionIsAnEvent) {
  Random random(41);
  const TemporaryFolder folder;
  DiskOptions options = Options(folder.path());
  const Segment root = MakeSegment(random, 128 * 2);
  auto store = Open(options);
  const DiskEvent root_written = WriteSegment(*store, root);
  const Segment child = MakeSegment(random, 128 * 2, root_written.header.get());
  const SegmentId child_id = WriteSegment(*store, child).segment;
  const Segment lone = MakeSegment(random, 128 * 2);
  const SegmentId lone_id = WriteSegment(*store, lone).segment;
  // Oldest first: root, child, lone. The child is used again, so lone is the oldest leaf.
  EXPECT_TRUE(ReadsBack(*store, child_id, child));
  store.reset();

  options.max_bytes = BytesIn(folder.path()) + 1000;
  store = Open(options);  // recency is in the files' times
  const auto find = [&](const Segment& segment) {
    for (const SegmentInfo& info : store->segments()) {
      if (info.header->tokens == segment.header.tokens) return info.id;
    }
    return SegmentId{};
  };
  const SegmentId reopened = find(lone);
  ASSERT_NE(reopened, SegmentId{});
  auto writer = StartWrite(*store, MakeSegment(random, 100));
  writer->Commit();
  auto events = WaitEvents(*store, 2);
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(events[0].kind, DiskEvent::Kind::kRemoved);
  EXPECT_EQ(events[0].segment, reopened);
  EXPECT_NE(events[0].message.find(": evicted: least recently used"), std::string::npos);
  EXPECT_EQ(events[1].kind, DiskEvent::Kind::kWritten);
  EXPECT_EQ(store->stats().evicted, 1);
  EXPECT_NE(find(root), SegmentId{});
  EXPECT_NE(find(child), SegmentId{});
  (void)lone_id;
}

TEST(DiskLimit, NeverExceededAndChainsStayRooted) {
  Random random(42);
  const TemporaryFolder folder;
  DiskOptions options = Options(folder.path());
  options.max_bytes = 300'000;
  auto store = Open(options);
  for (int i = 0; i < 120; ++i) {
    const std::vector<SegmentInfo> listed = store->segments();
    std::set<BlockHash> names;
    for (const SegmentInfo& info :
         listed) {  // only leaves go, so no chain is without its beginning
      const SegmentHeader& header = *info.header;
      EXPECT_TRUE(header.begin == 0 || names.contains(header.parent));
      names.insert(header.block_names.begin(), header.block_names.end());
    }
    const SegmentHeader* parent =
        i > 0 && random() % 3 != 0 ? listed[random() % listed.size()].header.get() : nullptr;
    const Segment segment = MakeSegment(random, 128 + static_cast<int64_t>(random() % 500), parent);
    const DiskEvent event = WriteSegment(*store, segment);
    ASSERT_EQ(event.kind, DiskEvent::Kind::kWritten) << event.message;
    ASSERT_LE(BytesIn(folder.path()), options.max_bytes);
    ASSERT_EQ(store->stats().bytes_on_disk, BytesIn(folder.path()));
  }
  EXPECT_GT(store->stats().evicted, 50);
}

TEST(DiskLimit, TheParentOfWhatIsBeingWrittenStays) {
  Random random(43);
  const TemporaryFolder folder;
  DiskOptions options = Options(folder.path());
  options.max_bytes = 120'000;
  auto store = Open(options);
  const DiskEvent parent = WriteSegment(*store, MakeSegment(random, 128 * 3));
  const Segment child = MakeSegment(random, 128 * 3, parent.header.get());
  auto writer = StartWrite(*store, child);  // committed after all the others
  for (int i = 0; i < 20; ++i) WriteSegment(*store, MakeSegment(random, 128 * 3));
  EXPECT_GT(store->stats().evicted, 0);
  writer->Commit();
  ASSERT_TRUE(store->Flush(Deadline()));
  const auto listed = store->segments();
  const auto has = [&](const std::vector<TokenId>& tokens) {
    return std::any_of(listed.begin(), listed.end(),
                       [&](const auto& info) { return info.header->tokens == tokens; });
  };
  EXPECT_TRUE(has(parent.header->tokens));
  EXPECT_TRUE(has(child.header.tokens));
}

TEST(DiskLimit, ASegmentThatCannotFitIsAFailedWriteAndEvictsNothing) {
  Random random(44);
  const TemporaryFolder folder;
  DiskOptions options = Options(folder.path());
  options.max_bytes = 70'000;
  auto store = Open(options);
  WriteSegment(*store, MakeSegment(random, 10));
  const DiskEvent event = WriteSegment(*store, MakeSegment(random, 128 * 10));
  EXPECT_EQ(event.kind, DiskEvent::Kind::kWriteFailed);
  EXPECT_NE(event.message.find("are more than the limit of 70000"), std::string::npos)
      << event.message;
  EXPECT_EQ(folder.Names().size(), 1U);
  EXPECT_EQ(store->stats().evicted, 0);
}

TEST(DiskLimit, DamagedFilesGoFirst) {
  Random random(45);
  const TemporaryFolder folder;
  DiskOptions options = Options(folder.path());
  auto store = Open(options);
  const Segment kept = MakeSegment(random, 300);
  WriteSegment(*store, kept);
  const std::string bad = SegmentFileName(*WriteSegment(*store, MakeSegment(random, 300)).header);
  store.reset();
  std::filesystem::resize_file(folder.path() + "/" + bad, 100'000);
  options.max_bytes = BytesIn(folder.path()) + 1000;
  store = Open(options);
  EXPECT_TRUE(std::filesystem::exists(folder.path() + "/" + bad + ".bad"));
  ASSERT_EQ(WriteSegment(*store, MakeSegment(random, 20)).kind, DiskEvent::Kind::kWritten);
  EXPECT_FALSE(std::filesystem::exists(folder.path() + "/" + bad + ".bad"));
  EXPECT_EQ(store->stats().evicted, 0);
}

TEST(DiskSharing, TwoStoresSeeEachOthersSegmentsAndEvictions) {
  Random random(46);
  const TemporaryFolder folder;
  auto a = Open(Options(folder.path()));
  auto b = Open(Options(folder.path()));
  const Segment segment = MakeSegment(random, 300);
  const DiskEvent written = WriteSegment(*a, segment);
  WriteSegment(*b, MakeSegment(random, 10));
  ASSERT_TRUE(WaitUntil([&] { return b->segments().size() == 2; }));
  SegmentId found;
  for (const SegmentInfo& info : b->segments()) {
    if (info.name == SegmentFileName(*written.header)) found = info.id;
  }
  EXPECT_TRUE(ReadsBack(*b, found, segment));
  std::filesystem::remove(folder.path() + "/" + SegmentFileName(*written.header));
  WriteSegment(*b, MakeSegment(random, 10));
  EXPECT_TRUE(WaitUntil([&] { return b->segments().size() == 2; }));
}

// Writes and reads for a while under a tight limit; every part that arrives is right (ReadsBack).
void Hammer(const std::string& path, uint64_t seed, int rounds) {
  Random random(seed);
  DiskOptions options = Options(path);
  options.max_bytes = 400'000;
  auto store = Open(options);
  std::vector<std::pair<SegmentId, Segment>> mine;
  int read = 0;
  for (int i = 0; i < rounds; ++i) {
    Segment segment = MakeSegment(random, 100 + static_cast<int64_t>(random() % 400));
    const DiskEvent event = WriteSegment(*store, segment);
    if (event.kind == DiskEvent::Kind::kWritten) mine.emplace_back(event.segment, segment);
    const auto& [id, expected] = mine[random() % mine.size()];
    read += ReadsBack(*store, id, expected) ? 1 : 0;  // or evicted by either: never wrong
  }
  EXPECT_GT(read, 0);
  EXPECT_EQ(store->stats().write_failures, 0);
}

TEST(DiskSharing, StoresInThreadsWriteReadAndEvictAtOnce) {
  const TemporaryFolder folder;
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    threads.emplace_back([&, seed] { Hammer(folder.path(), 100 + seed, 60); });
  }
  for (std::thread& thread : threads) thread.join();
  auto store = Open(Options(folder.path()));
  EXPECT_TRUE(store->refused().empty());
  for (const std::string& name : folder.Names()) EXPECT_TRUE(name.ends_with(".fkv")) << name;
  for (const SegmentInfo& info : store->segments()) {
    EXPECT_TRUE(VerifyParts(*MakePosixDiskIo(), folder.path(), info.name, *info.header).empty());
  }
}

TEST(DiskSharing, StoresInProcessesWriteReadAndEvictAtOnce) {
  const TemporaryFolder folder;
  std::vector<pid_t> children;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      Hammer(folder.path(), 200 + seed, 60);
      _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  auto store = Open(Options(folder.path()));
  EXPECT_TRUE(store->refused().empty());
}

// What is being made is never taken for a leftover.
TEST(DiskSharing, NewTemporariesSurviveThoseWhoCleanUp) {
  const TemporaryFolder folder;
  std::atomic<bool> done = false;
  std::vector<std::thread> cleaners;
  for (int i = 0; i < 2; ++i) {
    cleaners.emplace_back([&] {
      while (!done) {
        const auto files = ListFolder(folder.path());
        if (!files) continue;
        ForEachStaleTemporary(folder.path(), *files, [&](const FolderFile& file) {
          std::filesystem::remove(folder.path() + "/" + file.name);
        });
      }
    });
  }
  const auto io = MakePosixDiskIo();
  int lost = 0;
  for (int i = 0; i < 3000; ++i) {
    const std::string path = folder.path() + "/" + TemporaryName("a.fkv");
    const int file = io->OpenNew(path);
    ASSERT_GE(file, 0);
    if (io->Remove(path) != 0) ++lost;
    io->Close(file);
  }
  done = true;
  for (std::thread& cleaner : cleaners) cleaner.join();
  EXPECT_EQ(lost, 0);
}

TEST(DiskSharing, KilledAtAnyMomentLeavesOnlyWholeFiles) {
  const TemporaryFolder folder;
  Random random(47);
  int64_t found = 0;
  for (int round = 0; round < 25; ++round) {
    int written[2];
    ASSERT_EQ(pipe(written), 0);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      Random own(1000 + static_cast<uint64_t>(round));
      auto store = Open(Options(folder.path()));
      while (true) {
        WriteSegment(*store, MakeSegment(own, 128 * 8));
        if (write(written[1], "x", 1) != 1) _exit(1);
      }
    }
    close(written[1]);
    // Mostly in the middle of a later segment, sometimes of the first or before it.
    char byte = 0;
    if (round % 4 != 0) {
      ASSERT_EQ(read(written[0], &byte, 1), 1);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
    ASSERT_EQ(kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    close(written[0]);
    auto store = Open(Options(folder.path()));
    EXPECT_TRUE(store->refused().empty());
    for (const std::string& name : folder.Names()) ASSERT_TRUE(name.ends_with(".fkv")) << name;
    for (const SegmentInfo& info : store->segments()) {
      EXPECT_TRUE(VerifyParts(*MakePosixDiskIo(), folder.path(), info.name, *info.header).empty());
    }
    found = static_cast<int64_t>(store->segments().size());
  }
  EXPECT_GE(found, 18);
}

TEST(DiskSharing, TemporariesOfLivingWritersStayAndOthersGo) {
  Random random(48);
  const TemporaryFolder folder;
  auto writing = Open(Options(folder.path()));
  const Segment segment = MakeSegment(random, 300);
  auto writer = writing->Write(segment.header);
  writer->Append(segment.blocks[0]);
  ASSERT_TRUE(WaitUntil([&] { return writer->backlog_bytes() == 0; }));
  const std::string dead = folder.path() + "/x.fkv.1.0123456789abcdef.tmp";
  WriteFile(dead, "half");
  WriteFile(folder.path() + "/other.tmp", "not ours");
  auto other = Open(Options(folder.path()));
  EXPECT_FALSE(std::filesystem::exists(dead));
  EXPECT_EQ(folder.Names().size(), 2U);  // the living one and the foreign one
  for (size_t i = 1; i < segment.blocks.size(); ++i) writer->Append(segment.blocks[i]);
  for (const auto& bundle : segment.bundles) writer->Append(bundle);
  writer->Commit();
  EXPECT_EQ(WaitEvents(*writing, 1).at(0).kind, DiskEvent::Kind::kWritten);
}

}  // namespace
}  // namespace fathom
