#include "cache/disk_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "cache/disk_folder.h"
#include "cache/disk_io.h"
#include "cache/disk_state.h"
#include "cache/disk_worker.h"

namespace fathom {
namespace {

// Whether files can be made, synced and removed there: rights alone do not tell (/proc, NFS). A
// full disk is no obstacle: what is there is of use, and makes room.
Status TryFolder(const std::string& path, DiskIo& io) {
  const auto check = [&](int error) -> Status {
    if (error >= 0 || error == -ENOSPC || error == -EDQUOT) return {};
    return Fail(Code::kInvalidArgument, "{}: no file can be written there: {}", path,
                ErrnoText(error));
  };
  const std::string probe = path + "/" + TemporaryName("probe" + std::string(kSegmentSuffix));
  const int file = io.OpenNew(probe);
  FATHOM_TRY(check(file));
  if (file < 0) return {};
  const std::array<std::byte, 1> byte{};
  const int wrote = io.WriteAll(file, 0, byte);
  const int synced = wrote == 0 ? io.Sync(file) : 0;
  const int removed = io.Remove(probe);  // before its lock goes: nobody else does
  io.Close(file);
  for (const int error : {wrote, synced, removed}) FATHOM_TRY(check(error));
  return {};
}

Status PrepareFolder(const std::string& path, DiskIo& io) {
  if (path.empty()) return Fail(Code::kInvalidArgument, "the disk tier's path is empty");
  // 0700: the files hold users' tokens.
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return Fail(Code::kInvalidArgument, "{}: cannot be created: {}", path, ErrnoText(-errno));
  }
  struct stat status {};
  if (stat(path.c_str(), &status) == 0 && !S_ISDIR(status.st_mode)) {
    return Fail(Code::kInvalidArgument, "{}: is no folder", path);
  }
  if (faccessat(AT_FDCWD, path.c_str(), R_OK | W_OK | X_OK, AT_EACCESS) != 0) {
    return Fail(Code::kInvalidArgument, "{}: cannot be written: {}", path, ErrnoText(-errno));
  }
  return TryFolder(path, io);
}

bool BundlesAreInOrder(const SegmentHeader& header) {
  int64_t previous = header.begin;
  for (const SegmentBundle& bundle : header.bundles) {
    if (bundle.at <= previous || bundle.at > header.end()) return false;
    previous = bundle.at;
  }
  return true;
}

}  // namespace

SegmentWriter::SegmentWriter(std::shared_ptr<DiskState> state, WriteId id,
                             const SegmentHeader& header, int64_t block_bytes)
    : state_(std::move(state)), id_(id), block_bytes_(block_bytes) {
  const int64_t block_tokens = state_->options.block_tokens;
  const auto tokens = static_cast<int64_t>(header.tokens.size());
  blocks_left_ = (tokens + block_tokens - 1) / block_tokens;
  parts_left_ = blocks_left_ + static_cast<int64_t>(header.bundles.size());
}

SegmentWriter::~SegmentWriter() {
  Abandon();
}

void SegmentWriter::Append(std::vector<std::byte> part) {
  FATHOM_CHECK(!done_ && parts_left_ > 0 && !part.empty());
  if (blocks_left_ > 0) {
    FATHOM_CHECK(static_cast<int64_t>(part.size()) == block_bytes_);
    --blocks_left_;
  }
  --parts_left_;
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->writes.find(id_);
  if (found == state_->writes.end() || found->second.failed) return;
  found->second.backlog_bytes += static_cast<int64_t>(part.size());
  found->second.parts.push_back(std::move(part));
  state_->work.notify_one();
}

int64_t SegmentWriter::backlog_bytes() const {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->writes.find(id_);
  return found == state_->writes.end() ? 0 : found->second.backlog_bytes;
}

bool SegmentWriter::failed() const {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->writes.find(id_);
  return found != state_->writes.end() && found->second.failed;
}

void SegmentWriter::Commit() {
  FATHOM_CHECK(!done_ && parts_left_ == 0);
  done_ = true;
  const std::lock_guard lock(state_->mutex);
  if (const auto found = state_->writes.find(id_); found != state_->writes.end()) {
    found->second.committed = true;
    state_->work.notify_one();
  }
}

void SegmentWriter::Abandon() {
  if (done_) return;
  done_ = true;
  const std::lock_guard lock(state_->mutex);
  if (const auto found = state_->writes.find(id_); found != state_->writes.end()) {
    found->second.abandoned = true;
    found->second.parts.clear();
    found->second.backlog_bytes = 0;
    state_->work.notify_one();
  }
}

DiskStore::DiskStore(std::shared_ptr<DiskState> state, std::unique_ptr<DiskWorker> worker)
    : state_(std::move(state)), worker_(std::move(worker)) {}

