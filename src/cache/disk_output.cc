#include "cache/disk_output.h"

#include <algorithm>
#include <cerrno>

namespace fathom {
namespace {

// Written back in steps of this size: one sync of a gigabyte at the end would hold up reads for
// seconds.
constexpr int64_t kSyncBytes = int64_t{16} << 20;

int64_t AlignUp(int64_t bytes) {
  return (bytes + kSegmentAlignment - 1) / kSegmentAlignment * kSegmentAlignment;
}

// Each time at least as much is evicted as is to be written: where that does not help, somebody
// else takes what becomes free.
constexpr int kMostRounds = 4;

bool IsFull(int error) {
  return error == -ENOSPC || error == -EDQUOT;
}

Status Check(int error, std::string_view name, std::string_view what) {
  if (error == 0) return {};
  return Fail(IsFull(error) ? Code::kResourceExhausted : Code::kUnavailable, "{}: {}: {}", name,
              what, ErrnoText(error));
}

}  // namespace

DiskOutput::~DiskOutput() {
  while (!files_.empty()) Discard(files_.begin()->first);
}

bool DiskOutput::HasWork() const {
  return std::any_of(state_.writes.begin(), state_.writes.end(),
                     [](const auto& entry) { return entry.second.HasWork(); });
}

int64_t DiskOutput::PendingBytes() const {
  int64_t bytes = 0;
  for (const auto& [id, file] : files_) bytes += file.end;
  return bytes;
}

Status DiskOutput::WithRoom(const std::string& name, int64_t bytes, std::string_view what,
                            const std::function<int()>& operation) {
  for (int round = 0;; ++round) {
    const int error = operation();
    if (!IsFull(error)) return Check(error, name, what);
    const Status room = round < kMostRounds ? keeper_.MakeRoomOnFullDisk(bytes, PendingBytes())
                                            : keeper_.PauseWriting("what was evicted made no room");
    if (!room) {
      return Fail(Code::kResourceExhausted, "{}: {}: {}: {}", name, what, ErrnoText(error),
                  room.error().message);
    }
  }
}

// What a failed sync has lost stays lost, so it is not repeated: room is made for the next segment.
Status DiskOutput::SyncParts(File& file) {
  const int error = state_.options.io->Sync(file.handle);
  if (IsFull(error)) {
    (void)keeper_.MakeRoomOnFullDisk(std::max(file.unsynced, kSegmentAlignment), PendingBytes());
  }
  FATHOM_TRY(Check(error, file.name, "cannot be written"));
  file.unsynced = 0;
  return {};
}

Status DiskOutput::Begin(WriteId id, WriteJob& job) {
  SegmentHeader& header = job.header;
  header.created_us = NowNanoseconds() / 1000;
  NameBlocks(header);
  File file;
  file.name = SegmentFileName(header);
  file.end = SegmentHeaderBytes(header);
  const auto tokens = static_cast<int64_t>(header.tokens.size());
  const int64_t blocks = (tokens + header.block_tokens - 1) / header.block_tokens;
  file.planned = AlignUp(file.end) + blocks * AlignUp(header.block_bytes);
  const bool paused = [&] {
    const std::lock_guard lock(state_.mutex);
    return std::chrono::steady_clock::now() < state_.paused_until;
  }();
  if (paused) {
    return Fail(Code::kResourceExhausted,
                "{}: not written: the disk was full just now, and nothing could be evicted",
                file.name);
  }
  if (const Status room = keeper_.MakeRoom(file.planned, PendingBytes()); !room) {
    return Fail(room.error().code, "{}: cannot be written: {}", file.name, room.error().message);
  }
  file.path = keeper_.Path(TemporaryName(file.name));
  FATHOM_TRY(WithRoom(file.name, file.planned, "cannot be created", [&] {
    file.handle = state_.options.io->OpenNew(file.path);
    return std::min(file.handle, 0);
  }));
  files_.emplace(id, std::move(file));
  return {};
}

Status DiskOutput::WritePart(File& file, SegmentHeader& header, std::span<const std::byte> part) {
  DiskIo& io = *state_.options.io;
  const auto bytes = static_cast<int64_t>(part.size());
  if (const Status room = keeper_.MakeRoom(AlignUp(file.end) - file.end + bytes, PendingBytes());
      !room) {
    return Fail(room.error().code, "{}: cannot be written: {}", file.name, room.error().message);
  }
  SegmentPartEntry entry{
      .offset = AlignUp(file.end), .bytes = bytes, .checksum = PartChecksum(part)};
  // On a full disk for all that is still to come: nothing is evicted for what will not fit anyway.
  const int64_t rest = std::max(AlignUp(bytes), file.planned - file.end);
  FATHOM_TRY(WithRoom(file.name, rest, "cannot be written",
                      [&] { return io.WriteAll(file.handle, entry.offset, part); }));
  file.end = entry.offset + bytes;
  file.unsynced += bytes;
  if (file.unsynced >= kSyncBytes) FATHOM_TRY(SyncParts(file));
  const auto blocks = static_cast<int64_t>(header.blocks.size());
  entry.at = header.begin + blocks * header.block_tokens;
  if (entry.at < header.end()) {
    header.blocks.push_back(entry);
  } else {
    entry.at = header.bundles[header.bundle_parts.size()].at;
    header.bundle_parts.push_back(entry);
  }
  return {};
}

Status DiskOutput::Commit(WriteId id, WriteJob& job) {
  DiskIo& io = *state_.options.io;
  File& file = files_.at(id);
  job.header.file_bytes = file.end;
  const std::vector<std::byte> bytes = EncodeSegmentHeader(job.header);
  const int64_t room = AlignUp(static_cast<int64_t>(bytes.size()));
  FATHOM_TRY(WithRoom(file.name, room, "cannot be written",
                      [&] { return io.WriteAll(file.handle, 0, bytes); }));
  FATHOM_TRY(SyncParts(file));
  (void)io.SetModified(file.handle, NowNanoseconds());  // finer than the clock of the file system
  const std::string path = keeper_.Path(file.name);
  FATHOM_TRY(WithRoom(file.name, kSegmentAlignment, "cannot be renamed",
                      [&] { return io.Rename(file.path, path); }));
  if (const int error = io.SyncFolder(state_.options.path); error != 0) {
    // Whether the name would survive a power cut is unknown: rather no file than one that may go.
    (void)io.Remove(path);
    keeper_.Forget(file.name, "lost: its folder cannot be synced");
    if (IsFull(error)) (void)keeper_.MakeRoomOnFullDisk(kSegmentAlignment, PendingBytes());
    return Check(error, file.name, "its folder cannot be synced");
  }
  const std::string name = file.name;
  io.Close(file.handle);
  files_.erase(id);
  {
    const std::lock_guard lock(state_.mutex);
    state_.catalog.Unwant(job.header);  // from here on the segment itself holds its parent
    job.wanted = false;
  }
  keeper_.Add(name, std::move(job.header), id);
  return {};
}

void DiskOutput::Discard(WriteId id) {
  const auto found = files_.find(id);
  if (found == files_.end()) return;
  state_.options.io->Close(found->second.handle);
  (void)state_.options.io->Remove(found->second.path);
  files_.erase(found);
}

void DiskOutput::Erase(WriteId id) {
  const std::lock_guard lock(state_.mutex);
  const auto found = state_.writes.find(id);
  if (found->second.wanted) state_.catalog.Unwant(found->second.header);
  state_.writes.erase(found);
  state_.flushed.notify_all();
}

void DiskOutput::Step() {
  WriteId id;
  WriteJob* job = nullptr;  // stays where it is: only this thread erases
  std::vector<std::byte> part;
  bool over = false;
  {
    const std::lock_guard lock(state_.mutex);
    const auto found = std::find_if(state_.writes.begin(), state_.writes.end(),
                                    [](const auto& entry) { return entry.second.HasWork(); });
    if (found == state_.writes.end()) return;
    id = found->first;
    job = &found->second;
    over = job->abandoned || job->failed;
    if (!over && !job->parts.empty()) {
      part = std::move(job->parts.front());
      job->parts.pop_front();
    }
  }
  if (over) {
    Discard(id);
    Erase(id);
    return;
  }
  const bool commits = part.empty();
  Status status;
  if (!files_.contains(id)) status = Begin(id, *job);
  if (status) status = commits ? Commit(id, *job) : WritePart(files_.at(id), job->header, part);
  if (!status) {
    Discard(id);
    const std::lock_guard lock(state_.mutex);
    const bool full = status.error().code == Code::kResourceExhausted && keeper_.disk_is_full();
    if (!job->abandoned) state_.FailWrite(id, *job, status.error().message, full);
    return;
  }
  if (commits) {
    Erase(id);
    keeper_.ScanIfDue();
    return;
  }
  const std::lock_guard lock(state_.mutex);
  state_.stats.bytes_written += static_cast<int64_t>(part.size());
  if (!job->abandoned) job->backlog_bytes -= static_cast<int64_t>(part.size());
}

}  // namespace fathom
