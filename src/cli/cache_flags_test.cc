#include "cli/cache_flags.h"

#include <gmock/gmock.h>

#include <CLI/CLI.hpp>

namespace fathom {
namespace {

using ::testing::HasSubstr;

class NoEvents final : public CacheEventSink {
 public:
  void Publish(std::vector<CacheEvent>) override {}
};

// The flag that is refused, and that its sentence begins with it; empty: none is.
std::string Refused(const CacheReuseOptions& options) {
  const Status status = CheckReuse(options);
  if (status) return "";
  EXPECT_EQ(status.error().code, Code::kInvalidArgument);
  EXPECT_EQ(status.error().message.find(status.error().param + " "), 0U) << status.error().message;
  return status.error().param;
}

TEST(CacheFlags, WhatHasNoEffectOrContradictsIsRefusedByName) {
  EXPECT_EQ(Refused({}), "");
  EXPECT_EQ(Refused({.disk_windows = "none"}), "--disk-windows");
  EXPECT_EQ(Refused({.disk_windows = "checkpoint:256"}), "--disk-windows");
  EXPECT_EQ(Refused({.kv_disk_size = 1}), "--kv-disk-size");
  EXPECT_EQ(Refused({.kv_disk_path = "/kv", .kv_disk_size = 1, .disk_windows = "none"}), "");
}

TEST(CacheFlags, WithoutPrefixCachingThereIsNothingToKeepOrToPublish) {
  EXPECT_EQ(Refused({.prefix_caching = false}), "");
  EXPECT_EQ(Refused({.prefix_caching = false, .kv_host_size = 1}), "--kv-host-size");
  EXPECT_EQ(Refused({.prefix_caching = false, .kv_disk_path = "/kv"}), "--kv-disk-path");
  EXPECT_EQ(Refused({.prefix_caching = false, .kv_disk_size = 1}), "--kv-disk-size");
  EXPECT_EQ(Refused({.prefix_caching = false, .disk_windows = "none"}), "--disk-windows");
  CacheReuseOptions events = {.events = std::make_shared<NoEvents>()};
  EXPECT_EQ(Refused(events), "");
  events.prefix_caching = false;
  EXPECT_EQ(Refused(events), "--kv-events-config");
}

TEST(CacheFlags, AnEmptyDiskPathIsRefusedWhereItIsGiven) {
  const auto error = [](std::vector<std::string> arguments) -> std::string {
    CLI::App app("test");
    CacheReuseOptions options;
    int status = 0;
    auto command = Command::Add(app, "go", "summary", "");
    AddCacheFlags(*command, options);
    command->OnRun(&status, [](Command&) { return 0; });
    arguments.emplace_back("go");  // CLI11's vector form is reversed
    try {
      app.parse(arguments);
    } catch (const CLI::ParseError& refused) {
      return refused.what();
    }
    return "";
  };
  EXPECT_THAT(error({"", "--kv-disk-path"}), HasSubstr("--kv-disk-path: FOLDER must not be empty"));
  EXPECT_EQ(error({"/kv", "--kv-disk-path"}), "");
  EXPECT_EQ(error({}), "");
}

}  // namespace
}  // namespace fathom