Expected<std::unique_ptr<DiskStore>> DiskStore::Open(DiskOptions options) {
  FATHOM_CHECK(options.block_tokens > 0 && options.block_bytes > 0);
  if (options.io == nullptr) options.io = MakeDiskIo();
  FATHOM_TRY(PrepareFolder(options.path, *options.io));
  auto state = std::make_shared<DiskState>(std::move(options));
  auto worker = std::make_unique<DiskWorker>(state);
  FATHOM_TRY(worker->Scan());
  worker->Start();
  return std::unique_ptr<DiskStore>(new DiskStore(std::move(state), std::move(worker)));
}

DiskStore::~DiskStore() {
  worker_.reset();
  const std::lock_guard lock(state_->mutex);
  state_->writes.clear();  // writers that outlive the store find nothing
}

std::vector<SegmentInfo> DiskStore::segments() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<SegmentInfo> segments;
  for (const DiskCatalog::Entry* entry : state_->catalog.ParentsFirst()) {
    segments.push_back(entry->info);
  }
  return segments;
}

std::vector<RefusedFile> DiskStore::refused() const {
  const std::lock_guard lock(state_->mutex);
  return state_->refused;
}

std::unique_ptr<SegmentWriter> DiskStore::Write(SegmentHeader header) {
  const DiskOptions& options = state_->options;
  FATHOM_CHECK(!header.tokens.empty() && header.begin >= 0);
  FATHOM_CHECK(header.begin % options.block_tokens == 0);
  FATHOM_CHECK(header.begin != 0 || header.parent == header.root);
  FATHOM_CHECK(BundlesAreInOrder(header));
  header.fingerprint = options.fingerprint;
  header.algorithm = options.algorithm;
  header.block_tokens = options.block_tokens;
  header.block_bytes = options.block_bytes;
  header.blocks.clear();
  header.bundle_parts.clear();
  const std::lock_guard lock(state_->mutex);
  const WriteId id{++state_->last_id};
  auto writer = std::make_unique<SegmentWriter>(state_, id, header, options.block_bytes);
  state_->catalog.Want(header);
  state_->writes[id].header = std::move(header);
  return writer;
}

int64_t DiskStore::write_backlog_bytes() const {
  const std::lock_guard lock(state_->mutex);
  int64_t bytes = 0;
  for (const auto& [id, job] : state_->writes) bytes += job.backlog_bytes;
  return bytes;
}

bool DiskStore::write_paused() const {
  const std::lock_guard lock(state_->mutex);
  return std::chrono::steady_clock::now() < state_->paused_until;
}

ReadTicket DiskStore::Read(SegmentId segment, std::vector<SegmentPart> parts) {
  auto request = std::make_shared<ReadRequest>();
  request->segment = segment;
  request->parts = std::move(parts);
  const std::lock_guard lock(state_->mutex);
  request->ticket = ReadTicket{++state_->last_id};
  if (DiskCatalog::Entry* entry = state_->catalog.Find(segment)) ++entry->pinned;
  state_->reads.push_back(request);
  state_->live.emplace(request->ticket, request);
  state_->work.notify_one();
  return request->ticket;
}

void DiskStore::CancelRead(ReadTicket ticket) {
  if (ticket == ReadTicket{}) return;  // what events that are no read's carry
  const std::lock_guard lock(state_->mutex);
  if (const auto found = state_->live.find(ticket); found != state_->live.end()) {
    const std::shared_ptr<ReadRequest> request = found->second;
    request->cancelled = true;
    state_->EndRead(*request);
  }
  std::erase_if(state_->events, [&](const DiskEvent& event) {
    if (event.ticket != ticket) return false;
    state_->unclaimed_bytes -= static_cast<int64_t>(event.data.size());
    return true;
  });
  state_->work.notify_one();
}

void DiskStore::Touch(SegmentId segment) {
  const std::lock_guard lock(state_->mutex);
  state_->touched.push_back(segment);
  state_->work.notify_one();
}

std::vector<DiskEvent> DiskStore::TakeEvents() {
  std::deque<DiskEvent> taken;
  {
    const std::lock_guard lock(state_->mutex);
    taken.swap(state_->events);
    state_->unclaimed_bytes = 0;
    state_->work.notify_one();
  }
  return {std::make_move_iterator(taken.begin()), std::make_move_iterator(taken.end())};
}

void DiskStore::SetWake(std::function<void()> wake) {
  const std::lock_guard lock(state_->wake_mutex);
  state_->wake = std::move(wake);
}

bool DiskStore::Flush(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock lock(state_->mutex);
  return state_->flushed.wait_until(lock, deadline, [&] {
    return std::none_of(state_->writes.begin(), state_->writes.end(),
                        [](const auto& entry) { return entry.second.committed; });
  });
}

DiskStats DiskStore::stats() const {
  const std::lock_guard lock(state_->mutex);
  DiskStats stats = state_->stats;
  stats.segments = static_cast<int64_t>(state_->catalog.entries().size());
  stats.bytes_on_disk = state_->catalog.bytes();
  return stats;
}

std::string_view DiskStore::backend() const {
  return state_->options.io->name();
}

}  // namespace fathom
