// The disk tier under the engine: sessions stay warm over a restart, and whatever happens to the
// files, the text is what a cold engine says.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "cache/disk_io_posix.h"
#include "cache/disk_io_testing.h"
#include "engine/testing_model.h"
#include "model/testing.h"

namespace fathom {
namespace {

namespace fs = std::filesystem;
using Traced = std::vector<std::pair<TokenId, float>>;

class EngineDisk : public DemoModelTest {
 protected:
  static std::vector<TokenId> Text(int64_t length, int64_t skip = 0) {
    const auto& prompt = model_->golden.back().prompt;
    return {prompt.begin() + skip, prompt.begin() + skip + length};
  }

  static std::shared_ptr<DiskStore> Store(const std::string& path,
                                          std::shared_ptr<DiskIo> io = nullptr,
                                          const std::string& model = "demo") {
    const Geometry geometry = *MakeGeometry(model_->config, {});
    auto store =
        DiskStore::Open({.path = path,
                         .fingerprint = MakeDiskFingerprint(R"({"model":")" + model + "\"}"),
                         .block_tokens = geometry.options.block_tokens,
                         .block_bytes = geometry.block_bytes,
                         .io = std::move(io)});
    EXPECT_TRUE(store.has_value()) << store.error().message;
    return std::move(*store);
  }

  static std::unique_ptr<Engine> Start(std::shared_ptr<DiskStore> store, DiskWindows windows = {},
                                       int32_t blocks = 40, int32_t bundles = -1) {
    return StartModel({.max_model_len = 8'192,
                       .max_num_seqs = 4,
                       .num_blocks = blocks,
                       .num_bundles = bundles,
                       .disk = std::move(store),
                       .disk_windows = windows});
  }

