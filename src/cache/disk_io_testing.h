// A DiskIo for tests: another one with faults in it. Settings may be changed from any thread.
//
//   auto io = std::make_shared<FaultyDiskIo>(MakePosixDiskIo());
//   io->FailAt(7, ENOSPC);        // the seventh operation from now on, and none after it
//   io->FailAlways("sync", EIO);  // every operation of a kind
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "cache/disk_io.h"

namespace fathom {

class FaultyDiskIo final : public DiskIo {
 public:
  explicit FaultyDiskIo(std::unique_ptr<DiskIo> inner) : inner_(std::move(inner)) {}

  // Operations: open, create, size, read, write, sync, time, rename, remove, folder.
  void FailAt(int64_t operation, int error);  // 1: the next one; 0: none
  void FailAlways(const std::string& operation, int error);
  void Heal();
  int64_t operations() const;  // so far
  // Reads and writes do at most this many bytes at a time; 0: no limit.
  void SetShort(int64_t bytes);
  // A disk of so many bytes, all of them for the files in `folder`: writes beyond them find it
  // full.
  void SetCapacity(const std::string& folder, int64_t bytes);
  // Flips a bit of byte `index` of every following read of a part.
  void FlipReads(int64_t index);
  // Called (on the worker) before each read is started: lets a test hold the disk.
  void SetBeforeRead(std::function<void()> hook);

  std::string_view name() const override { return "faulty"; }
  int read_depth() const override { return inner_->read_depth(); }
  void StartRead(DiskRead* read) override;
  DiskRead* FinishRead() override;
  int OpenForRead(const std::string& path) override;
  int OpenNew(const std::string& path) override;
  int64_t Size(int file) override;
  int64_t ReadSome(int file, int64_t offset, std::span<std::byte> into) override;
  int64_t WriteSome(int file, int64_t offset, std::span<const std::byte> from) override;
  int Sync(int file) override;
  int SetModified(int file, int64_t nanoseconds) override;
  void Close(int file) override { inner_->Close(file); }
  int Rename(const std::string& from, const std::string& to) override;
  int Remove(const std::string& path) override;
  int SyncFolder(const std::string& path) override;

 private:
  int Fault(const std::string& operation);  // 0 or -errno
  int64_t Limit(size_t bytes) const;
  bool Fits(int file, int64_t end);

  const std::unique_ptr<DiskIo> inner_;
  mutable std::mutex mutex_;
  int64_t operations_ = 0;
  int64_t fail_at_ = 0;
  int error_ = 0;
  std::map<std::string, int> always_;
  int64_t short_ = 0;
  int64_t flip_ = -1;
  std::string small_folder_;  // empty: no capacity
  int64_t capacity_ = 0;
  std::function<void()> before_read_;
  std::deque<DiskRead*> failed_;
};

}  // namespace fathom
