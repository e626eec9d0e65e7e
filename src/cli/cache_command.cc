// `fathom cache`: what the disk tier's folder (--kv-disk-path) holds, whether it is sound, and
// what may go. Works on a folder that a server is using: segments never change, and one that goes
// is recomputed.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/cache_prune.h"
#include "cli/commands.h"
#include "core/amounts.h"

namespace fathom {
namespace {

struct CacheFlags {
  std::string action;
  std::string path;
  std::string segment;
  bool json = false;
  int64_t max_size = 0;
  bool has_max_size = false;
  std::string older_than;
  bool bad = false;
  bool dry_run = false;
};

void PrintJson(const nlohmann::ordered_json& json) {
  fmt::print("{}\n", json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

Status Show(const CacheListing& listing, const CacheFlags& flags) {
  if (flags.segment.empty()) {
    return FailParam(Code::kInvalidArgument, "segment",
                     "cache show {}: which segment? (the beginning of its name is enough)",
                     flags.path);
  }
  FATHOM_ASSIGN(const DiskCatalog::Entry* entry, FindSegment(listing, flags.segment));
  if (flags.json) {
    PrintJson(SegmentJson(listing, *entry));
  } else {
    fmt::print("{}", SegmentText(listing, *entry));
  }
  return {};
}

// The exit status: 1 when something is bad.
Expected<int> Verify(DiskIo& io, const CacheListing& listing, const CacheFlags& flags) {
  std::vector<const DiskCatalog::Entry*> entries;
  std::vector<std::string> bad, skipped;
  if (flags.segment.empty()) {
    entries = listing.catalog.ParentsFirst();
    for (const RefusedSegment& file : listing.refused) {
      (file.foreign ? skipped : bad).push_back(file.reason);
    }
  } else {
    Expected<const DiskCatalog::Entry*> entry = FindSegment(listing, flags.segment);
    if (entry) {
      entries.push_back(*entry);
    } else if (entry.error().code == Code::kDataLoss) {
      bad.push_back(entry.error().message);
    } else if (entry.error().code == Code::kUnimplemented) {
      skipped.push_back(entry.error().message);
    } else {
      return tl::unexpected<Error>(entry.error());
    }
  }
  int64_t bytes = 0;
  for (const DiskCatalog::Entry* entry : entries) {
    const auto found = VerifyParts(io, listing.path, entry->info.name, *entry->info.header);
    bad.insert(bad.end(), found.begin(), found.end());
    bytes += entry->bytes();
  }
  if (flags.json) {
    PrintJson({{"segments", entries.size()}, {"bytes", bytes}, {"bad", bad}, {"skipped", skipped}});
    return bad.empty() ? 0 : 1;
  }
  for (const std::string& reason : bad) fmt::print("bad: {}\n", reason);
  for (const std::string& reason : skipped) fmt::print("skipped: {}\n", reason);
  fmt::print("{} segments, {} read: {}\n", entries.size(), Amount(bytes),
             bad.empty() ? "all good" : fmt::format("{} bad", bad.size()));
  return bad.empty() ? 0 : 1;
}

Status PruneFolder(DiskIo& io, CacheListing& listing, const CacheFlags& flags) {
  PruneOptions options{.bad = flags.bad, .dry_run = flags.dry_run};
  if (flags.has_max_size) options.max_bytes = flags.max_size;
  if (!flags.older_than.empty()) {
    FATHOM_ASSIGN(options.older_than_ns, ParseDuration(flags.older_than));
  }
  if (!options.max_bytes && !options.older_than_ns && !options.bad) {
    return Fail(Code::kInvalidArgument,
                "cache prune: what? give --max-size, --older-than or --bad");
  }
  FATHOM_ASSIGN(const std::vector<Pruned> pruned, Prune(io, listing, options));
  int64_t bytes = 0;
  for (const Pruned& file : pruned) bytes += file.bytes;
  if (flags.json) {
    nlohmann::ordered_json removed = nlohmann::ordered_json::array();
    for (const Pruned& file : pruned) {
      removed.push_back({{"name", file.name}, {"bytes", file.bytes}, {"why", file.why}});
    }
    PrintJson({{"dry_run", flags.dry_run}, {"bytes", bytes}, {"removed", removed}});
    return {};
  }
  const std::string verb = flags.dry_run ? "would remove" : "removed";
  for (const Pruned& file : pruned) {
    fmt::print("{} {} ({}): {}\n", verb, file.name, Amount(file.bytes), file.why);
  }
  fmt::print("{} {} files, {}\n", verb, pruned.size(), Amount(bytes));
  return {};
}

Status CheckArguments(const CacheFlags& flags) {
  const bool known = flags.action == "ls" || flags.action == "show" || flags.action == "verify" ||
                     flags.action == "prune";
  if (!known) {
    return FailParam(Code::kInvalidArgument, "action",
                     "cache: '{}' is not one of ls, show, verify, prune", flags.action);
  }
  if (flags.path.empty()) {
    return FailParam(Code::kInvalidArgument, "path", "cache {}: which folder? (--kv-disk-path)",
                     flags.action);
  }
  const bool prunes = flags.has_max_size || !flags.older_than.empty() || flags.bad || flags.dry_run;
  if (prunes && flags.action != "prune") {
    return Fail(Code::kInvalidArgument,
                "cache {}: --max-size, --older-than, --bad and --dry-run belong to cache prune",
                flags.action);
  }
  if (!flags.segment.empty() && (flags.action == "ls" || flags.action == "prune")) {
    return FailParam(Code::kInvalidArgument, "segment", "cache {}: '{}' is one argument too many",
                     flags.action, flags.segment);
  }
  return {};
}

Expected<int> RunCache(const CacheFlags& flags) {
  FATHOM_TRY(CheckArguments(flags));
  const std::unique_ptr<DiskIo> io = MakePosixDiskIo();
  FATHOM_ASSIGN(CacheListing listing, ListCache(*io, flags.path));
  if (flags.action == "verify") return Verify(*io, listing, flags);
  if (flags.action == "show") {
    FATHOM_TRY(Show(listing, flags));
  } else if (flags.action == "prune") {
    FATHOM_TRY(PruneFolder(*io, listing, flags));
  } else if (flags.json) {
    PrintJson(ListingJson(listing));
  } else {
    fmt::print("{}", ListingText(listing, NowNanoseconds()));
  }
  return 0;
}

}  // namespace

void AddCacheCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<CacheFlags>();
  auto command = Command::Add(app, "cache", "What the disk tier holds; check it, make room",
                              "  fathom cache ls /var/lib/fathom\n"
                              "  fathom cache show /var/lib/fathom 3f9a04c1\n"
                              "  fathom cache verify /var/lib/fathom\n"
                              "  fathom cache prune /var/lib/fathom --max-size 100G --dry-run\n"
                              "  fathom cache prune /var/lib/fathom --older-than 7d --bad");
  command->Positional("action", flags->action, "ls, show, verify or prune");
  command->Positional("path", flags->path, "the folder: what serve calls --kv-disk-path");
  command->Positional("segment", flags->segment, "show, verify: the beginning of a segment's name");
  command->Switch("--json", flags->json, "for programs");
  command->Count("--max-size", flags->max_size, 0, INT64_MAX,
                 "prune: bytes that may stay; the least recently used go");
  command->Text("--older-than", flags->older_than, "DURATION",
                "prune: what was not used for 90s, 30m, 12h, 7d, 2w");
  command->Switch("--bad", flags->bad, "prune: damaged segments and leftovers");
  command->Switch("--dry-run", flags->dry_run, "prune: only say what would go");
  command->OnRun(exit_code, [flags](Command& self) {
    flags->has_max_size = self.origin("--max-size") != Origin::kDefault;
    const Expected<int> status = RunCache(*flags);
    return status ? *status : ReportError(status.error());
  });
}

}  // namespace fathom