  struct Reply {
    Traced trace;
    PrefixReport prefix;
    std::vector<TokenId> tokens;
  };
  static Reply Run(Engine& engine, std::vector<TokenId> prompt, int64_t tokens = 6) {
    auto queue = std::make_shared<Collector>();
    Request request = Ask(queue, std::move(prompt), tokens);
    request.ignore_eos = true;
    request.logprobs = 0;
    const auto answer = queue->Wait(*engine.Submit(std::move(request)));
    EXPECT_EQ(answer.finish, FinishReason::kLength) << answer.error.message;
    return {Trace(answer), answer.report->prefix, answer.tokens};
  }
  static Traced Cold(const std::vector<TokenId>& prompt, int64_t tokens = 6) {
    auto engine = StartModel({.max_model_len = 8'192, .max_num_seqs = 1, .prefix_caching = false});
    return Run(*engine, prompt, tokens).trace;
  }
  template <class Condition>
  static bool WaitFor(const Condition& condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return true;
  }
  static std::vector<fs::path> Files(const std::string& path) {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(path)) {
      if (entry.path().extension() == kSegmentSuffix) files.push_back(entry.path());
    }
    return files;
  }
};

TEST_F(EngineDisk, ARestartedServerIsWarm) {
  const testing::TemporaryDirectory folder;
  std::vector<std::vector<TokenId>> talks;
  std::vector<Traced> right;
  for (const int64_t length : {513, 770, 1'031, 2'049, 127, 64 + 65}) {
    talks.push_back(Text(length, 2 * length));
  }
  {
    auto engine = Start(Store(folder.path()));
    for (auto& talk : talks) {
      const Reply reply = Run(*engine, talk);
      talk.insert(talk.end(), reply.tokens.begin(), reply.tokens.end());
    }
  }
  EXPECT_FALSE(Files(folder.path()).empty());
  auto engine = Start(Store(folder.path()));
  for (const auto& talk : talks) {
    std::vector<TokenId> next = talk;
    const std::vector<TokenId> said = Text(40, 7'000);
    next.insert(next.end(), said.begin(), said.end());
    const Reply reply = Run(*engine, next);
    // The last token of an answer was never computed.
    EXPECT_EQ(reply.prefix.boundary, static_cast<int64_t>(talk.size()) - 1)
        << reply.prefix.Reason();
    EXPECT_EQ(reply.prefix.disk_tokens, reply.prefix.boundary);
    EXPECT_TRUE(reply.trace == Cold(next));
    // And now it is in memory.
    EXPECT_EQ(Run(*engine, next).prefix.disk_tokens, 0);
  }
  ASSERT_TRUE(engine->WaitIdle(std::chrono::seconds(60)));
  ExpectAllReturned(*engine);
}

// An answer computed again ends where a bundle lies on disk: the next turn must not need the disk
// for so little, nor fall back to the end of the prompt.
TEST_F(EngineDisk, ATurnAfterARepeatedTurnGoesOnFromItsAnswer) {
  const testing::TemporaryDirectory folder;
  std::vector<TokenId> talk = Text(600);
  {
    auto engine = Start(Store(folder.path()));
    const Reply reply = Run(*engine, talk, 20);
    talk.insert(talk.end(), reply.tokens.begin(), reply.tokens.end());
  }
  auto engine = Start(Store(folder.path()));
  EXPECT_GT(Run(*engine, Text(600), 20).prefix.disk_tokens, 0);
  std::vector<TokenId> next = talk;
  const std::vector<TokenId> said = Text(15, 7'000);
  next.insert(next.end(), said.begin(), said.end());
  const Reply reply = Run(*engine, next);
  EXPECT_EQ(reply.prefix.boundary, static_cast<int64_t>(talk.size()) - 1) << reply.prefix.Reason();
  EXPECT_TRUE(reply.trace == Cold(next));
}

// Turn after turn in memory for one: every turn but the last comes from disk.
TEST_F(EngineDisk, ATurnWritesItsNewBlocksAlone) {
  const testing::TemporaryDirectory folder;
  std::vector<TokenId> talk = Text(1'000);
  int64_t bytes = 0;
  for (int turn = 0; turn < 5; ++turn) {
    auto engine = Start(Store(folder.path()));
    const Reply reply = Run(*engine, talk);
    if (turn > 0) {
      EXPECT_GE(reply.prefix.boundary, static_cast<int64_t>(talk.size()) - 301);
    }
    EXPECT_TRUE(reply.trace == Cold(talk)) << turn;
    talk.insert(talk.end(), reply.tokens.begin(), reply.tokens.end());
    const std::vector<TokenId> said = Text(300, 2'000 + 500 * turn);
    talk.insert(talk.end(), said.begin(), said.end());
    engine.reset();
    int64_t now = 0;
    for (const fs::path& file : Files(folder.path()))
      now += static_cast<int64_t>(fs::file_size(file));
    if (turn > 1) {
      // About two blocks and a few bundles a turn, not the whole talk again.
      EXPECT_LT(now - bytes, 4 * 1'000'000) << turn;
    }
    bytes = now;
  }
}

TEST_F(EngineDisk, WhatDoesNotFitInMemoryComesFromDisk) {
  const testing::TemporaryDirectory folder;
  auto engine = Start(Store(folder.path()), {}, 33, 8);
  std::vector<std::vector<TokenId>> prompts;
  for (int i = 0; i < 4; ++i) prompts.push_back(Text(3'000 + i, 3'000 * i));
  uint64_t written = 0;
  for (int round = 0; round < 3; ++round) {
    for (const auto& prompt : prompts) {
      const Reply reply = Run(*engine, prompt);
      if (round == 0) {  // a slow disk has it all before the next one takes its place in memory
        ++written;
        ASSERT_TRUE(WaitFor([&] { return engine->stats().disk.paths_written >= written; }));
        continue;
      }
      EXPECT_EQ(reply.prefix.boundary, static_cast<int64_t>(prompt.size()) - 1)
          << reply.prefix.Reason();
      if (round == 2) {
        EXPECT_TRUE(reply.trace == Cold(prompt));
      }
    }
  }
  EXPECT_GT(engine->stats().prompt_from_disk, 0u);
}

TEST_F(EngineDisk, DamagedFilesAreRefusedByNameAndComputedAgain) {
  const std::vector<TokenId> prompt = Text(1'500);
  const Traced right = Cold(prompt);
  testing::TemporaryDirectory source;
  { Run(*Start(Store(source.path())), prompt); }
  const std::vector<fs::path> files = Files(source.path());
  ASSERT_EQ(files.size(), 1u);
  const auto size = static_cast<int64_t>(fs::file_size(files[0]));
  int64_t whole = 0, computed = 0;
  const auto check = [&](const std::string& folder, const std::string& what) {
    auto engine = Start(Store(folder));
    const Reply reply = Run(*engine, prompt);
    EXPECT_TRUE(reply.trace == right) << what;
    if (reply.prefix.boundary == 1'499) {
      ++whole;
      return;
    }
    ++computed;
    const EngineStats stats = engine->stats();
    EXPECT_GT(stats.disk.loads_failed + static_cast<uint64_t>(stats.disk.store.refused) +
                  stats.disk.orphans,
              0u)
        << what << ": " << reply.prefix.Reason();
  };
  const auto copy = [&](const std::string& to) {
    const fs::path target = fs::path(to) / files[0].filename();
    fs::copy_file(files[0], target);
    return target;
  };
  for (int64_t cut = 0; cut < size; cut += 4'096 * (kSanitized ? 170 : 29)) {
    const testing::TemporaryDirectory folder;
    fs::resize_file(copy(folder.path()), static_cast<uintmax_t>(cut));
    check(folder.path(), "cut at " + std::to_string(cut));
  }
  for (int64_t at = 100; at < size; at += size / (kSanitized ? 4 : 25)) {
    const testing::TemporaryDirectory folder;
    const fs::path target = copy(folder.path());
    std::fstream file(target, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char byte = static_cast<char>(file.get());
    file.seekp(at);
    file.put(static_cast<char>(byte ^ 0x10));
    file.close();
    check(folder.path(), "flipped at " + std::to_string(at));
  }
  EXPECT_GT(computed, kSanitized ? 2 : 10);
}

TEST_F(EngineDisk, FilesOfAnotherModelAreLeftAlone) {
  const testing::TemporaryDirectory folder;
  const std::vector<TokenId> prompt = Text(900);
  { Run(*Start(Store(folder.path(), nullptr, "other")), prompt); }
  auto store = Store(folder.path());
  ASSERT_FALSE(store->refused().empty());
  EXPECT_NE(store->refused()[0].reason.find("other"), std::string::npos);
  auto engine = Start(store);
  EXPECT_EQ(Run(*engine, prompt).prefix.boundary, 0);
}

TEST_F(EngineDisk, AFailingDiskCostsNothingButTime) {
  const std::vector<TokenId> prompt = Text(1'300);
  const Traced right = Cold(prompt);
  const testing::TemporaryDirectory folder;
  { Run(*Start(Store(folder.path())), prompt); }
  // Reads fail, one after the other.
  for (int n = 1; n < 40; n += kSanitized ? 19 : 6) {
    auto io = std::make_shared<FaultyDiskIo>(MakePosixDiskIo());
    auto store = Store(folder.path(), io);
    io->FailAt(n, EIO);
    auto engine = Start(store);
    EXPECT_TRUE(Run(*engine, prompt).trace == right) << n;
  }
  // A full disk: the text is right, the failure counted, the files that were there are intact.
  const testing::TemporaryDirectory full;
  auto io = std::make_shared<FaultyDiskIo>(MakePosixDiskIo());
  auto store = Store(full.path(), io);
  io->FailAlways("write", ENOSPC);
  {
    auto engine = Start(store);
    EXPECT_TRUE(Run(*engine, prompt).trace == right);
    EXPECT_TRUE(WaitFor([&] { return engine->stats().disk.write_failures > 0; }));
    Run(*engine, Text(20, 4'000), 1);  // goes on
  }
  EXPECT_TRUE(Files(full.path()).empty());
}

TEST_F(EngineDisk, TwoEnginesOnOneFolder) {
  const testing::TemporaryDirectory folder;
  std::vector<TokenId> talk = Text(800);
  auto one = Start(Store(folder.path()));
  auto other = Start(Store(folder.path()));
  for (int turn = 0; turn < 4; ++turn) {
    Engine& engine = turn % 2 == 0 ? *one : *other;
    const Reply reply = Run(engine, talk);
    EXPECT_TRUE(reply.trace == Cold(talk)) << turn;
    talk.insert(talk.end(), reply.tokens.begin(), reply.tokens.end());
    const std::vector<TokenId> said = Text(100, 3'000 + 200 * turn);
    talk.insert(talk.end(), said.begin(), said.end());
  }
  for (const fs::path& file : Files(folder.path())) fs::remove(file);  // behind their backs
  for (Engine* engine : {one.get(), other.get()}) {
    EXPECT_TRUE(Run(*engine, talk).trace == Cold(talk));
    EXPECT_TRUE(Run(*engine, Text(1'200, 6'000)).trace == Cold(Text(1'200, 6'000)));
  }
}

TEST_F(EngineDisk, ARequestThatLeavesWhileItsPrefixIsReadHarmsNothing) {
  const testing::TemporaryDirectory folder;
  const std::vector<TokenId> prompt = Text(kSanitized ? 600 : 4'000);
  { Run(*Start(Store(folder.path())), prompt); }
  for (int i = 0; i < (kSanitized ? 4 : 20); ++i) {
    auto engine = Start(Store(folder.path()));
    auto queue = std::make_shared<Collector>();
    Request request = Ask(queue, prompt, 4);
    const RequestId id = *engine->Submit(std::move(request));
    std::this_thread::sleep_for(std::chrono::microseconds(300 * i));
    engine->Cancel(id);
    queue->Wait(id);
    ASSERT_TRUE(engine->WaitIdle(std::chrono::seconds(60)));
    EXPECT_TRUE(WaitFor([&] { return engine->stats().blocks_used == 0; }));  // the read's end
    ExpectAllReturned(*engine);
  }
}

TEST_F(EngineDisk, RowsAloneAreEnough) {
  const testing::TemporaryDirectory folder;
  const DiskWindows windows = *DiskWindows::Parse("none", 256);
  const std::vector<TokenId> prompt = Text(1'700);
  { Run(*Start(Store(folder.path()), windows), prompt); }
  auto engine = Start(Store(folder.path()), windows);
  const Reply reply = Run(*engine, prompt);
  EXPECT_EQ(reply.prefix.boundary, 1'536 - 6 * 128) << reply.prefix.Reason();
  EXPECT_EQ(reply.prefix.disk_tokens, 1'536 - 6 * 128);
  EXPECT_TRUE(reply.trace == Cold(prompt));
}

TEST_F(EngineDisk, CheckpointsAloneAreKeptWhereThePolicySaysSo) {
  const testing::TemporaryDirectory folder;
  const DiskWindows windows = *DiskWindows::Parse("checkpoint:512", 256);
  const std::vector<TokenId> prompt = Text(1'700);
  { Run(*Start(Store(folder.path()), windows), prompt); }
  auto engine = Start(Store(folder.path()), windows);
  const Reply reply = Run(*engine, prompt);
  EXPECT_EQ(reply.prefix.boundary, 1'536) << reply.prefix.Reason();
  EXPECT_TRUE(reply.trace == Cold(prompt));
  for (const char* bad : {"", "some", "checkpoint:", "checkpoint:0", "checkpoint:100",
                          "checkpoint:512x", "checkpoint:-256"}) {
    const auto parsed = DiskWindows::Parse(bad, 256);
    ASSERT_FALSE(parsed.has_value()) << bad;
    EXPECT_NE(parsed.error().message.find("--disk-windows"), std::string::npos);
  }
}

}  // namespace
}  // namespace fathom
