#include "cache/disk_io_testing.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

namespace fathom {

void FaultyDiskIo::FailAt(int64_t operation, int error) {
  const std::lock_guard lock(mutex_);
  fail_at_ = operation == 0 ? 0 : operations_ + operation;
  error_ = error;
}

void FaultyDiskIo::FailAlways(const std::string& operation, int error) {
  const std::lock_guard lock(mutex_);
  always_[operation] = error;
}

void FaultyDiskIo::Heal() {
  const std::lock_guard lock(mutex_);
  fail_at_ = 0;
  always_.clear();
  short_ = 0;
  flip_ = -1;
  small_folder_.clear();
}

int64_t FaultyDiskIo::operations() const {
  const std::lock_guard lock(mutex_);
  return operations_;
}

void FaultyDiskIo::SetShort(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  short_ = bytes;
}

void FaultyDiskIo::SetCapacity(const std::string& folder, int64_t bytes) {
  const std::lock_guard lock(mutex_);
  small_folder_ = folder;
  capacity_ = bytes;
}

// Holes count as if they were written.
bool FaultyDiskIo::Fits(int file, int64_t end) {
  const std::lock_guard lock(mutex_);
  if (small_folder_.empty()) return true;
  int64_t used = std::max<int64_t>(0, end - inner_->Size(file));
  for (const auto& entry : std::filesystem::directory_iterator(small_folder_)) {
    std::error_code gone;
    const auto bytes = entry.file_size(gone);
    if (!gone) used += static_cast<int64_t>(bytes);
  }
  return used <= capacity_;
}

void FaultyDiskIo::FlipReads(int64_t index) {
  const std::lock_guard lock(mutex_);
  flip_ = index;
}

void FaultyDiskIo::SetBeforeRead(std::function<void()> hook) {
  const std::lock_guard lock(mutex_);
  before_read_ = std::move(hook);
}

int FaultyDiskIo::Fault(const std::string& operation) {
  const std::lock_guard lock(mutex_);
  if (++operations_ == fail_at_) return -error_;
  const auto found = always_.find(operation);
  return found == always_.end() ? 0 : -found->second;
}

int64_t FaultyDiskIo::Limit(size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto all = static_cast<int64_t>(bytes);
  return short_ > 0 ? std::min(all, short_) : all;
}

void FaultyDiskIo::StartRead(DiskRead* read) {
  std::function<void()> hook;
  {
    const std::lock_guard lock(mutex_);
    hook = before_read_;
  }
  if (hook) hook();
  if (const int error = Fault("read"); error != 0) {
    read->result = error;
    failed_.push_back(read);
    return;
  }
  read->into = read->into.first(static_cast<size_t>(Limit(read->into.size())));
  inner_->StartRead(read);
}

DiskRead* FaultyDiskIo::FinishRead() {
  if (!failed_.empty()) {
    DiskRead* read = failed_.front();
    failed_.pop_front();
    return read;
  }
  DiskRead* read = inner_->FinishRead();
  const std::lock_guard lock(mutex_);
  if (read != nullptr && flip_ >= 0 && flip_ < read->result) {
    read->into[static_cast<size_t>(flip_)] ^= std::byte{0x10};
  }
  return read;
}

int FaultyDiskIo::OpenForRead(const std::string& path) {
  const int error = Fault("open");
  return error != 0 ? error : inner_->OpenForRead(path);
}

int FaultyDiskIo::OpenNew(const std::string& path) {
  const int error = Fault("create");
  return error != 0 ? error : inner_->OpenNew(path);
}

int64_t FaultyDiskIo::Size(int file) {
  const int error = Fault("size");
  return error != 0 ? error : inner_->Size(file);
}

int64_t FaultyDiskIo::ReadSome(int file, int64_t offset, std::span<std::byte> into) {
  const int error = Fault("read");
  if (error != 0) return error;
  return inner_->ReadSome(file, offset, into.first(static_cast<size_t>(Limit(into.size()))));
}

int64_t FaultyDiskIo::WriteSome(int file, int64_t offset, std::span<const std::byte> from) {
  const int error = Fault("write");
  if (error != 0) return error;
  if (!Fits(file, offset + static_cast<int64_t>(from.size()))) return -ENOSPC;
  return inner_->WriteSome(file, offset, from.first(static_cast<size_t>(Limit(from.size()))));
}

int FaultyDiskIo::Sync(int file) {
  const int error = Fault("sync");
  return error != 0 ? error : inner_->Sync(file);
}

int FaultyDiskIo::SetModified(int file, int64_t nanoseconds) {
  const int error = Fault("time");
  return error != 0 ? error : inner_->SetModified(file, nanoseconds);
}

int FaultyDiskIo::Rename(const std::string& from, const std::string& to) {
  const int error = Fault("rename");
  return error != 0 ? error : inner_->Rename(from, to);
}

int FaultyDiskIo::Remove(const std::string& path) {
  const int error = Fault("remove");
  return error != 0 ? error : inner_->Remove(path);
}

int FaultyDiskIo::SyncFolder(const std::string& path) {
  const int error = Fault("folder");
  return error != 0 ? error : inner_->SyncFolder(path);
}

}  // namespace fathom
