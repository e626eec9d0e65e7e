// The worker's reads: parts of queued tickets in order, as many in flight as the backend has use
// for, each verified before it becomes an event. Worker thread only.
#pragma once

#include <deque>
#include <memory>
#include <string>

#include "cache/disk_keeper.h"
#include "cache/disk_state.h"

namespace fathom {

class DiskReader {
 public:
  DiskReader(DiskState& state, DiskKeeper& keeper) : state_(state), keeper_(keeper) {}
  ~DiskReader();  // waits for what is in flight: the kernel writes into its buffers
  DiskReader(const DiskReader&) = delete;
  DiskReader& operator=(const DiskReader&) = delete;

  // With the state's mutex held: Step would do something.
  bool HasWork() const;
  // Starts what may be started, then finishes the oldest read in flight.
  void Step();

 private:
  // A file that a ticket reads from; the kernel keeps its bytes as long as it is open, whatever
  // happens to its name.
  struct Source {
    ~Source();
    DiskIo* io = nullptr;
    int file = -1;
    ReadTicket ticket;
    SegmentId segment;
    std::string name;
    std::shared_ptr<const SegmentHeader> header;
  };
  struct Flight {
    std::shared_ptr<ReadRequest> request;
    std::shared_ptr<Source> source;
    size_t index = 0;  // in request->parts
    std::vector<std::byte> data;
    int64_t bytes = 0;  // counted against max_unclaimed_bytes
    DiskRead read;
    int64_t done_bytes = 0;
    bool done = false;
    // Set when there is nothing to read: what is wrong.
    std::string error;
    DiskKeeper::Fate fate = DiskKeeper::Fate::kShun;
  };

  // With the mutex held: bytes of the next part if the budget allows it now.
  bool MayStart(int64_t bytes) const;
  int64_t NextBytes() const;
  std::unique_ptr<Flight> TakeNext();
  void Start(Flight& flight);
  bool Open(Flight& flight);  // sets flight.source, or flight.error
  void WaitFor(const Flight& flight);
  void Finish(std::unique_ptr<Flight> flight);

  DiskState& state_;
  DiskKeeper& keeper_;
  std::deque<std::unique_ptr<Flight>> flights_;
  std::shared_ptr<Source> source_;  // of the ticket read from last
  int64_t in_flight_bytes_ = 0;
};

}  // namespace fathom
