// How fast segments go to disk and come back, in blocks of the Flash model's size, and what a call
// costs the engine's thread. The page cache is dropped from each file before it is read
// (posix_fadvise), so that reads are the disk's.
#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>

#include "cache/disk_io.h"
#include "cache/disk_store.h"

namespace fathom {
namespace {

constexpr int64_t kBlockBytes = 1'002'240;
constexpr int kBlocks = 256;  // 65,536 tokens

class Bench {
 public:
  explicit Bench(bool uring) {
    std::string pattern = (std::filesystem::temp_directory_path() / "fathom_bench_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
    DiskOptions options;
    options.path = path_;
    options.fingerprint = MakeDiskFingerprint("{}");
    options.block_tokens = 256;
    options.block_bytes = kBlockBytes;
    options.io = uring ? MakeDiskIo() : MakePosixDiskIo();
    auto store = DiskStore::Open(std::move(options));
    FATHOM_CHECK(store.has_value());
    store_ = std::move(*store);
  }
  ~Bench() {
    store_.reset();
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  SegmentHeader Header(int salt) const {
    SegmentHeader header;
    header.root = header.parent = BlockHasher().Root(std::to_string(salt));
    header.tokens.assign(size_t{kBlocks} * 256, 7);
    return header;
  }
  // Waits for `count` events of a kind.
  void Wait(DiskEvent::Kind kind, int count) {
    while (count > 0) {
      const std::vector<DiskEvent> events = store_->TakeEvents();
      for (const DiskEvent& event : events) {
        FATHOM_CHECK(event.kind != DiskEvent::Kind::kWriteFailed);
        FATHOM_CHECK(event.kind != DiskEvent::Kind::kReadFailed);
        count -= event.kind == kind ? 1 : 0;
      }
      if (events.empty()) std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  void Write(int salt) {
    auto writer = store_->Write(Header(salt));
    for (int i = 0; i < kBlocks; ++i) {
      std::vector<std::byte> block(kBlockBytes, static_cast<std::byte>(i));
      while (writer->backlog_bytes() > (int64_t{32} << 20)) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      writer->Append(std::move(block));
    }
    writer->Commit();
    Wait(DiskEvent::Kind::kWritten, 1);
  }
  void DropPages() const {
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      const int file = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
      (void)posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
      close(file);
    }
  }
  DiskStore& store() { return *store_; }

 private:
  std::string path_;
  std::unique_ptr<DiskStore> store_;
};

void Write(benchmark::State& state) {
  Bench bench(state.range(0) != 0);
  int salt = 0;
  for (auto _ : state) bench.Write(++salt % 2);
  state.SetBytesProcessed(state.iterations() * kBlocks * kBlockBytes);
  state.SetLabel(std::string(bench.store().backend()));
}

void Read(benchmark::State& state) {
  Bench bench(state.range(0) != 0);
  bench.Write(0);
  const SegmentId id = bench.store().segments().at(0).id;
  std::vector<SegmentPart> parts;
  for (int i = 0; i < kBlocks; ++i) parts.push_back(BlockPart(i));
  for (auto _ : state) {
    state.PauseTiming();
    if (state.range(1) == 0) bench.DropPages();
    state.ResumeTiming();
    bench.store().Read(id, parts);
    bench.Wait(DiskEvent::Kind::kPart, kBlocks);
  }
  state.SetBytesProcessed(state.iterations() * kBlocks * kBlockBytes);
  state.SetLabel(std::string(bench.store().backend()) +
                 (state.range(1) != 0 ? ", page cache" : ""));
}

// The longest that one TakeEvents took while the worker was reading at full speed.
void EngineThreadWaits(benchmark::State& state) {
  Bench bench(true);
  bench.Write(0);
  const SegmentId id = bench.store().segments().at(0).id;
  std::vector<SegmentPart> parts;
  for (int i = 0; i < kBlocks; ++i) parts.push_back(BlockPart(i));
  std::vector<double> times;
  for (auto _ : state) {
    bench.store().Read(id, parts);
    for (int left = kBlocks; left > 0;) {
      const auto start = std::chrono::steady_clock::now();
      const std::vector<DiskEvent> events = bench.store().TakeEvents();
      times.push_back(
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
              .count());
      left -= static_cast<int>(events.size());
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  std::sort(times.begin(), times.end());
  state.counters["median_us"] = times[times.size() / 2];
  state.counters["p99_us"] = times[times.size() * 99 / 100];
}

BENCHMARK(Write)->Arg(1)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(Read)->Args({0, 0})->Args({1, 0})->Args({0, 1})->Args({1, 1})->UseRealTime()->Unit(
    benchmark::kMillisecond);
BENCHMARK(EngineThreadWaits)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace fathom

BENCHMARK_MAIN();
