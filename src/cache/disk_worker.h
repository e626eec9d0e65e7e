// The one thread of a DiskStore that touches the disk.
#pragma once

#include <memory>
#include <thread>

#include "cache/disk_keeper.h"
#include "cache/disk_output.h"
#include "cache/disk_reader.h"
#include "cache/disk_state.h"

namespace fathom {

class DiskWorker {
 public:
  explicit DiskWorker(std::shared_ptr<DiskState> state);
  // Finishes the step in hand, then removes open temporaries.
  ~DiskWorker();
  DiskWorker(const DiskWorker&) = delete;
  DiskWorker& operator=(const DiskWorker&) = delete;

  Status Scan() { return keeper_.Scan(true); }  // before Start
  void Start();

 private:
  void Run();

  std::shared_ptr<DiskState> state_;
  DiskKeeper keeper_;
  std::unique_ptr<DiskReader> reader_;
  std::unique_ptr<DiskOutput> output_;
  std::thread thread_;
};

}  // namespace fathom
