// `fathom cache` on folders that a DiskStore has written.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cache/disk_test_util.h"
#include "cli/cache_prune.h"
#include "cli/commands.h"

namespace fathom {
namespace {

using namespace disk_test;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;
using ::testing::Not;

struct Result {
  int status = -1;
  std::string out, err;
};

Result RunCache(const std::vector<std::string>& arguments) {
  CLI::App app("test", "fathom");
  Result result;
  AddCacheCommand(app, &result.status);
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
  reversed.emplace_back("cache");
  try {
    app.parse(reversed);
  } catch (const CLI::ParseError& error) {
    result.status = kUsageError;
    std::fprintf(stderr, "%s\n", error.what());
  }
  std::fflush(stdout);
  result.out = testing::internal::GetCapturedStdout();
  result.err = testing::internal::GetCapturedStderr();
  return result;
}

// A chain of two segments and a lone one, in the order in which they were used.
class CacheCommand : public testing::Test {
 protected:
  CacheCommand() {
    Random random(61);
    auto store = Open(Options(folder_.path()));
    Segment root = MakeSegment(random, 256);
    root.header.session = "alice\x1b[31m";
    const DiskEvent first = WriteSegment(*store, root);
    Add(first);
    Add(WriteSegment(*store, MakeSegment(random, 200, first.header.get())));
    Add(WriteSegment(*store, MakeSegment(random, 100)));
    for (const DiskEvent& event : written_) bytes_ += event.header->file_bytes;
  }
  void Add(const DiskEvent& event) {
    written_.push_back(event);
    names_.push_back(SegmentFileName(*event.header));
  }
  std::string PathOf(size_t i) const { return folder_.path() + "/" + names_[i]; }
  void Flip(size_t i, int64_t at) const {
    std::string bytes = ReadFile(PathOf(i));
    bytes[static_cast<size_t>(at)] = static_cast<char>(bytes[static_cast<size_t>(at)] ^ 4);
    WriteFile(PathOf(i), bytes);
  }

  TemporaryFolder folder_;
  std::vector<DiskEvent> written_;
  std::vector<std::string> names_;
  int64_t bytes_ = 0;
};

TEST_F(CacheCommand, LsListsParentsFirstAndEscapesWhatFilesSay) {
  const Result result = RunCache({"ls", folder_.path()});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("0..256"));
  EXPECT_THAT(result.out, HasSubstr("256..456"));
  EXPECT_THAT(result.out, HasSubstr("alice\\u001b[31m"));
  EXPECT_THAT(result.out, Not(HasSubstr("\x1b")));
  EXPECT_THAT(result.out, HasSubstr("3 segments, "));
  EXPECT_LT(result.out.find(names_[0].substr(0, 12)), result.out.find(names_[1].substr(0, 12)));

  const Result json = RunCache({"ls", folder_.path(), "--json"});
  const auto list = nlohmann::json::parse(json.out);
  EXPECT_EQ(list["bytes"], bytes_);
  ASSERT_EQ(list["segments"].size(), 3U);
  for (const auto& segment : list["segments"]) {
    EXPECT_EQ(segment["model"], "test");
    if (segment["name"] != names_[1]) continue;
    EXPECT_EQ(segment["parent"], written_[0].header->last_block().Hex());
  }
}

TEST_F(CacheCommand, LsNamesWhatIsNotUsable) {
  Flip(2, 100);
  WriteFile(folder_.path() + "/" + names_[2] + ".bad", "x");
  const Result result = RunCache({"ls", folder_.path()});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.out, HasSubstr("not usable: " + names_[2] + ": the header's checksum"));
  EXPECT_THAT(result.out, HasSubstr("put aside as damaged: " + names_[2] + ".bad"));
}

