#include "cache/disk_keeper.h"

#include <algorithm>
#include <limits>

namespace fathom {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

}  // namespace

SegmentId DiskKeeper::NewId() {
  return SegmentId{++state_.last_id};
}

Status DiskKeeper::Scan(bool opening) {
  scanned_ = std::chrono::steady_clock::now();
  FATHOM_ASSIGN(const std::vector<FolderFile> files, ListFolder(state_.options.path));
  if (opening) {
    ForEachStaleTemporary(state_.options.path, files, [&](const FolderFile& file) {
      (void)state_.options.io->Remove(Path(file.name));
    });
  }
  bad_.clear();
  std::set<std::string> names;
  for (const FolderFile& file : files) {
    if (file.kind == FolderFile::Kind::kBad && file.regular) bad_[file.name] = file.bytes;
    if (file.kind != FolderFile::Kind::kSegment) continue;
    names.insert(file.name);
    {
      const std::lock_guard lock(state_.mutex);
      if (DiskCatalog::Entry* known = state_.catalog.FindName(file.name)) {
        if (file.regular && file.bytes == known->bytes()) {
          known->used_ns = std::max(known->used_ns, file.modified_ns);  // others use it, too
          continue;
        }
      }
    }
    Forget(file.name, "replaced: another process wrote a new one");
    if (shunned_.contains(file.name)) continue;
    const auto refused = refused_.find(file.name);
    if (refused != refused_.end() && refused->second == Seen{file.bytes, file.modified_ns}) {
      continue;
    }
    Examine(file, opening);
  }
  std::erase_if(shunned_, [&](const std::string& name) { return !names.contains(name); });
  std::vector<std::string> gone;
  {
    const std::lock_guard lock(state_.mutex);
    for (const auto& [name, entry] : state_.catalog.entries()) {
      if (!names.contains(name)) gone.push_back(name);
    }
  }
  for (const std::string& name : gone) Forget(name, "vanished: another process removed it");
  return {};
}

void DiskKeeper::ScanIfDue() {
  if (std::chrono::steady_clock::now() - scanned_ < state_.options.rescan_interval) return;
  (void)Scan(false);  // a folder that cannot be listed now is looked at another time
}

void DiskKeeper::Examine(const FolderFile& file, bool opening) {
  if (!file.regular) {
    return Refuse(file, {Code::kInvalidArgument, file.name + ": is no regular file", {}});
  }
  const DiskOptions& own = state_.options;
  Expected<SegmentHeader> header = ReadSegmentHeader(*own.io, own.path, file.name);
  if (!header) {
    if (header.error().code != Code::kNotFound) Refuse(file, header.error());
    return;
  }
  const Status format = CheckFormat(
      *header, {&own.fingerprint, own.algorithm, own.block_tokens, own.block_bytes}, file.name);
  if (!format) return Refuse(file, format.error());
  const std::lock_guard lock(state_.mutex);
  SegmentInfo info{.id = NewId(),
                   .name = file.name,
                   .header = std::make_shared<const SegmentHeader>(std::move(*header))};
  if (!opening) {
    state_.Push({.kind = DiskEvent::Kind::kFound, .segment = info.id, .header = info.header});
  }
  state_.catalog.Add(std::move(info), file.modified_ns);
}

void DiskKeeper::Refuse(const FolderFile& file, const Error& error) {
  const bool damaged = error.code == Code::kDataLoss;
  RefusedFile refusal{.name = file.name, .reason = error.message};
  if (damaged && PutAside(file.name, file.bytes)) {
    refusal.damaged = true;
  } else {
    refused_[file.name] = {file.bytes, file.modified_ns};
  }
  const std::lock_guard lock(state_.mutex);
  std::erase_if(state_.refused, [&](const RefusedFile& old) { return old.name == file.name; });
  state_.refused.push_back(std::move(refusal));
  ++state_.stats.refused;
}

bool DiskKeeper::PutAside(const std::string& name, int64_t bytes) {
  const std::string aside = name + std::string(kBadSuffix);
  if (state_.options.io->Rename(Path(name), Path(aside)) != 0) return false;
  bad_[aside] = bytes;
  return true;
}

int64_t DiskKeeper::Limit() const {
  const int64_t chosen = state_.options.max_bytes == 0 ? kNoLimit : state_.options.max_bytes;
  return disk_is_full() ? std::min(chosen, full_limit_) : chosen;
}

int64_t DiskKeeper::BadBytes() const {
  int64_t bytes = 0;
  for (const auto& [name, size] : bad_) bytes += size;
  return bytes;
}

bool DiskKeeper::disk_is_full() const {
  return std::chrono::steady_clock::now() < full_until_;
}

