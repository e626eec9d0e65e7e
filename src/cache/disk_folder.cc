#include "cache/disk_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <system_error>

namespace fathom {
namespace {

constexpr int64_t kStaleNanoseconds = int64_t{24} * 3600 * 1'000'000'000;

std::optional<FolderFile::Kind> KindOf(std::string_view name) {
  const std::string bad = std::string(kSegmentSuffix) + std::string(kBadSuffix);
  if (name.ends_with(kSegmentSuffix)) return FolderFile::Kind::kSegment;
  if (name.ends_with(bad)) return FolderFile::Kind::kBad;
  if (name.ends_with(kTemporarySuffix) &&
      name.find(std::string(kSegmentSuffix) + ".") != std::string_view::npos) {
    return FolderFile::Kind::kTemporary;
  }
  return std::nullopt;
}

// Closes at the end of a scope.
class OpenFile {
 public:
  OpenFile(DiskIo& io, int file) : io_(io), file_(file) {}
  ~OpenFile() { io_.Close(file_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  int operator*() const { return file_; }

 private:
  DiskIo& io_;
  int file_;
};

void TakeIfStale(const std::string& path, const FolderFile& file,
                 const std::function<void(const FolderFile&)>& take) {
  const int handle = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (handle < 0) return;
  const bool locked = flock(handle, LOCK_EX | LOCK_NB) == 0;
  const bool held = !locked && errno == EWOULDBLOCK;
  // One that another process has removed meanwhile may have a successor of the same name.
  struct stat status {};
  const bool there = fstat(handle, &status) == 0 && status.st_nlink > 0;
  const bool old = !held && NowNanoseconds() - file.modified_ns > kStaleNanoseconds;
  if (there && (locked || old)) take(file);
  close(handle);
}

}  // namespace

std::string ErrnoText(int64_t negative_errno) {
  return std::generic_category().message(static_cast<int>(-negative_errno));
}

int64_t NowNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string_view HashAlgorithmName(HashAlgorithm algorithm) {
  return algorithm == HashAlgorithm::kSha256 ? "sha256" : "xxh3";
}

Expected<std::vector<FolderFile>> ListFolder(const std::string& path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(path.c_str()), &closedir);
  if (folder == nullptr) {
    const int error = errno;
    const Code code = error == ENOENT ? Code::kNotFound : Code::kInvalidArgument;
    return Fail(code, "{}: {}", path, ErrnoText(-error));
  }
  std::vector<FolderFile> files;
  while (true) {
    errno = 0;
    const dirent* entry = readdir(folder.get());
    if (entry == nullptr) {
      if (errno != 0) return Fail(Code::kInvalidArgument, "{}: {}", path, ErrnoText(-errno));
      break;
    }
    FolderFile file;
    file.name = entry->d_name;
    const auto kind = KindOf(file.name);
    if (!kind) continue;
    file.kind = *kind;
    struct stat status {};
    if (fstatat(dirfd(folder.get()), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    file.regular = S_ISREG(status.st_mode);
    file.bytes = status.st_size;
    file.modified_ns = int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
    files.push_back(std::move(file));
  }
  std::sort(files.begin(), files.end(),
            [](const FolderFile& a, const FolderFile& b) { return a.name < b.name; });
  return files;
}

Expected<SegmentHeader> ReadSegmentHeader(DiskIo& io, const std::string& folder,
                                          const std::string& name) {
  const int handle = io.OpenForRead(folder + "/" + name);
  if (handle == -ENOENT) return Fail(Code::kNotFound, "{}: vanished", name);
  if (handle == -ELOOP || handle == -EISDIR || handle == -EINVAL) {
    return Fail(Code::kInvalidArgument, "{}: is no regular file", name);
  }
  const auto refused = [&](int64_t error) {
    return Fail(Code::kUnavailable, "{}: cannot be read: {}", name, ErrnoText(error));
  };
  if (handle < 0) return refused(handle);
  const OpenFile file(io, handle);
  const int64_t size = io.Size(*file);
  if (size < 0) return refused(size);

  // Most headers of short prompts fit the first page.
  std::vector<std::byte> bytes(static_cast<size_t>(std::min(size, kSegmentAlignment)));
  int64_t got = io.ReadAll(*file, 0, bytes);
  if (got < 0) return refused(got);
  if (got < static_cast<int64_t>(bytes.size())) {
    return Fail(Code::kDataLoss, "{}: truncated while it was read", name);
  }
  FATHOM_ASSIGN(const int64_t length, SegmentHeaderLength(bytes, size, name));
  if (length > got) {
    bytes.resize(static_cast<size_t>(length));
    const int64_t more = io.ReadAll(*file, got, std::span(bytes).subspan(static_cast<size_t>(got)));
    if (more < 0) return refused(more);
    if (got + more < length) {
      return Fail(Code::kDataLoss, "{}: truncated while it was read", name);
    }
  }
  FATHOM_ASSIGN(SegmentHeader header, ParseSegmentHeader(bytes, size, name));
  const std::string own_name = SegmentFileName(header);
  if (own_name != name) {
    return Fail(Code::kInvalidArgument, "{}: was renamed, its contents' name is {}", name,
                own_name);
  }
  return header;
}

Status CheckFormat(const SegmentHeader& header, const SegmentFormat& own, std::string_view origin) {
  const auto differs = [&](std::string_view what, const auto& there, const auto& here) {
    return Fail(Code::kInvalidArgument, "{}: {} is {} in the file and {} here", origin, what, there,
                here);
  };
  if (header.fingerprint.hash != own.fingerprint->hash) {
    return Fail(Code::kInvalidArgument, "{}: {}", origin,
                FingerprintDifference(header.fingerprint.json, own.fingerprint->json));
  }
  if (header.algorithm != own.algorithm) {
    return differs("the hash of block names", HashAlgorithmName(header.algorithm),
                   HashAlgorithmName(own.algorithm));
  }
  if (header.block_tokens != own.block_tokens) {
    return differs("block_tokens", header.block_tokens, own.block_tokens);
  }
  if (header.block_bytes != own.block_bytes) {
    return differs("block_bytes", header.block_bytes, own.block_bytes);
  }
  return {};
}

std::vector<std::string> VerifyParts(DiskIo& io, const std::string& folder, const std::string& name,
                                     const SegmentHeader& header) {
  const int handle = io.OpenForRead(folder + "/" + name);
  if (handle < 0) return {fmt::format("{}: cannot be read: {}", name, ErrnoText(handle))};
  const OpenFile file(io, handle);
  std::vector<std::string> bad;
  std::vector<std::byte> bytes;
  const auto verify = [&](const SegmentPartEntry& entry, SegmentPart part) {
    bytes.resize(static_cast<size_t>(entry.bytes));
    const int64_t got = io.ReadAll(*file, entry.offset, bytes);
    if (got < 0) {
      bad.push_back(fmt::format("{}: {}: {}", name, PartName(part), ErrnoText(got)));
    } else if (got < entry.bytes) {
      bad.push_back(fmt::format("{}: {}: truncated", name, PartName(part)));
    } else if (PartChecksum(bytes) != entry.checksum) {
      bad.push_back(fmt::format("{}: {}: the checksum is wrong", name, PartName(part)));
    }
  };
  for (size_t i = 0; i < header.blocks.size(); ++i) {
    verify(header.blocks[i], BlockPart(static_cast<int32_t>(i)));
  }
  for (size_t i = 0; i < header.bundle_parts.size(); ++i) {
    verify(header.bundle_parts[i], BundlePart(static_cast<int32_t>(i)));
  }
  return bad;
}

std::string TemporaryName(std::string_view segment_name) {
  std::random_device random;
  return fmt::format("{}.{}.{:08x}{:08x}{}", segment_name, getpid(), random(), random(),
                     kTemporarySuffix);
}

void ForEachStaleTemporary(const std::string& folder, const std::vector<FolderFile>& files,
                           const std::function<void(const FolderFile&)>& take) {
  for (const FolderFile& file : files) {
    if (file.kind == FolderFile::Kind::kTemporary && file.regular) {
      TakeIfStale(folder + "/" + file.name, file, take);
    }
  }
}

}  // namespace fathom
