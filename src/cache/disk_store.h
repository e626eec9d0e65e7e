// DiskStore: the disk tier as pure storage. A folder of immutable segment files (disk_segment.h),
// written and read by one worker thread; the engine thread only queues work and takes events, and
// never waits for a disk.
//
//   FATHOM_ASSIGN(auto store, DiskStore::Open({.path = "/kv", .max_bytes = 100 << 30,
//                                              .fingerprint = fingerprint,
//                                              .block_tokens = 256, .block_bytes = 1'002'240}));
//   store->SetWake([&] { engine.Wake(); });
//   for (const SegmentInfo& segment : store->segments()) index.Add(segment);   // parents first
//
//   auto writer = store->Write(header);             // header.tokens, .bundles: disk_segment.h
//   for (auto& block : blocks) writer->Append(std::move(block));
//   for (auto& bundle : bundles) writer->Append(std::move(bundle));
//   writer->Commit();                               // later: kWritten or kWriteFailed
//
//   ReadTicket ticket = store->Read(segment, {BlockPart(0), BlockPart(1), BundlePart(0)});
//   for (DiskEvent& event : store->TakeEvents()) ...  // kPart, kPart, kPart or kReadFailed
//
// What always holds:
// - A part that arrives has the bytes that were appended: its checksum was verified. Anything else
//   is a kReadFailed that says what is wrong with which part of which file.
// - A file is written under a temporary name, synced and renamed: readers see it whole or not at
//   all. Files never change afterwards, so several processes may share a folder without any lock:
//   the worst that one can do to another is to evict a file, which is a failed read (or none, if
//   the file was already open).
// - A failed write leaves what was there before, and is an event.
//
// Thread safety: Open, the destructor and SetWake on one thread; everything else from any one
// thread at a time (the engine's); SegmentWriter likewise.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cache/disk_segment.h"
#include "core/ids.h"
#include "core/status.h"

namespace fathom {

class DiskIo;

using SegmentId = StrongId<struct SegmentTag, uint64_t>;  // a segment of one open store
using ReadTicket = StrongId<struct ReadTicketTag, uint64_t>;
using WriteId = StrongId<struct WriteTag, uint64_t>;  // one SegmentWriter

struct DiskOptions {
  std::string path;       // created when missing (its parent must exist)
  int64_t max_bytes = 0;  // of segments with this fingerprint; 0: no limit
  DiskFingerprint fingerprint;
  HashAlgorithm algorithm = HashAlgorithm::kXxh3;
  int64_t block_tokens = 0;
  int64_t block_bytes = 0;
  int64_t max_unclaimed_bytes = int64_t{64} << 20;  // read, but not yet taken: then reading pauses
  // A finished write looks what other processes have done to the folder, at most this often.
  std::chrono::milliseconds rescan_interval{1000};
  // A disk that was full is tried again after so long: until then what the folder held is the
  // limit, and nothing at all is written where nothing of it could be evicted.
  std::chrono::milliseconds full_pause{30'000};
  std::shared_ptr<DiskIo> io;  // null: io_uring, or pread where it is refused
};

struct SegmentInfo {
  SegmentId id;
  std::string name;  // of the file, within the folder
  std::shared_ptr<const SegmentHeader> header;
};

// A file in the folder that this store does not use, and why.
struct RefusedFile {
  std::string name;
  std::string reason;    // "x.fkv: kv_cache_dtype is "bf16" in the file and "fp8" here"
  bool damaged = false;  // ours and corrupt: it now ends in ".bad"; otherwise left as it was
};

struct DiskEvent {
  enum class Kind : uint8_t {
    kPart,         // ticket, segment, part, data, last
    kReadFailed,   // ticket, segment, part, message; nothing more comes for this ticket
    kWritten,      // write, segment, header; a segment of the same name that it replaced follows
                   // as kRemoved
    kWriteFailed,  // write, message; the writer takes and drops whatever else is appended
    kFound,        // segment, header: another process has added it
    kRemoved,      // segment, message: evicted, vanished, replaced or unreadable
    kDiskFull,     // message: old segments make room on a full disk from now on; told once
  };
  Kind kind = Kind::kPart;
  ReadTicket ticket;
  WriteId write;
  SegmentId segment;
  SegmentPart part;
  bool last = false;            // the ticket's last part
  bool disk_full = false;       // kWriteFailed: because the disk is full
  std::vector<std::byte> data;  // the part
  std::shared_ptr<const SegmentHeader> header;
  std::string message;  // a sentence naming file and part
};

struct DiskStats {
  int64_t bytes_read = 0, bytes_written = 0;  // payload, since Open
  int64_t segments_written = 0;
  int64_t read_failures = 0, write_failures = 0;
  int64_t evicted = 0, refused = 0;
  int64_t disk_full = 0;     // operations that the full disk refused, also where room was then made
  int64_t write_pauses = 0;  // times that no room could be made: see DiskOptions::full_pause
  int64_t segments = 0, bytes_on_disk = 0;  // now: with this fingerprint
};

class DiskWorker;
class DiskState;  // what the engine's side and the worker share

// Appends the parts of one segment in order: every block, then every bundle of the header. Holds no
// open file itself; outliving its store is harmless. Destroyed before Commit, it abandons.
class SegmentWriter {
 public:
  SegmentWriter(std::shared_ptr<DiskState> state, WriteId id, const SegmentHeader& header,
                int64_t block_bytes);
  SegmentWriter(const SegmentWriter&) = delete;
  SegmentWriter& operator=(const SegmentWriter&) = delete;
  ~SegmentWriter();

