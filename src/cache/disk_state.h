// What the two sides of a DiskStore share: the engine's thread puts work in and takes events out,
// the worker does the reverse. One mutex, never held while the disk is touched.
//
// Of the members, those under "worker" belong to the worker's thread (and to Open before there is
// one); everything else is guarded by `mutex`.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache/disk_catalog.h"
#include "cache/disk_io.h"
#include "cache/disk_store.h"

namespace fathom {

// One Read call. `next`, `cancelled` and `failed` are guarded, the rest does not change.
struct ReadRequest {
  ReadTicket ticket;
  SegmentId segment;
  std::vector<SegmentPart> parts;
  size_t next = 0;  // the first part that is not started
  bool cancelled = false;
  bool failed = false;
};

// One SegmentWriter. The engine's side fills it, the worker empties it. All guarded, except for
// `header`, which is the worker's.
struct WriteJob {
  SegmentHeader header;
  bool wanted = true;  // the catalog counts it as a child of its parent
  std::deque<std::vector<std::byte>> parts;
  int64_t backlog_bytes = 0;
  bool committed = false;
  bool abandoned = false;
  bool failed = false;
  bool HasWork() const { return abandoned || committed || (!failed && !parts.empty()); }
};

class DiskState {
 public:
  explicit DiskState(DiskOptions chosen) : options(std::move(chosen)) {}

  const DiskOptions options;
  std::mutex mutex;
  std::condition_variable work;     // for the worker
  std::condition_variable flushed;  // a writer is finished

  std::deque<std::shared_ptr<ReadRequest>> reads;  // with parts to start
  std::unordered_map<ReadTicket, std::shared_ptr<ReadRequest>> live;
  std::map<WriteId, WriteJob> writes;
  std::deque<SegmentId> touched;
  std::chrono::steady_clock::time_point paused_until{};  // writing
  uint64_t last_id = 0;                                  // of tickets, writers and segments
  bool stop = false;

  std::deque<DiskEvent> events;
  int64_t unclaimed_bytes = 0;  // in `events`
  DiskCatalog catalog;
  std::vector<RefusedFile> refused;
  DiskStats stats;

  std::mutex wake_mutex;  // held while `wake` runs; never together with `mutex`
  std::function<void()> wake;

  // With `mutex` held:
  void Push(DiskEvent event);
  void PushRemoved(SegmentId segment, std::string message);
  // Takes the request off the queues; the pin on its segment goes.
  void EndRead(const ReadRequest& request);
  // Drops what is queued of a writer and whatever comes.
  void FailWrite(WriteId id, WriteJob& job, std::string message, bool disk_full);

  // Without it: calls `wake` if events were pushed into an empty queue since the last call.
  void WakeIfDue();

 private:
  bool wake_due_ = false;  // guarded by mutex
};

}  // namespace fathom
