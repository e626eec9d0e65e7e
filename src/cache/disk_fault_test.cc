// Full disks, I/O errors, bad memory: whatever operation fails, the engine gets an event, and what
// was on disk before is still there.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <thread>

#include "cache/disk_test_util.h"

namespace fathom {
namespace {

using namespace disk_test;  // NOLINT(google-build-using-namespace)

TEST(DiskFault, AWriteThatFailsAtAnyOperationLeavesThePreviousState) {
  Random random(31);
  const TemporaryFolder folder;
  const Segment old = MakeSegment(random, 300);
  { WriteSegment(*Open(Options(folder.path())), old); }
  const std::vector<std::string> before = folder.Names();
  int failures = 0;
  bool reached_the_end = false;
  for (int64_t at = 1; !reached_the_end; ++at) {
    SCOPED_TRACE(at);
    ASSERT_LT(at, 200);
    auto io = std::make_shared<FaultyDiskIo>(MakePosixDiskIo());
    DiskOptions options = Options(folder.path());
    options.io = io;
    options.rescan_interval = std::chrono::hours(1);
    auto store = Open(options);
    const int64_t first = io->operations();
    io->FailAt(at, EIO);
    const Segment segment = MakeSegment(random, 300);
    const DiskEvent event = WriteSegment(*store, segment);
    reached_the_end = io->operations() - first < at;
    const auto listed = store->segments();
    const auto old_one = std::find_if(listed.begin(), listed.end(), [&](const auto& info) {
      return info.header->tokens == old.header.tokens;
    });
    ASSERT_NE(old_one, listed.end());
    io->Heal();
    EXPECT_TRUE(ReadsBack(*store, old_one->id, old));
    if (event.kind == DiskEvent::Kind::kWritten) {  // setting the time may fail
      EXPECT_TRUE(ReadsBack(*store, event.segment, segment));
      std::filesystem::remove(folder.path() + "/" + SegmentFileName(*event.header));
      continue;
    }
    ++failures;
    EXPECT_EQ(event.kind, DiskEvent::Kind::kWriteFailed);
    EXPECT_FALSE(event.disk_full);
    EXPECT_NE(event.message.find(".fkv: "), std::string::npos);
    EXPECT_NE(event.message.find(ErrnoText(-EIO)), std::string::npos) << event.message;
    EXPECT_EQ(store->stats().write_failures, 1);
    EXPECT_EQ(folder.Names(), before);
    // And the next write is none the worse for it.
    const DiskEvent next = WriteSegment(*store, segment);
    ASSERT_EQ(next.kind, DiskEvent::Kind::kWritten) << next.message;
    std::filesystem::remove(folder.path() + "/" + SegmentFileName(*next.header));
  }
  EXPECT_GE(failures, 9);
}

TEST(DiskFault, AFullDiskFailsTheWriterAtOnceAndDropsWhatFollows) {
  Random random(32);
  const TemporaryFolder folder;
  auto io = std::make_shared<FaultyDiskIo>(MakePosixDiskIo());
  DiskOptions options = Options(folder.path());
  options.io = io;
  auto store = Open(options);
  io->FailAlways("write", ENOSPC);
  const Segment segment = MakeSegment(random, 1000);
  auto writer = store->Write(segment.header);
  writer->Append(segment.blocks[0]);
  const auto events = WaitEvents(*store, 1);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].write, writer->id());
  SegmentHeader header = segment.header;
  header.fingerprint = options.fingerprint;
  const std::string sentence =
      SegmentFileName(header) + ": cannot be written: No space left on device: ";
  EXPECT_EQ(events[0].message.substr(0, sentence.size()), sentence);
  EXPECT_TRUE(writer->failed());
  for (size_t i = 1; i < segment.blocks.size(); ++i) writer->Append(segment.blocks[i]);
  for (const auto& bundle : segment.bundles) writer->Append(bundle);
  EXPECT_EQ(writer->backlog_bytes(), 0);
  writer->Commit();
  EXPECT_TRUE(store->Flush(Deadline()));
  EXPECT_TRUE(store->TakeEvents().empty());  // one event for one failure
  EXPECT_TRUE(folder.Names().empty());
}

