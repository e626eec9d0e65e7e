// The worker's writes: one temporary file for each open SegmentWriter, synced and renamed at its
// commit. Worker thread only.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "cache/disk_keeper.h"
#include "cache/disk_state.h"

namespace fathom {

class DiskOutput {
 public:
  DiskOutput(DiskState& state, DiskKeeper& keeper) : state_(state), keeper_(keeper) {}
  ~DiskOutput();  // removes open temporaries
  DiskOutput(const DiskOutput&) = delete;
  DiskOutput& operator=(const DiskOutput&) = delete;

  bool HasWork() const;  // with the state's mutex held
  // Writes one part, or commits, or cleans up after one writer; the oldest with work goes first.
  void Step();

 private:
  struct File {
    std::string name;  // final
    std::string path;  // temporary
    int handle = -1;
    int64_t planned = 0;  // header and blocks
    int64_t end = 0;      // of what is written
    int64_t unsynced = 0;
  };

  Status Begin(WriteId id, WriteJob& job);
  // Repeats `operation` (0 or -errno) while the disk is full and older segments can make room for
  // `bytes`.
  Status WithRoom(const std::string& name, int64_t bytes, std::string_view what,
                  const std::function<int()>& operation);
  Status SyncParts(File& file);
  Status WritePart(File& file, SegmentHeader& header, std::span<const std::byte> part);
  Status Commit(WriteId id, WriteJob& job);
  void Discard(WriteId id);  // closes and removes the temporary, if any
  void Erase(WriteId id);    // the writer is done
  int64_t PendingBytes() const;

  DiskState& state_;
  DiskKeeper& keeper_;
  std::map<WriteId, File> files_;
};

}  // namespace fathom