Status DiskKeeper::MakeRoom(int64_t bytes, int64_t pending) {
  const int64_t limit = Limit();
  if (limit == kNoLimit) return {};
  if (pending + bytes > limit) {  // evicting everything would not help
    const std::string than = disk_is_full() ? fmt::format("the {} that fit on the full disk", limit)
                                            : fmt::format("the limit of {}", limit);
    return Fail(Code::kResourceExhausted, "{} bytes are more than {}", pending + bytes, than);
  }
  bool scanned = false;
  while (true) {
    int64_t used = pending + bytes + BadBytes();
    std::string name;
    {
      const std::lock_guard lock(state_.mutex);
      used += state_.catalog.bytes();
      if (used <= limit) return {};
      const DiskCatalog::Entry* choice = state_.catalog.EvictionChoice();
      if (choice != nullptr) name = choice->info.name;
    }
    if (!scanned) {  // another process may have made room, or continued what looks like a leaf
      scanned = true;
      FATHOM_TRY(Scan(false));
      continue;
    }
    if (!bad_.empty()) {
      (void)state_.options.io->Remove(Path(bad_.begin()->first));
      bad_.erase(bad_.begin());  // gone, or not ours to remove
      continue;
    }
    if (name.empty()) {
      return Fail(Code::kResourceExhausted,
                  "{} bytes more than the limit of {}, and no segment can be evicted", used - limit,
                  limit);
    }
    const int error = state_.options.io->Remove(Path(name));
    if (error != 0 && error != -ENOENT) {
      return Fail(Code::kUnavailable, "{}: cannot be evicted: {}", name, ErrnoText(error));
    }
    Forget(name,
           error == 0 ? "evicted: least recently used" : "vanished: another process removed it");
    if (error == 0) {
      const std::lock_guard lock(state_.mutex);
      ++state_.stats.evicted;
    }
  }
}

Status DiskKeeper::MakeRoomOnFullDisk(int64_t bytes, int64_t pending) {
  {
    const std::lock_guard lock(state_.mutex);
    ++state_.stats.disk_full;
    full_limit_ = state_.catalog.bytes() + BadBytes() + pending;
    full_until_ = std::chrono::steady_clock::now() + state_.options.full_pause;
    if (!full_named_ && state_.catalog.EvictionChoice() != nullptr) {
      full_named_ = true;
      state_.Push({.kind = DiskEvent::Kind::kDiskFull,
                   .message = fmt::format("{}: the disk is full: the least recently used of the {} "
                                          "bytes of segments make room for new ones",
                                          state_.options.path, state_.catalog.bytes())});
    }
  }
  Status room = MakeRoom(bytes, pending);
  if (room) {
    // A journal may hand out freed blocks only after it has been written.
    (void)state_.options.io->SyncFolder(state_.options.path);
    return {};
  }
  bool evictable = !bad_.empty();
  {
    const std::lock_guard lock(state_.mutex);
    evictable = evictable || state_.catalog.EvictionChoice() != nullptr;
  }
  if (evictable) return room;
  return PauseWriting("nothing can be evicted");
}

Status DiskKeeper::PauseWriting(std::string_view why) {
  const std::chrono::milliseconds pause = state_.options.full_pause;
  const std::lock_guard lock(state_.mutex);
  state_.paused_until = std::chrono::steady_clock::now() + pause;
  ++state_.stats.write_pauses;
  return Fail(Code::kResourceExhausted, "{}, and nothing is written for {} s", why,
              std::chrono::duration<double>(pause).count());
}

void DiskKeeper::Add(const std::string& name, SegmentHeader header, WriteId write) {
  shunned_.erase(name);
  refused_.erase(name);
  const auto shared = std::make_shared<const SegmentHeader>(std::move(header));
  const std::lock_guard lock(state_.mutex);
  const DiskCatalog::Entry* old = state_.catalog.FindName(name);
  const SegmentId replaced = old == nullptr ? SegmentId{} : old->info.id;
  if (old != nullptr) state_.catalog.Remove(replaced);
  const SegmentId id = NewId();
  state_.catalog.Add({.id = id, .name = name, .header = shared}, NowNanoseconds());
  ++state_.stats.segments_written;
  state_.Push({.kind = DiskEvent::Kind::kWritten, .write = write, .segment = id, .header = shared});
  if (replaced != SegmentId{}) state_.PushRemoved(replaced, name + ": replaced by a new one");
}

void DiskKeeper::Forget(const std::string& name, const std::string& reason) {
  const std::lock_guard lock(state_.mutex);
  const DiskCatalog::Entry* entry = state_.catalog.FindName(name);
  if (entry == nullptr) return;
  const SegmentId id = entry->info.id;
  state_.catalog.Remove(id);
  state_.PushRemoved(id, name + ": " + reason);
}

void DiskKeeper::Withdraw(SegmentId segment, const std::string& reason, Fate fate) {
  if (fate == Fate::kKeep) return;
  std::string name;
  int64_t bytes = 0;
  {
    const std::lock_guard lock(state_.mutex);
    const DiskCatalog::Entry* entry = state_.catalog.Find(segment);
    if (entry == nullptr) return;
    name = entry->info.name;
    bytes = entry->bytes();
  }
  const bool shuns = fate == Fate::kShun || (fate == Fate::kPutAside && !PutAside(name, bytes));
  if (shuns) shunned_.insert(name);
  const std::lock_guard lock(state_.mutex);
  state_.catalog.Remove(segment);
  state_.PushRemoved(segment, reason);
}

void DiskKeeper::Used(SegmentId segment, int file) {
  const int64_t now = NowNanoseconds();
  // Without the right to set the time, recency lasts as long as this process.
  (void)state_.options.io->SetModified(file, now);
  const std::lock_guard lock(state_.mutex);
  if (DiskCatalog::Entry* entry = state_.catalog.Find(segment)) entry->used_ns = now;
}

void DiskKeeper::Touch(SegmentId segment) {
  std::string name;
  {
    const std::lock_guard lock(state_.mutex);
    const DiskCatalog::Entry* entry = state_.catalog.Find(segment);
    if (entry == nullptr) return;
    name = entry->info.name;
  }
  const int file = state_.options.io->OpenForRead(Path(name));
  if (file < 0) return;
  Used(segment, file);
  state_.options.io->Close(file);
}

}  // namespace fathom