TEST(DiskFault, AReadThatFailsAtAnyOperationIsOneEventAndTheSegmentIsOfferedNoMore) {
  Random random(33);
  const TemporaryFolder folder;
  const Segment segment = MakeSegment(random, 1500);
  { WriteSegment(*Open(Options(folder.path())), segment); }
  int failures = 0;
  for (int64_t at = 1;; ++at) {
    SCOPED_TRACE(at);
    ASSERT_LT(at, 200);
    auto io = std::make_shared<FaultyDiskIo>(MakeDiskIo());
    DiskOptions options = Options(folder.path());
    options.io = io;
    auto store = Open(options);
    const int64_t first = io->operations();
    io->FailAt(at, EIO);
    std::string message;
    const bool read = ReadsBack(*store, store->segments().at(0).id, segment, &message);
    if (io->operations() - first < at) break;
    if (read) continue;  // setting the time may fail
    ++failures;
    EXPECT_NE(message.find("Input/output error"), std::string::npos) << message;
    EXPECT_EQ(store->stats().read_failures, 1);
    // The failure is told first, then the segment goes.
    EXPECT_TRUE(WaitUntil([&] { return store->segments().empty(); }));
    EXPECT_EQ(folder.Names().size(), 1U);  // an error is no proof that the file is bad
    // Neither does a look at the folder bring it back: it follows a write and is over when the next
    // one is done.
    const DiskEvent looks = WriteSegment(*store, MakeSegment(random, 10));
    const DiskEvent looked = WriteSegment(*store, MakeSegment(random, 10));
    EXPECT_EQ(store->segments().size(), 2U);
    for (const DiskEvent& written : {looks, looked}) {
      std::filesystem::remove(folder.path() + "/" + SegmentFileName(*written.header));
    }
  }
  EXPECT_GE(failures, 14);
}

TEST(DiskFault, RunningOutOfFileHandlesFailsTheReadButKeepsTheSegment) {
  Random random(34);
  const TemporaryFolder folder;
  auto io = std::make_shared<FaultyDiskIo>(MakeDiskIo());
  DiskOptions options = Options(folder.path());
  options.io = io;
  auto store = Open(options);
  const Segment segment = MakeSegment(random, 200);
  const SegmentId id = WriteSegment(*store, segment).segment;
  io->FailAlways("open", EMFILE);
  EXPECT_FALSE(ReadsBack(*store, id, segment));
  io->Heal();
  EXPECT_TRUE(ReadsBack(*store, id, segment));
}

TEST(DiskFault, BytesThatChangeOnTheWayFromTheDiskNeverArrive) {
  Random random(35);
  const TemporaryFolder folder;
  const Segment segment = MakeSegment(random, 300);
  { WriteSegment(*Open(Options(folder.path())), segment); }
  auto io = std::make_shared<FaultyDiskIo>(MakeDiskIo());
  DiskOptions options = Options(folder.path());
  options.io = io;
  auto store = Open(options);
  io->FlipReads(1234);
  std::string message;
  EXPECT_FALSE(ReadsBack(*store, store->segments().at(0).id, segment, &message));
  EXPECT_NE(message.find(": block 0: the checksum is wrong"), std::string::npos) << message;
}

TEST(DiskFault, ACompletionAfterTheCancelFindsNobody) {
  Random random(36);
  const TemporaryFolder folder;
  auto io = std::make_shared<FaultyDiskIo>(MakeDiskIo());
  DiskOptions options = Options(folder.path());
  options.io = io;
  auto store = Open(options);
  const Segment segment = MakeSegment(random, 300);
  const SegmentId id = WriteSegment(*store, segment).segment;
  std::mutex gate;
  std::unique_lock closed(gate);
  std::atomic<int> waiting = 0;
  io->SetBeforeRead([&] {
    ++waiting;
    const std::lock_guard pass(gate);
  });
  const ReadTicket late = store->Read(id, segment.Parts());
  const auto deadline = Deadline();
  while (waiting == 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  // The disk hangs: neither call waits for it.
  store->CancelRead(late);
  EXPECT_TRUE(store->TakeEvents().empty());
  const ReadTicket next = store->Read(id, {BlockPart(1)});
  closed.unlock();
  const auto events = WaitEvents(*store, 1);
  ASSERT_EQ(events.size(), 1U);
  EXPECT_EQ(events[0].ticket, next);
  EXPECT_EQ(events[0].data, segment.blocks[1]);
  io->SetBeforeRead(nullptr);
}

// As a container's filter does it. Returns false where filters cannot be set.
bool RefuseUring() {
  const auto nr = static_cast<uint32_t>(offsetof(seccomp_data, nr));
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, nr),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {.len = 4, .filter = filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(DiskFault, WhereIoUringIsRefusedPreadTakesItsPlace) {
  Random random(37);
  const TemporaryFolder folder;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (!RefuseUring()) _exit(2);
    auto store = Open(Options(folder.path()));
    const Segment segment = MakeSegment(random, 1000);
    const SegmentId id = WriteSegment(*store, segment).segment;
    _exit(store->backend() == "pread" && ReadsBack(*store, id, segment) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 2) GTEST_SKIP() << "no system call filters here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace fathom
