#include "cache/disk_io_posix.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace fathom {
namespace {

int64_t OrError(int64_t result) {
  return result < 0 ? -errno : result;
}
int StatusOf(int result) {
  return result < 0 ? -errno : 0;
}

}  // namespace

int64_t DiskIo::ReadAll(int file, int64_t offset, std::span<std::byte> into) {
  size_t done = 0;
  while (done < into.size()) {
    const int64_t got = ReadSome(file, offset + static_cast<int64_t>(done), into.subspan(done));
    if (got == -EINTR) continue;
    if (got < 0) return got;
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return static_cast<int64_t>(done);
}

int DiskIo::WriteAll(int file, int64_t offset, std::span<const std::byte> from) {
  size_t done = 0;
  while (done < from.size()) {
    const int64_t put = WriteSome(file, offset + static_cast<int64_t>(done), from.subspan(done));
    if (put == -EINTR) continue;
    if (put < 0) return static_cast<int>(put);
    if (put == 0) return -EIO;  // a device that takes nothing would keep us here for ever
    done += static_cast<size_t>(put);
  }
  return 0;
}

void PosixDiskIo::StartRead(DiskRead* read) {
  read->result = ReadSome(read->file, read->offset, read->into);
  finished_.push_back(read);
}

DiskRead* PosixDiskIo::FinishRead() {
  if (finished_.empty()) return nullptr;
  DiskRead* read = finished_.front();
  finished_.pop_front();
  return read;
}

int PosixDiskIo::OpenForRead(const std::string& path) {
  // O_NONBLOCK: opening a pipe that someone put into the folder must not wait for its writer.
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (file < 0) return -errno;
  struct stat status {};
  int error = fstat(file, &status) < 0 ? errno : 0;
  if (error == 0 && !S_ISREG(status.st_mode)) error = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
  if (error == 0) return file;
  close(file);
  return -error;
}

int PosixDiskIo::OpenNew(const std::string& path) {
  while (true) {
    const int file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) return -errno;
    // Before it is locked it looks stale. Whoever takes it for that holds the lock while removing
    // it, so it is waited for; what has lost its name is made anew. Where locks are not supported,
    // stale temporaries are known by their age alone.
    while (flock(file, LOCK_EX) != 0 && errno == EINTR) {
    }
    struct stat status {};
    if (fstat(file, &status) != 0 || status.st_nlink > 0) return file;
    close(file);
  }
}

int64_t PosixDiskIo::Size(int file) {
  struct stat status {};
  return fstat(file, &status) < 0 ? -errno : static_cast<int64_t>(status.st_size);
}

int64_t PosixDiskIo::ReadSome(int file, int64_t offset, std::span<std::byte> into) {
  return OrError(pread(file, into.data(), into.size(), offset));
}

int64_t PosixDiskIo::WriteSome(int file, int64_t offset, std::span<const std::byte> from) {
  return OrError(pwrite(file, from.data(), from.size(), offset));
}

int PosixDiskIo::Sync(int file) {
  return StatusOf(fsync(file));
}

int PosixDiskIo::SetModified(int file, int64_t nanoseconds) {
  const timespec time = {.tv_sec = nanoseconds / 1'000'000'000,
                         .tv_nsec = nanoseconds % 1'000'000'000};
  const timespec times[2] = {{.tv_sec = 0, .tv_nsec = UTIME_OMIT}, time};
  return StatusOf(futimens(file, times));
}

void PosixDiskIo::Close(int file) {
  close(file);
}

int PosixDiskIo::Rename(const std::string& from, const std::string& to) {
  return StatusOf(std::rename(from.c_str(), to.c_str()));
}

int PosixDiskIo::Remove(const std::string& path) {
  return StatusOf(unlink(path.c_str()));
}

int PosixDiskIo::SyncFolder(const std::string& path) {
  const int folder = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return -errno;
  const int result = StatusOf(fsync(folder));
  close(folder);
  return result;
}

std::unique_ptr<DiskIo> MakePosixDiskIo() {
  return std::make_unique<PosixDiskIo>();
}

std::unique_ptr<DiskIo> MakeDiskIo() {
  Expected<std::unique_ptr<DiskIo>> uring = MakeUringDiskIo();
  return uring ? std::move(*uring) : MakePosixDiskIo();
}

}  // namespace fathom
