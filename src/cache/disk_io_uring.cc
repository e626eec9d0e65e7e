// The io_uring backend: part reads go through a ring, several in flight; the rest is as in the
// pread backend.
#include <liburing.h>

#include <cerrno>
#include <cstring>

#include "cache/disk_io_posix.h"

namespace fathom {
namespace {

// Eight reads of a block (about 1 MiB) keep an NVMe drive busy; more would only fill memory.
constexpr int kDepth = 8;

class UringDiskIo final : public PosixDiskIo {
 public:
  explicit UringDiskIo(const io_uring& ring) : ring_(ring) {}
  ~UringDiskIo() override { io_uring_queue_exit(&ring_); }
  UringDiskIo(const UringDiskIo&) = delete;
  UringDiskIo& operator=(const UringDiskIo&) = delete;

  std::string_view name() const override { return "io_uring"; }
  int read_depth() const override { return kDepth; }

  void StartRead(DiskRead* read) override {
    io_uring_sqe* entry = in_ring_ < kDepth ? io_uring_get_sqe(&ring_) : nullptr;
    if (entry == nullptr) return PosixDiskIo::StartRead(read);
    // A length that does not fit 32 bits is a short read, which the caller continues.
    const size_t length = std::min(read->into.size(), size_t{1} << 30);
    io_uring_prep_read(entry, read->file, read->into.data(), static_cast<unsigned>(length),
                       static_cast<uint64_t>(read->offset));
    io_uring_sqe_set_data(entry, read);
    ++in_ring_;
    // What cannot be submitted now (-EAGAIN, -EBUSY) stays in the ring for the wait below.
    (void)io_uring_submit(&ring_);
  }

  DiskRead* FinishRead() override {
    if (DiskRead* read = PosixDiskIo::FinishRead()) return read;
    if (in_ring_ == 0) return nullptr;
    io_uring_cqe* completion = nullptr;
    while (true) {
      const int error = io_uring_submit_and_wait(&ring_, 1);
      if (error < 0 && error != -EINTR && error != -EAGAIN && error != -EBUSY) {
        // The kernel may still write into the buffers: there is no way on.
        FATHOM_CHECK(io_uring_cq_ready(&ring_) > 0);
      }
      if (io_uring_peek_cqe(&ring_, &completion) == 0 && completion != nullptr) break;
    }
    auto* read = static_cast<DiskRead*>(io_uring_cqe_get_data(completion));
    read->result = completion->res;
    io_uring_cqe_seen(&ring_, completion);
    --in_ring_;
    return read;
  }

 private:
  io_uring ring_;
  int in_ring_ = 0;
};

}  // namespace

Expected<std::unique_ptr<DiskIo>> MakeUringDiskIo() {
  io_uring ring{};
  if (const int error = io_uring_queue_init(kDepth, &ring, 0); error < 0) {
    return Fail(Code::kUnavailable, "io_uring: {}", std::strerror(-error));
  }
  io_uring_probe* probe = io_uring_get_probe_ring(&ring);
  const bool reads = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) != 0;
  if (probe != nullptr) io_uring_free_probe(probe);
  if (!reads) {
    io_uring_queue_exit(&ring);
    return Fail(Code::kUnavailable, "io_uring: this kernel's has no plain reads");
  }
  return std::make_unique<UringDiskIo>(ring);
}

}  // namespace fathom
