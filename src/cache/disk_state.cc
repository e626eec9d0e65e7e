#include "cache/disk_state.h"

#include <algorithm>

namespace fathom {

void DiskState::Push(DiskEvent event) {
  wake_due_ = wake_due_ || events.empty();
  unclaimed_bytes += static_cast<int64_t>(event.data.size());
  events.push_back(std::move(event));
}

void DiskState::PushRemoved(SegmentId segment, std::string message) {
  Push({.kind = DiskEvent::Kind::kRemoved, .segment = segment, .message = std::move(message)});
}

void DiskState::EndRead(const ReadRequest& request) {
  if (live.erase(request.ticket) == 0) return;
  const auto queued = std::find_if(reads.begin(), reads.end(), [&](const auto& other) {
    return other->ticket == request.ticket;
  });
  if (queued != reads.end()) reads.erase(queued);
  if (DiskCatalog::Entry* entry = catalog.Find(request.segment)) --entry->pinned;
}

void DiskState::FailWrite(WriteId id, WriteJob& job, std::string message, bool disk_full) {
  if (job.failed) return;
  job.failed = true;
  job.parts.clear();
  job.backlog_bytes = 0;
  ++stats.write_failures;
  Push({.kind = DiskEvent::Kind::kWriteFailed,
        .write = id,
        .disk_full = disk_full,
        .message = std::move(message)});
}

void DiskState::WakeIfDue() {
  {
    const std::lock_guard lock(mutex);
    if (!wake_due_) return;
    wake_due_ = false;
  }
  const std::lock_guard lock(wake_mutex);
  if (wake) wake();
}

}  // namespace fathom
