#include "cache/disk_reader.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace fathom {

DiskReader::Source::~Source() {
  if (file >= 0) io->Close(file);
}

DiskReader::~DiskReader() {
  for (const auto& flight : flights_) WaitFor(*flight);
}

bool DiskReader::MayStart(int64_t bytes) const {
  const int64_t held = state_.unclaimed_bytes + in_flight_bytes_;
  return held == 0 || held + bytes <= state_.options.max_unclaimed_bytes;
}

int64_t DiskReader::NextBytes() const {
  const ReadRequest& request = *state_.reads.front();
  if (request.next == request.parts.size()) return 0;  // no parts at all: it fails at once
  DiskCatalog::Entry* entry = state_.catalog.Find(request.segment);
  if (entry == nullptr) return 0;
  const SegmentPartEntry* part = FindPart(*entry->info.header, request.parts[request.next]);
  return part == nullptr ? 0 : part->bytes;
}

bool DiskReader::HasWork() const {
  return !flights_.empty() || (!state_.reads.empty() && MayStart(NextBytes()));
}

std::unique_ptr<DiskReader::Flight> DiskReader::TakeNext() {
  const std::lock_guard lock(state_.mutex);
  if (state_.reads.empty() || !MayStart(NextBytes())) return nullptr;
  auto flight = std::make_unique<Flight>();
  flight->request = state_.reads.front();
  ReadRequest& request = *flight->request;
  flight->index = request.next++;
  flight->bytes = 0;
  if (request.next >= request.parts.size()) state_.reads.pop_front();
  return flight;
}

bool DiskReader::Open(Flight& flight) {
  const ReadRequest& request = *flight.request;
  if (source_ != nullptr && source_->ticket == request.ticket) {
    flight.source = source_;
    return true;
  }
  auto source = std::make_shared<Source>();
  source->io = state_.options.io.get();
  source->ticket = request.ticket;
  source->segment = request.segment;
  {
    const std::lock_guard lock(state_.mutex);
    const DiskCatalog::Entry* entry = state_.catalog.Find(request.segment);
    if (entry == nullptr) {
      flight.error = fmt::format("segment {} is not on disk any more", request.segment.value);
      return false;
    }
    source->name = entry->info.name;
    source->header = entry->info.header;
  }
  const auto fail = [&](std::string_view what, DiskKeeper::Fate fate) {
    flight.error = fmt::format("{}: {}", source->name, what);
    flight.fate = fate;
    return false;
  };
  source->file = source->io->OpenForRead(keeper_.Path(source->name));
  if (source->file == -ENOENT) {
    return fail("vanished: another process removed it", DiskKeeper::Fate::kLookAgain);
  }
  if (source->file < 0) {
    const bool ours = source->file == -EMFILE || source->file == -ENFILE || source->file == -ENOMEM;
    return fail(ErrnoText(source->file), ours ? DiskKeeper::Fate::kKeep : DiskKeeper::Fate::kShun);
  }
  // The same name can hold another file by now, with its parts elsewhere.
  std::array<std::byte, kSegmentPrefixBytes> prefix{};
  const int64_t got = source->io->ReadAll(source->file, 0, prefix);
  if (got < 0) return fail(ErrnoText(got), DiskKeeper::Fate::kShun);
  uint64_t checksum = 0;
  std::memcpy(&checksum, prefix.data() + 16, sizeof(checksum));
  if (got < kSegmentPrefixBytes || checksum != source->header->checksum) {
    return fail("is not the file it was: replaced or damaged", DiskKeeper::Fate::kLookAgain);
  }
  keeper_.Used(request.segment, source->file);
  flight.source = source_ = std::move(source);
  return true;
}

