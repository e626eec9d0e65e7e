// What the disk tier asks of the operating system, small enough that a test can stand in for it
// and fail any single operation. Results are 0 or a count, or -errno.
//
// Reads of parts are queued (StartRead) and collected (FinishRead), so that io_uring keeps several
// in flight; the pread backend does the same one at a time. Everything else is synchronous: it runs
// on the store's worker thread. Used by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/status.h"

namespace fathom {

struct DiskRead {
  int file = -1;
  int64_t offset = 0;
  std::span<std::byte> into;  // must live until the read is finished
  int64_t result = 0;         // bytes, possibly fewer than asked (0 at the end), or -errno
};

class DiskIo {
 public:
  virtual ~DiskIo() = default;
  virtual std::string_view name() const = 0;

  virtual int read_depth() const = 0;  // reads that make sense in flight
  virtual void StartRead(DiskRead* read) = 0;
  // Waits for any started read to finish; null when none is started.
  virtual DiskRead* FinishRead() = 0;

  virtual int OpenForRead(const std::string& path) = 0;  // a regular file, no link; -ELOOP, ...
  // A new file (mode 0600), locked (flock) as long as it is open: see ForEachStaleTemporary.
  virtual int OpenNew(const std::string& path) = 0;
  virtual int64_t Size(int file) = 0;
  virtual int64_t ReadSome(int file, int64_t offset, std::span<std::byte> into) = 0;
  virtual int64_t WriteSome(int file, int64_t offset, std::span<const std::byte> from) = 0;
  virtual int Sync(int file) = 0;
  virtual int SetModified(int file, int64_t nanoseconds) = 0;
  virtual void Close(int file) = 0;
  virtual int Rename(const std::string& from, const std::string& to) = 0;
  virtual int Remove(const std::string& path) = 0;
  virtual int SyncFolder(const std::string& path) = 0;

  // Repeat until everything is done or an error; fewer bytes only at the end of the file.
  int64_t ReadAll(int file, int64_t offset, std::span<std::byte> into);
  int WriteAll(int file, int64_t offset, std::span<const std::byte> from);
};

std::unique_ptr<DiskIo> MakePosixDiskIo();
// Fails where the kernel, a container's seccomp filter or gVisor refuses io_uring.
Expected<std::unique_ptr<DiskIo>> MakeUringDiskIo();
// io_uring, else pread.
std::unique_ptr<DiskIo> MakeDiskIo();

}  // namespace fathom