  WriteId id() const { return id_; }
  // A block has block_bytes bytes, a bundle any positive number.
  void Append(std::vector<std::byte> part);
  int64_t parts_left() const { return parts_left_; }
  // Appended and not yet written. Callers pause above a bound of their own.
  int64_t backlog_bytes() const;
  bool failed() const;  // kWriteFailed has been or will be taken

  void Commit();   // all parts are appended; the writer takes nothing more
  void Abandon();  // the temporary file goes; no event

 private:
  std::shared_ptr<DiskState> state_;
  WriteId id_;
  int64_t blocks_left_;
  int64_t parts_left_;
  int64_t block_bytes_;
  bool done_ = false;
};

class DiskStore {
 public:
  // Scans the folder, reading headers only (the one call that waits for the disk). Errors: the
  // folder cannot be made, read or written (named; a file is written and removed to see); a single
  // bad file and a full disk are none.
  static Expected<std::unique_ptr<DiskStore>> Open(DiskOptions options);
  // Finishes the part in hand, drops reads and all writers that are not on disk yet (Flush first).
  ~DiskStore();
  DiskStore(const DiskStore&) = delete;
  DiskStore& operator=(const DiskStore&) = delete;

  // Usable now, parents before children; with all events applied, also those not yet taken.
  // A segment whose parent is missing comes last: it can be resumed from only when the tokens
  // before it are in memory anyway.
  std::vector<SegmentInfo> segments() const;
  std::vector<RefusedFile> refused() const;

  // The fields above the gap in SegmentHeader; the others are filled in. Their invariants are
  // checked (FATHOM_CHECK).
  std::unique_ptr<SegmentWriter> Write(SegmentHeader header);
  int64_t write_backlog_bytes() const;  // of all writers
  // The disk is full and nothing can be evicted: what is written now fails without a try.
  bool write_paused() const;

  // Parts arrive in this order, tickets in the order of their calls. An unknown segment (removed
  // meanwhile) or part is a kReadFailed like any other.
  ReadTicket Read(SegmentId segment, std::vector<SegmentPart> parts);
  // No event of this ticket is taken after this returns. Unknown or finished tickets are ignored.
  void CancelRead(ReadTicket ticket);
  // Marks a segment as used without reading it (its rows were found in memory).
  void Touch(SegmentId segment);

  // Everything since the last call, in order. Never blocks.
  std::vector<DiskEvent> TakeEvents();
  // Called on the worker's thread, with no lock of the store's held, when there are events after
  // there were none (until the destructor has returned). When SetWake returns, an earlier function
  // is not and will not be running: do not call it while holding what that function waits for.
  void SetWake(std::function<void()> wake);

  // Waits until every committed writer is on disk or has failed; false: the deadline passed first.
  bool Flush(std::chrono::steady_clock::time_point deadline);

  DiskStats stats() const;
  std::string_view backend() const;  // "io_uring" or "pread"

 private:
  DiskStore(std::shared_ptr<DiskState> state, std::unique_ptr<DiskWorker> worker);
  std::shared_ptr<DiskState> state_;
  std::unique_ptr<DiskWorker> worker_;
};

}  // namespace fathom
