// Shared by the disk tier's tests: a folder that goes away, segments with random contents, and
// waiting for events with a limit.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cache/disk_folder.h"
#include "cache/disk_io_testing.h"
#include "cache/disk_store.h"

namespace fathom::disk_test {

inline constexpr int64_t kBlockTokens = 128;
inline constexpr int64_t kBlockBytes = 5000;  // no multiple of a page

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "fathom_disk_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~TemporaryFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  std::string path_;
};

inline DiskOptions Options(const std::string& path) {
  DiskOptions options;
  options.path = path;
  options.fingerprint =
      MakeDiskFingerprint(R"({"model": "test", "kv_cache_dtype": "fp8", "layers": 4})");
  options.block_tokens = kBlockTokens;
  options.block_bytes = kBlockBytes;
  options.rescan_interval = std::chrono::milliseconds(0);
  return options;
}

using Random = std::mt19937_64;

inline std::vector<std::byte> RandomBytes(Random& random, int64_t size) {
  std::vector<std::byte> bytes(static_cast<size_t>(size));
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

// What is written, to compare with what comes back.
struct Segment {
  SegmentHeader header;
  std::vector<std::vector<std::byte>> blocks, bundles;
  std::vector<SegmentPart> Parts() const {
    std::vector<SegmentPart> parts;
    for (size_t i = 0; i < blocks.size(); ++i) parts.push_back(BlockPart(static_cast<int>(i)));
    for (size_t i = 0; i < bundles.size(); ++i) parts.push_back(BundlePart(static_cast<int>(i)));
    return parts;
  }
  const std::vector<std::byte>& Bytes(SegmentPart part) const {
    const auto& list = part.kind == SegmentPart::Kind::kBlock ? blocks : bundles;
    return list[static_cast<size_t>(part.index)];
  }
};

// `tokens` tokens after `parent` (which ends with a whole block), or a first segment.
inline Segment MakeSegment(Random& random, int64_t tokens, const SegmentHeader* parent = nullptr,
                           const std::string& salt = "") {
  Segment segment;
  segment.header.root = BlockHasher().Root(salt);
  segment.header.parent = parent == nullptr ? segment.header.root : parent->last_block();
  segment.header.begin =
      parent == nullptr
          ? 0
          : parent->begin + static_cast<int64_t>(parent->block_names.size()) * kBlockTokens;
  for (int64_t i = 0; i < tokens; ++i) {
    segment.header.tokens.push_back(static_cast<TokenId>(random() % 100'000));
  }
  for (int64_t at = 0; at < tokens; at += kBlockTokens) {
    segment.blocks.push_back(RandomBytes(random, kBlockBytes));
  }
  const int64_t middle = segment.header.begin + 1 + static_cast<int64_t>(random() % tokens);
  if (middle < segment.header.end()) segment.header.bundles.push_back({.at = middle});
  segment.header.bundles.push_back({.at = segment.header.end()});
  for (size_t i = 0; i < segment.header.bundles.size(); ++i) {
    segment.bundles.push_back(RandomBytes(random, 1 + static_cast<int64_t>(random() % 9000)));
  }
  return segment;
}

// Far later than anything takes on a machine that is busy with other things: only what never comes
// is given up.
inline std::chrono::steady_clock::time_point Deadline() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(120);
}

// Takes events until `count` of them have come or the deadline has passed.
inline std::vector<DiskEvent> WaitEvents(DiskStore& store, size_t count) {
  std::vector<DiskEvent> events;
  const auto deadline = Deadline();
  while (events.size() < count && std::chrono::steady_clock::now() < deadline) {
    std::vector<DiskEvent> more = store.TakeEvents();
    events.insert(events.end(), std::make_move_iterator(more.begin()),
                  std::make_move_iterator(more.end()));
    if (events.size() < count) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return events;
}

// Polls until the deadline at most.
template <class Condition>
bool WaitUntil(const Condition& condition) {
  const auto deadline = Deadline();
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

inline std::unique_ptr<SegmentWriter> StartWrite(DiskStore& store, const Segment& segment) {
  auto writer = store.Write(segment.header);
  for (const auto& block : segment.blocks) writer->Append(block);
  for (const auto& bundle : segment.bundles) writer->Append(bundle);
  return writer;
}

// The first event about this writer; events of other kinds before it are dropped.
inline DiskEvent WriteSegment(DiskStore& store, const Segment& segment) {
  auto writer = StartWrite(store, segment);
  writer->Commit();
  const auto deadline = Deadline();
  while (std::chrono::steady_clock::now() < deadline) {
    for (DiskEvent& event : WaitEvents(store, 1)) {
      if (event.write == writer->id()) return event;
    }
  }
  ADD_FAILURE() << "no event about the writer";
  return {};
}

// Reads the segment completely: true when every part arrived, in order, with the right bytes.
// Fails the test if any part arrives with other bytes. `message`: why it is false.
inline bool ReadsBack(DiskStore& store, SegmentId id, const Segment& segment,
                      std::string* message = nullptr) {
  const std::vector<SegmentPart> parts = segment.Parts();
  const ReadTicket ticket = store.Read(id, parts);
  size_t next = 0;
  const auto deadline = Deadline();
  while (std::chrono::steady_clock::now() < deadline) {
    for (DiskEvent& event : WaitEvents(store, 1)) {
      if (event.ticket != ticket) continue;
      if (event.kind == DiskEvent::Kind::kReadFailed) {
        if (message != nullptr) *message = event.message;
        return false;
      }
      EXPECT_EQ(event.kind, DiskEvent::Kind::kPart);
      EXPECT_LT(next, parts.size());
      if (next >= parts.size()) return false;
      EXPECT_EQ(event.part, parts[next]);
      EXPECT_EQ(event.data, segment.Bytes(parts[next])) << PartName(parts[next]);
      EXPECT_EQ(event.last, next + 1 == parts.size());
      ++next;
      if (event.last) return true;
    }
  }
  ADD_FAILURE() << "a ticket without an end";
  return false;
}

inline std::unique_ptr<DiskStore> Open(DiskOptions options) {
  auto store = DiskStore::Open(std::move(options));
  EXPECT_TRUE(store.has_value()) << store.error().message;
  return std::move(*store);
}

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace fathom::disk_test
