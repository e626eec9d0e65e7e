// The pread/pwrite backend, which the io_uring one extends.
#pragma once

#include <deque>

#include "cache/disk_io.h"

namespace fathom {

class PosixDiskIo : public DiskIo {
 public:
  std::string_view name() const override { return "pread"; }
  int read_depth() const override { return 1; }
  void StartRead(DiskRead* read) override;
  DiskRead* FinishRead() override;

  int OpenForRead(const std::string& path) override;
  int OpenNew(const std::string& path) override;
  int64_t Size(int file) override;
  int64_t ReadSome(int file, int64_t offset, std::span<std::byte> into) override;
  int64_t WriteSome(int file, int64_t offset, std::span<const std::byte> from) override;
  int Sync(int file) override;
  int SetModified(int file, int64_t nanoseconds) override;
  void Close(int file) override;
  int Rename(const std::string& from, const std::string& to) override;
  int Remove(const std::string& path) override;
  int SyncFolder(const std::string& path) override;

 private:
  std::deque<DiskRead*> finished_;
};

}  // namespace fathom