TEST_F(CacheCommand, ShowPrintsPartsAndTheChain) {
  const Result result = RunCache({"show", folder_.path(), names_[1].substr(0, 10)});
  EXPECT_EQ(result.status, 0) << result.err;
  for (const std::string& part :
       {names_[1], std::string("tokens       256..456"), std::string("kv_cache_dtype"),
        written_[0].header->last_block().Hex(), std::string("block       1"),
        names_[0].substr(0, 12) + "  0..256\n  " + names_[1].substr(0, 12) + "  256..456\n"}) {
    EXPECT_THAT(result.out, HasSubstr(part));
  }
  const auto json =
      nlohmann::json::parse(RunCache({"show", folder_.path(), names_[1], "--json"}).out);
  EXPECT_EQ(json["chain"], (nlohmann::json{names_[0], names_[1]}));
  EXPECT_EQ(json["missing_before"], 0);
  EXPECT_EQ(json["fingerprint"]["fields"]["layers"], 4);
  EXPECT_EQ(json["block_parts"].size(), 2U);

  std::filesystem::remove(PathOf(0));
  EXPECT_THAT(RunCache({"show", folder_.path(), names_[1]}).out,
              HasSubstr("tokens 0..256 are not in this folder"));
}

TEST_F(CacheCommand, VerifyFailsForAFlippedByteAndNamesThePart) {
  Result result = RunCache({"verify", folder_.path()});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.out, HasSubstr("3 segments, "));
  EXPECT_THAT(result.out, HasSubstr("all good"));
  Flip(1, written_[1].header->blocks[1].offset + 7);
  result = RunCache({"verify", folder_.path()});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.out, HasSubstr("bad: " + names_[1] + ": block 1: the checksum is wrong"));
  EXPECT_EQ(RunCache({"verify", folder_.path(), names_[0]}).status, 0);
  EXPECT_EQ(RunCache({"verify", folder_.path(), names_[1]}).status, 1);
  Flip(0, 50);
  EXPECT_THAT(RunCache({"verify", folder_.path(), names_[0]}).out,
              HasSubstr("the header's checksum"));
  EXPECT_EQ(RunCache({"verify", folder_.path(), names_[0]}).status, 1);
}

TEST_F(CacheCommand, PruneToASizeTakesTheLeastRecentlyUsedLeaf) {
  // Used in the order root, child, lone: the child is the oldest leaf.
  const std::string size = std::to_string(bytes_ - 1);
  const Result dry = RunCache({"prune", folder_.path(), "--max-size", size, "--dry-run"});
  EXPECT_EQ(dry.status, 0) << dry.err;
  EXPECT_THAT(dry.out, HasSubstr("would remove " + names_[1]));
  EXPECT_EQ(folder_.Names().size(), 3U);
  const Result result = RunCache({"prune", folder_.path(), "--max-size", size});
  EXPECT_THAT(result.out, HasSubstr("removed " + names_[1]));
  EXPECT_THAT(result.out, HasSubstr("removed 1 files"));
  EXPECT_EQ(folder_.Names().size(), 2U);
  EXPECT_FALSE(std::filesystem::exists(PathOf(1)));
  RunCache({"prune", folder_.path(), "--max-size", "0"});
  EXPECT_TRUE(folder_.Names().empty());
}

TEST_F(CacheCommand, PruneByAgeKeepsParentsOfWhatIsStillUsed) {
  const auto hours = [](int n) {
    return std::filesystem::file_time_type::clock::now() - std::chrono::hours(n);
  };
  std::filesystem::last_write_time(PathOf(0), hours(100));
  std::filesystem::last_write_time(PathOf(1), hours(1));
  std::filesystem::last_write_time(PathOf(2), hours(50));
  const Result result = RunCache({"prune", folder_.path(), "--older-than", "2d", "--json"});
  const auto json = nlohmann::json::parse(result.out);
  ASSERT_EQ(json["removed"].size(), 1U);
  EXPECT_EQ(json["removed"][0]["name"], names_[2]);
  EXPECT_EQ(json["removed"][0]["why"], "last used 2 d ago");
  EXPECT_EQ(folder_.Names().size(), 2U);
}

