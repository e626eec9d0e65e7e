#include "cache/disk_worker.h"

namespace fathom {

DiskWorker::DiskWorker(std::shared_ptr<DiskState> state)
    : state_(std::move(state)),
      keeper_(*state_),
      reader_(std::make_unique<DiskReader>(*state_, keeper_)),
      output_(std::make_unique<DiskOutput>(*state_, keeper_)) {}

DiskWorker::~DiskWorker() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stop = true;
    state_->work.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void DiskWorker::Start() {
  thread_ = std::thread([this] { Run(); });
}

void DiskWorker::Run() {
  std::unique_lock lock(state_->mutex);
  while (true) {
    state_->work.wait(lock, [&] {
      return state_->stop || !state_->touched.empty() || reader_->HasWork() || output_->HasWork();
    });
    if (state_->stop) return;
    std::deque<SegmentId> touched;
    touched.swap(state_->touched);
    const bool reads = reader_->HasWork();
    lock.unlock();
    for (const SegmentId segment : touched) keeper_.Touch(segment);
    // In turns: a long stream of either kind must not starve the other. A read waits for one
    // part's write at most.
    if (reads) reader_->Step();
    state_->WakeIfDue();
    output_->Step();
    state_->WakeIfDue();
    lock.lock();
  }
}

}  // namespace fathom
