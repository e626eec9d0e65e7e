// The worker's housekeeping: which files the folder holds, room for new ones, damaged ones aside.
// Worker thread only (and Open).
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>

#include "cache/disk_folder.h"
#include "cache/disk_state.h"

namespace fathom {

class DiskKeeper {
 public:
  explicit DiskKeeper(DiskState& state) : state_(state) {}

  // Brings the catalog in line with the folder: files that are new are read (kFound, except during
  // Open), those that are gone are removed (kRemoved).
  Status Scan(bool opening);
  void ScanIfDue();  // after rescan_interval

  // Makes `bytes` more fit under the limit by removing damaged files, then least recently used
  // leaves. kResourceExhausted: that is not enough; kUnavailable: a file could not be removed.
  // `pending` are bytes of temporaries being written.
  Status MakeRoom(int64_t bytes, int64_t pending);

  // After the file system said that it is full: what is held now is the limit for full_pause, and
  // room is made under it. Where nothing can be evicted, writing pauses. Errors as of MakeRoom.
  Status MakeRoomOnFullDisk(int64_t bytes, int64_t pending);
  Status PauseWriting(std::string_view why);  // always fails
  bool disk_is_full() const;                  // not long ago

  // Publishes a file that has just got its name. A segment of that name before is replaced.
  void Add(const std::string& name, SegmentHeader header, WriteId write);
  // What becomes of a segment that could not be read: put aside as NAME.bad; left where it is and
  // not offered again; looked at again by the next scan (there is another file by now); or nothing
  // (the failure was this process's: out of file handles).
  enum class Fate : uint8_t { kPutAside, kShun, kLookAgain, kKeep };
  void Withdraw(SegmentId segment, const std::string& reason, Fate fate);
  void Forget(const std::string& name, const std::string& reason);  // if known

  void Touch(SegmentId segment);  // opens the file to set its time
  void Used(SegmentId segment, int file);

  std::string Path(const std::string& name) const { return state_.options.path + "/" + name; }

 private:
  struct Seen {
    int64_t bytes = 0, modified_ns = 0;
    bool operator==(const Seen&) const = default;
  };
  // Reads a file that is not in the catalog. Refusals are listed once.
  void Examine(const FolderFile& file, bool opening);
  void Refuse(const FolderFile& file, const Error& error);
  bool PutAside(const std::string& name, int64_t bytes);
  int64_t Limit() const;
  int64_t BadBytes() const;
  SegmentId NewId();

  DiskState& state_;
  std::set<std::string> shunned_;        // unreadable at the first try
  std::map<std::string, Seen> refused_;  // as they were when they were refused
  std::map<std::string, int64_t> bad_;   // damaged files in the folder: bytes
  std::chrono::steady_clock::time_point scanned_{};
  int64_t full_limit_ = 0;  // what was held when the disk was full; of use until full_until_
  std::chrono::steady_clock::time_point full_until_{};
  bool full_named_ = false;
};

}  // namespace fathom