TEST_F(CacheCommand, PruneBadRemovesWhatVerifyNamesAndLeftovers) {
  Flip(2, written_[2].header->blocks[0].offset);
  WriteFile(folder_.path() + "/a.fkv.bad", "x");
  WriteFile(folder_.path() + "/a.fkv.1.00.tmp", "x");
  WriteFile(folder_.path() + "/b.fkv", "no segment");
  WriteFile(folder_.path() + "/mine.txt", "x");
  const Result result = RunCache({"prune", folder_.path(), "--bad"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("removed 3 files"));
  EXPECT_EQ(folder_.Names().size(), 4U);
  // What is no segment at all may be somebody's: named, but left.
  const Result verified = RunCache({"verify", folder_.path()});
  EXPECT_EQ(verified.status, 1);
  EXPECT_THAT(verified.out, HasSubstr("bad: b.fkv: is no segment file"));
  EXPECT_THAT(verified.out, HasSubstr("2 segments, "));
}

TEST_F(CacheCommand, LinksFoldersAndPipesAreLeftAloneAndNotBad) {
  const std::string& path = folder_.path();
  std::filesystem::create_symlink(names_[0], path + "/link.fkv");
  std::filesystem::create_directory(path + "/folder.fkv");
  ASSERT_EQ(mkfifo((path + "/pipe.fkv").c_str(), 0600), 0);
  std::filesystem::create_symlink(names_[0], path + "/link.fkv.bad");
  std::filesystem::create_directory(path + "/folder.fkv.bad");
  const Result result = RunCache({"verify", path});
  EXPECT_EQ(result.status, 0);
  EXPECT_THAT(result.out, Not(HasSubstr("bad: ")));
  for (const char* name : {"link", "folder", "pipe"}) {
    EXPECT_THAT(result.out, HasSubstr(fmt::format("skipped: {}.fkv: is no regular file", name)));
    EXPECT_EQ(RunCache({"verify", path, name}).status, 0) << name;
  }
  EXPECT_THAT(result.out, HasSubstr("3 segments, "));
  const auto json = nlohmann::json::parse(RunCache({"verify", path, "--json"}).out);
  EXPECT_EQ(json["bad"].size(), 0U);
  EXPECT_EQ(json["skipped"].size(), 3U);
  EXPECT_THAT(RunCache({"ls", path}).out, HasSubstr("not usable: link.fkv: is no regular file"));
  const size_t files = folder_.Names().size();
  EXPECT_THAT(RunCache({"prune", path, "--bad"}).out, HasSubstr("removed 0 files"));
  EXPECT_EQ(folder_.Names().size(), files);
}

TEST_F(CacheCommand, MistakesAreNamed) {
  const auto expect = [](const std::vector<std::string>& arguments, int status,
                         const std::string& sentence) {
    const Result result = RunCache(arguments);
    EXPECT_EQ(result.status, status) << sentence;
    EXPECT_THAT(result.err, HasSubstr(sentence));
    EXPECT_EQ(result.out, "");
  };
  const std::string& path = folder_.path();
  expect({"ls", path + "/absent"}, 1, path + "/absent: No such file or directory");
  expect({"ls", PathOf(0)}, 2, PathOf(0) + ": Not a directory");
  expect({"ls"}, 2, "cache ls: which folder?");
  expect({}, 2, "'' is not one of ls, show, verify, prune");
  expect({"list", path}, 2, "'list' is not one of ls, show, verify, prune");
  expect({"ls", path, "x"}, 2, "'x' is one argument too many");
  expect({"ls", path, "--bad"}, 2, "belong to cache prune");
  expect({"show", path}, 2, "which segment?");
  expect({"show", path, "zz"}, 1, "there is no segment 'zz'");
  expect({"verify", path, "zz"}, 1, "there is no segment 'zz'");
  expect({"prune", path}, 2, "give --max-size, --older-than or --bad");
  expect({"prune", path, "--older-than", "soon"}, 2, "'soon' is not a duration");
  expect({"prune", path, "--max-size", "-1"}, 2, "--max-size");
  EXPECT_EQ(folder_.Names().size(), 3U);
}

TEST(ParseDuration, ReadsOneNumberAndOneUnit) {
  EXPECT_EQ(ParseDuration("90s"), 90'000'000'000);
  EXPECT_EQ(ParseDuration("2w"), int64_t{14} * 86'400 * 1'000'000'000);
  for (const char* text : {"", "d", "7", "7 d", "-1d", "1.5h", "7dd", "99999999999w"}) {
    EXPECT_FALSE(ParseDuration(text).has_value()) << text;
  }
}

}  // namespace
}  // namespace fathom
