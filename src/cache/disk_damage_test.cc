// Files that are not what was written: they are refused by name or the part's read fails; no wrong
// byte ever arrives. And files that are somebody else's: left alone.
#include <sys/stat.h>

#include <algorithm>

#include "cache/disk_test_util.h"

namespace fathom {
namespace {

using namespace disk_test;  // NOLINT(google-build-using-namespace)

// One segment in a folder, and its file's bytes.
struct Written {
  TemporaryFolder folder;
  Segment segment;
  SegmentHeader header;
  std::string name, path, bytes;

  explicit Written(int64_t tokens) {
    Random random(21);
    segment = MakeSegment(random, tokens);
    segment.header.session = "s1";
    auto store = Open(Options(folder.path()));
    header = *WriteSegment(*store, segment).header;
    name = SegmentFileName(header);
    path = folder.path() + "/" + name;
    bytes = ReadFile(path);
  }
  void Restore() const {
    for (const std::string& file : folder.Names())
      std::filesystem::remove(folder.path() + "/" + file);
    WriteFile(path, bytes);
  }
};

// The damaged file is either refused at Open, or reading it whole fails; ReadsBack compares bytes.
// Whichever it is, the message names the file, and a store opened later offers it no more.
void ExpectNotUsable(const Written& written, bool by_header) {
  auto store = Open(Options(written.folder.path()));
  std::string message;
  if (store->segments().empty()) {
    ASSERT_EQ(store->refused().size(), 1U);
    message = store->refused()[0].reason;
  } else {
    EXPECT_FALSE(by_header);
    ASSERT_FALSE(ReadsBack(*store, store->segments()[0].id, written.segment, &message));
    EXPECT_TRUE(WaitUntil([&] { return store->segments().empty(); }));
  }
  EXPECT_NE(message.find(written.name), std::string::npos) << message;
  store = Open(Options(written.folder.path()));
  EXPECT_TRUE(store->segments().empty());
}

TEST(DiskDamage, FilesCutAnywhereAreRefused) {
  const Written written(300);
  const auto header_bytes = static_cast<size_t>(SegmentHeaderBytes(written.header));
  std::vector<size_t> cuts;
  for (size_t cut = 0; cut < written.bytes.size(); cut += 4096) cuts.push_back(cut);
  for (size_t cut = 0; cut < header_bytes; ++cut) cuts.push_back(cut);
  cuts.push_back(written.bytes.size() - 1);
  for (const size_t cut : cuts) {
    SCOPED_TRACE(cut);
    written.Restore();
    std::filesystem::resize_file(written.path, cut);
    auto store = Open(Options(written.folder.path()));
    EXPECT_TRUE(store->segments().empty());
    ASSERT_EQ(store->refused().size(), 1U);
    EXPECT_EQ(store->refused()[0].name, written.name);
    // An empty file has no magic: it may be anybody's.
    EXPECT_EQ(store->refused()[0].damaged, cut > 0);
    EXPECT_EQ(std::filesystem::exists(written.path + ".bad"), cut > 0);
    EXPECT_EQ(store->stats().refused, 1);
  }
  written.Restore();
  WriteFile(written.path, written.bytes + "x");
  ExpectNotUsable(written, true);
}

TEST(DiskDamage, AFlippedByteOfTheHeaderIsRefused) {
  const Written written(300);
  const auto header_bytes = static_cast<size_t>(SegmentHeaderBytes(written.header));
  const auto all = std::as_bytes(std::span(written.bytes));
  for (size_t at = 0; at < header_bytes; ++at) {
    for (const uint8_t flip : {0x01, 0x80, 0xff}) {
      std::vector<std::byte> bytes(all.begin(), all.end());
      bytes[at] ^= std::byte{flip};
      const auto parsed =
          ParseSegmentHeader(bytes, static_cast<int64_t>(bytes.size()), written.name);
      ASSERT_FALSE(parsed.has_value()) << at;
      EXPECT_NE(parsed.error().message.find(written.name), std::string::npos);
    }
  }
  for (size_t at = 0; at < header_bytes; at += 97) {
    SCOPED_TRACE(at);
    written.Restore();
    std::string bytes = written.bytes;
    bytes[at] = static_cast<char>(bytes[at] ^ 0x20);
    WriteFile(written.path, bytes);
    ExpectNotUsable(written, true);
  }
}

TEST(DiskDamage, AFlippedByteOfAnyPartFailsItsRead) {
  const Written written(300);
  std::vector<SegmentPartEntry> entries = written.header.blocks;
  entries.insert(entries.end(), written.header.bundle_parts.begin(),
                 written.header.bundle_parts.end());
  for (const SegmentPartEntry& entry : entries) {
    for (const int64_t at : {int64_t{0}, entry.bytes / 2, entry.bytes - 1}) {
      SCOPED_TRACE(entry.offset + at);
      written.Restore();
      std::string bytes = written.bytes;
      char& byte = bytes[static_cast<size_t>(entry.offset + at)];
      byte = static_cast<char>(byte ^ 0x01);
      WriteFile(written.path, bytes);
      ExpectNotUsable(written, false);
      EXPECT_TRUE(std::filesystem::exists(written.path + ".bad"));
    }
  }
}

TEST(DiskDamage, DamageWhileTheStoreIsOpenFailsTheReadOnly) {
  const Written written(300);
  auto store = Open(Options(written.folder.path()));
  const SegmentId id = store->segments()[0].id;
  // Cut after it was listed: the second block is gone.
  std::filesystem::resize_file(written.path,
                               static_cast<uintmax_t>(written.header.blocks[1].offset + 10));
  const ReadTicket ticket = store->Read(id, {BlockPart(0), BlockPart(1), BlockPart(2)});
  const auto events = WaitEvents(*store, 3);
  ASSERT_EQ(events.size(), 3U);
  EXPECT_EQ(events[0].data, written.segment.blocks[0]);
  EXPECT_EQ(events[1].kind, DiskEvent::Kind::kReadFailed);
  EXPECT_EQ(events[1].ticket, ticket);
  EXPECT_EQ(events[1].part, BlockPart(1));
  EXPECT_EQ(events[1].message, written.name + ": block 1: truncated");
  EXPECT_EQ(events[2].kind, DiskEvent::Kind::kRemoved);
}

TEST(DiskDamage, AFileThatVanishesIsAFailedRead) {
  const Written written(300);
  auto store = Open(Options(written.folder.path()));
  const SegmentId id = store->segments()[0].id;
  std::filesystem::remove(written.path);
  std::string message;
  EXPECT_FALSE(ReadsBack(*store, id, written.segment, &message));
  EXPECT_EQ(message, written.name + ": vanished: another process removed it");
}

TEST(DiskDamage, AFileReplacedUnderItsNameIsNeverMixedUp) {
  const Written written(300);
  auto reader = Open(Options(written.folder.path()));
  const SegmentId id = reader->segments()[0].id;
  Segment other = written.segment;  // the same tokens, other contents and one bundle fewer
  other.header.bundles.erase(other.header.bundles.begin());
  other.bundles.erase(other.bundles.begin());
  Random random(5);
  for (auto& block : other.blocks) block = RandomBytes(random, kBlockBytes);
  {
    auto writer = Open(Options(written.folder.path()));
    ASSERT_EQ(WriteSegment(*writer, other).kind, DiskEvent::Kind::kWritten);
  }
  std::string message;
  EXPECT_FALSE(ReadsBack(*reader, id, written.segment, &message));
  EXPECT_NE(message.find("is not the file it was"), std::string::npos) << message;
  EXPECT_TRUE(std::filesystem::exists(written.path));  // it is a good file
  // The next look at the folder finds it.
  Random more(6);
  StartWrite(*reader, MakeSegment(more, 50))->Commit();
  SegmentId found;
  EXPECT_TRUE(WaitUntil([&] {
    for (const DiskEvent& event : reader->TakeEvents()) {
      if (event.kind == DiskEvent::Kind::kFound) found = event.segment;
    }
    return found != SegmentId{};
  }));
  EXPECT_TRUE(ReadsBack(*reader, found, other));
  EXPECT_EQ(reader->segments().size(), 2U);
}

TEST(DiskForeign, OtherFingerprintsHashesAndSizesAreRefusedByNameAndLeftAlone) {
  const Written written(300);
  const auto refusal = [&](const DiskOptions& options) {
    auto store = Open(options);
    EXPECT_TRUE(store->segments().empty());
    EXPECT_EQ(store->stats().refused, 1);
    EXPECT_EQ(ReadFile(written.path), written.bytes);
    EXPECT_FALSE(store->refused().at(0).damaged);
    return store->refused().at(0).reason;
  };
  DiskOptions options = Options(written.folder.path());
  options.fingerprint =
      MakeDiskFingerprint(R"({"model": "test", "kv_cache_dtype": "bf16", "layers": 4})");
  EXPECT_EQ(refusal(options),
            written.name + ": kv_cache_dtype is \"fp8\" in the file and \"bf16\" here");
  options.fingerprint = MakeDiskFingerprint(R"({"a": 1, "b": [1, 2], "c": 3, "layers": 5})");
  EXPECT_EQ(refusal(options), written.name +
                                  ": a is missing in the file and 1 here; b is missing in the file "
                                  "and array here; c is missing in the file and 3 here; 3 more");
  options.fingerprint = MakeDiskFingerprint("not json");
  EXPECT_EQ(refusal(options), written.name + ": the fingerprint differs");
  options = Options(written.folder.path());
  options.algorithm = HashAlgorithm::kSha256;
  EXPECT_EQ(refusal(options),
            written.name + ": the hash of block names is xxh3 in the file and sha256 here");
  options = Options(written.folder.path());
  options.block_tokens = 256;
  EXPECT_EQ(refusal(options), written.name + ": block_tokens is 128 in the file and 256 here");
  options = Options(written.folder.path());
  options.block_bytes = 4999;
  EXPECT_EQ(refusal(options), written.name + ": block_bytes is 5000 in the file and 4999 here");
}

TEST(DiskForeign, StoresOfDifferentModelsShareAFolderWithoutMeeting) {
  const Written written(300);
  DiskOptions options = Options(written.folder.path());
  options.fingerprint = MakeDiskFingerprint(R"({"model": "another"})");
  options.max_bytes = 100'000;
  auto store = Open(options);
  Segment same_tokens = written.segment;
  Random random(3);
  for (auto& block : same_tokens.blocks) block = RandomBytes(random, kBlockBytes);
  ASSERT_EQ(WriteSegment(*store, same_tokens).kind, DiskEvent::Kind::kWritten);
  for (int i = 0; i < 20; ++i) WriteSegment(*store, MakeSegment(random, 300));
  EXPECT_GT(store->stats().evicted, 0);
  auto first = Open(Options(written.folder.path()));
  ASSERT_EQ(first->segments().size(), 1U);
  EXPECT_TRUE(ReadsBack(*first, first->segments()[0].id, written.segment));
}

TEST(DiskForeign, OtherVersionsMagicsAndRandomBytesAreLeftAlone) {
  const Written written(300);
  Random random(2);
  std::string version = written.bytes;
  version[8] = 2;
  std::string magic = written.bytes;
  magic[0] = 'G';
  std::string noise(20'000, '\0');
  for (char& c : noise) c = static_cast<char>(random());
  for (const auto& [bytes, reason] : std::vector<std::pair<std::string, std::string>>{
           {version, ": format version 2, this program reads 1"},
           {magic, ": is no segment file"},
           {noise, ": is no segment file"},
           {"", ": is no segment file"}}) {
    written.Restore();
    WriteFile(written.path, bytes);
    auto store = Open(Options(written.folder.path()));
    EXPECT_TRUE(store->segments().empty());
    ASSERT_EQ(store->refused().size(), 1U);
    EXPECT_EQ(store->refused()[0].reason, written.name + reason);
    EXPECT_FALSE(store->refused()[0].damaged);
    EXPECT_EQ(ReadFile(written.path), bytes);
  }
}

TEST(DiskForeign, FoldersLinksPipesAndRenamedFilesAreRefused) {
  const Written written(300);
  const std::string& folder = written.folder.path();
  std::filesystem::create_directory(folder + "/folder.fkv");
  std::filesystem::create_symlink(written.path, folder + "/link.fkv");
  std::filesystem::create_symlink("/nowhere", folder + "/dangling.fkv");
  ASSERT_EQ(mkfifo((folder + "/pipe.fkv").c_str(), 0600), 0);
  WriteFile(folder + "/renamed.fkv", written.bytes);
  WriteFile(folder + "/notes.txt", "not looked at");
  auto store = Open(Options(folder));
  EXPECT_EQ(store->segments().size(), 1U);
  std::vector<RefusedFile> refused = store->refused();
  ASSERT_EQ(refused.size(), 5U);
  for (const RefusedFile& file : refused) {
    EXPECT_FALSE(file.damaged);
    const std::string reason = file.name == "renamed.fkv"
                                   ? ": was renamed, its contents' name is " + written.name
                                   : ": is no regular file";
    EXPECT_EQ(file.reason, file.name + reason);
  }
  EXPECT_EQ(written.folder.Names().size(), 7U);
  EXPECT_TRUE(ReadsBack(*store, store->segments()[0].id, written.segment));
}

TEST(DiskForeign, AFileThatCannotBeReadIsRefusedAndLeftAlone) {
  const Written written(300);
  auto io = std::make_shared<FaultyDiskIo>(MakePosixDiskIo());  // root may read any file
  for (const char* operation : {"open", "size", "read"}) {
    io->Heal();
    io->FailAlways(operation, EACCES);
    DiskOptions options = Options(written.folder.path());
    options.io = io;
    auto store = Open(options);
    ASSERT_EQ(store->refused().size(), 1U);
    EXPECT_EQ(store->refused()[0].reason, written.name + ": cannot be read: Permission denied");
    EXPECT_EQ(ReadFile(written.path), written.bytes);
  }
}

}  // namespace
}  // namespace fathom