void DiskReader::Start(Flight& flight) {
  flight.done = true;
  const ReadRequest& request = *flight.request;
  {
    const std::lock_guard lock(state_.mutex);
    if (request.cancelled || request.failed) return;
  }
  if (!Open(flight)) return;
  const SegmentPartEntry* part = flight.index < request.parts.size()
                                     ? FindPart(*flight.source->header, request.parts[flight.index])
                                     : nullptr;
  if (part == nullptr) {
    flight.error = request.parts.empty()
                       ? fmt::format("{}: no part was asked for", flight.source->name)
                       : fmt::format("{}: has no {}", flight.source->name,
                                     PartName(request.parts[flight.index]));
    flight.fate = DiskKeeper::Fate::kLookAgain;
    return;
  }
  flight.data.resize(static_cast<size_t>(part->bytes));
  flight.bytes = part->bytes;
  in_flight_bytes_ += part->bytes;
  flight.done = false;
  flight.read = {.file = flight.source->file, .offset = part->offset, .into = flight.data};
  state_.options.io->StartRead(&flight.read);
}

void DiskReader::WaitFor(const Flight& flight) {
  DiskIo& io = *state_.options.io;
  while (!flight.done) {
    DiskRead* read = io.FinishRead();
    FATHOM_CHECK(read != nullptr);
    const auto owner = std::find_if(flights_.begin(), flights_.end(),
                                    [&](const auto& other) { return &other->read == read; });
    FATHOM_CHECK(owner != flights_.end());
    Flight& finished = **owner;
    if (read->result == -EINTR || read->result == -EAGAIN) {
      io.StartRead(read);
    } else if (read->result > 0) {
      finished.done_bytes += read->result;
      finished.done = finished.done_bytes == static_cast<int64_t>(finished.data.size());
      if (finished.done) continue;
      read->offset += read->result;  // a short read: the rest
      read->into = std::span(finished.data).subspan(static_cast<size_t>(finished.done_bytes));
      io.StartRead(read);
    } else {
      finished.done = true;
    }
  }
}

void DiskReader::Finish(std::unique_ptr<Flight> flight) {
  ReadRequest& request = *flight->request;
  const auto fail = [&](std::string_view what, DiskKeeper::Fate fate) {
    flight->error = fmt::format("{}: {}: {}", flight->source->name,
                                PartName(request.parts[flight->index]), what);
    flight->fate = fate;
  };
  in_flight_bytes_ -= flight->bytes;
  if (flight->error.empty() && flight->bytes > 0) {
    const SegmentPartEntry* part = FindPart(*flight->source->header, request.parts[flight->index]);
    if (flight->read.result < 0) {
      fail(ErrnoText(flight->read.result), DiskKeeper::Fate::kShun);
    } else if (flight->done_bytes < flight->bytes) {
      fail("truncated", DiskKeeper::Fate::kPutAside);
    } else if (PartChecksum(flight->data) != part->checksum) {
      fail("the checksum is wrong", DiskKeeper::Fate::kPutAside);
    }
  }
  {
    const std::lock_guard lock(state_.mutex);
    if (request.cancelled || request.failed) return;
    DiskEvent event{.ticket = request.ticket, .segment = request.segment};
    if (flight->index < request.parts.size()) event.part = request.parts[flight->index];
    if (flight->error.empty()) {
      event.kind = DiskEvent::Kind::kPart;
      event.last = flight->index + 1 == request.parts.size();
      event.data = std::move(flight->data);
      state_.stats.bytes_read += flight->bytes;
      const bool last = event.last;
      state_.Push(std::move(event));
      if (last) state_.EndRead(request);
      return;
    }
    request.failed = true;
    ++state_.stats.read_failures;
    event.kind = DiskEvent::Kind::kReadFailed;
    event.message = flight->error;
    state_.Push(std::move(event));
    state_.EndRead(request);
  }
  // A part that never was says nothing about the file.
  if (flight->source == nullptr || flight->bytes > 0) {
    keeper_.Withdraw(request.segment, flight->error, flight->fate);
  }
}

void DiskReader::Step() {
  while (static_cast<int>(flights_.size()) < state_.options.io->read_depth()) {
    std::unique_ptr<Flight> flight = TakeNext();
    if (flight == nullptr) break;
    Start(*flight);
    flights_.push_back(std::move(flight));
  }
  if (flights_.empty()) {
    source_.reset();
    return;
  }
  WaitFor(*flights_.front());
  std::unique_ptr<Flight> flight = std::move(flights_.front());
  flights_.pop_front();
  Finish(std::move(flight));
  if (flights_.empty()) {
    const std::lock_guard lock(state_.mutex);
    if (state_.reads.empty()) source_.reset();
  }
}

}  // namespace fathom
