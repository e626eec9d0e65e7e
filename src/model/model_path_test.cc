#include "model/model_path.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "model/testing.h"

namespace fathom {
namespace {

using ::testing::HasSubstr;

// Sets the three variables that place the cache, and puts them back.
class ResolveTest : public ::testing::Test {
 protected:
  ResolveTest() {
    for (const char* name : {"HF_HUB_CACHE", "HF_HOME", "HOME"}) {
      const char* value = std::getenv(name);
      saved_[name] = value ? std::optional<std::string>(value) : std::nullopt;
      ::unsetenv(name);
    }
  }
  ~ResolveTest() override {
    for (const auto& [name, value] : saved_) {
      if (value) ::setenv(name.c_str(), value->c_str(), 1);
      else ::unsetenv(name.c_str());
    }
  }

  // A cached model under `hub`; returns its snapshot folder.
  std::string Cache(const std::string& hub, const std::string& folder, const std::string& ref) {
    const std::string snapshot = dir_ / (hub + "/" + folder + "/snapshots/abc123");
    std::filesystem::create_directories(snapshot);
    std::filesystem::create_directories(dir_ / (hub + "/" + folder + "/refs"));
    testing::WriteAll(dir_ / (hub + "/" + folder + "/refs/main"), ref);
    return snapshot;
  }

  std::string Refusal(const std::string& model) {
    const auto resolved = ResolveModel(model);
    EXPECT_FALSE(resolved);
    if (resolved) return "";
    EXPECT_EQ(resolved.error().param, "model");
    return resolved.error().message;
  }

  testing::TemporaryDirectory dir_;
  std::map<std::string, std::optional<std::string>> saved_;
};

TEST_F(ResolveTest, AnExistingDirectoryIsTakenAsItIs) {
  EXPECT_EQ(ResolveModel(dir_.path()).value(), dir_.path());
}

TEST_F(ResolveTest, FindsTheSnapshotOfTheMainRef) {
  const std::string snapshot = Cache("hub", "models--org--name", "abc123\n");
  ::setenv("HF_HOME", dir_.path().c_str(), 1);
  EXPECT_EQ(ResolveModel("org/name").value(), snapshot);
}

TEST_F(ResolveTest, HubCacheGoesBeforeHomeBeforeTheDefault) {
  const std::string first = Cache("first", "models--org--name", "abc123");
  const std::string second = Cache("second/hub", "models--org--name", "abc123");
  const std::string third = Cache("third/.cache/huggingface/hub", "models--org--name", "abc123");
  ::setenv("HOME", (dir_ / "third").c_str(), 1);
  EXPECT_EQ(ResolveModel("org/name").value(), third);
  ::setenv("HF_HOME", (dir_ / "second").c_str(), 1);
  EXPECT_EQ(ResolveModel("org/name").value(), second);
  ::setenv("HF_HUB_CACHE", (dir_ / "first").c_str(), 1);
  EXPECT_EQ(ResolveModel("org/name").value(), first);
}

TEST_F(ResolveTest, TheErrorListsEveryPlace) {
  ::setenv("HF_HUB_CACHE", dir_.path().c_str(), 1);
  const std::string message = Refusal("org/name");
  EXPECT_THAT(message, HasSubstr("org/name (no directory)"));
  EXPECT_THAT(message, HasSubstr(dir_ / "models--org--name/refs/main"));
  ::unsetenv("HF_HUB_CACHE");
  EXPECT_THAT(Refusal("org/name"), HasSubstr("none of HF_HUB_CACHE, HF_HOME, HOME is set"));
  EXPECT_THAT(Refusal("no-such-folder"), HasSubstr("the name is not ORG/NAME"));
  EXPECT_THAT(Refusal(""), HasSubstr("empty"));
}

TEST_F(ResolveTest, ARefWithoutItsSnapshotIsAnError) {
  Cache("hub", "models--org--name", "gone");
  ::setenv("HF_HUB_CACHE", (dir_ / "hub").c_str(), 1);
  EXPECT_THAT(Refusal("org/name"), HasSubstr("snapshots/gone (named by refs/main, not there)"));
  for (const char* ref : {"", "..", "../abc123", "a/b"}) {
    Cache("hub", "models--org--name", ref);
    EXPECT_THAT(Refusal("org/name"), HasSubstr("does not hold a revision"));
  }
}

TEST_F(ResolveTest, NamesCannotLeaveTheCache) {
  Cache("hub", "models--org--name", "abc123");
  ::setenv("HF_HUB_CACHE", (dir_ / "hub").c_str(), 1);
  for (const char* name : {"../org", "org/..", "/name", "org/", "a/b/c", "./x", "~/x"}) {
    EXPECT_THAT(Refusal(name), HasSubstr("the name is not ORG/NAME")) << name;
  }
}

}  // namespace
}  // namespace fathom
