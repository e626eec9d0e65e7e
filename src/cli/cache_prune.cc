#include "cli/cache_prune.h"

#include <fmt/format.h>

#include <cerrno>
#include <charconv>

#include "core/amounts.h"

namespace fathom {
namespace {

class Pruner {
 public:
  Pruner(DiskIo& io, CacheListing& listing, const PruneOptions& options)
      : io_(io), listing_(listing), options_(options) {}

  Status Bad() {
    for (const RefusedSegment& file : listing_.refused) {
      if (file.code != Code::kDataLoss) continue;  // may be somebody else's
      FATHOM_TRY(Remove(file.name, file.bytes, file.reason));
    }
    for (const FolderFile& file : listing_.put_aside) {
      FATHOM_TRY(Remove(file.name, file.bytes, "put aside as damaged"));
    }
    std::vector<std::pair<SegmentId, std::string>> damaged;
    for (const auto& [name, entry] : listing_.catalog.entries()) {
      const auto bad = VerifyParts(io_, listing_.path, name, *entry.info.header);
      if (!bad.empty()) damaged.emplace_back(entry.info.id, bad.front());
    }
    for (const auto& [id, why] : damaged) FATHOM_TRY(RemoveSegment(id, why));
    Status status;
    ForEachStaleTemporary(listing_.path, listing_.temporaries, [&](const FolderFile& file) {
      if (status) status = Remove(file.name, file.bytes, "left by a writer that is gone");
    });
    return status;
  }

  Status Old(int64_t older_than_ns) {
    const int64_t now = NowNanoseconds();
    while (const DiskCatalog::Entry* leaf = listing_.catalog.EvictionChoice()) {
      if (now - leaf->used_ns <= older_than_ns) break;
      FATHOM_TRY(
          RemoveSegment(leaf->info.id, fmt::format("last used {} ago", Age(now - leaf->used_ns))));
    }
    return {};
  }

  Status Large(int64_t max_bytes) {
    while (listing_.catalog.bytes() > max_bytes) {
      const DiskCatalog::Entry* leaf = listing_.catalog.EvictionChoice();
      if (leaf == nullptr) break;
      FATHOM_TRY(RemoveSegment(
          leaf->info.id, fmt::format("least recently used, more than {}", Amount(max_bytes))));
    }
    return {};
  }

  std::vector<Pruned> Take() { return std::move(pruned_); }

 private:
  Status Remove(const std::string& name, int64_t bytes, const std::string& why) {
    if (!options_.dry_run) {
      const int error = io_.Remove(listing_.path + "/" + name);
      if (error == -EISDIR || error == -EPERM) return {};  // a folder of that name: not ours
      if (error != 0 && error != -ENOENT) {
        return Fail(Code::kUnavailable, "{}/{}: cannot be removed: {}", listing_.path, name,
                    ErrnoText(error));
      }
    }
    pruned_.push_back({name, bytes, why});
    return {};
  }

  Status RemoveSegment(SegmentId id, const std::string& why) {
    const DiskCatalog::Entry& entry = *listing_.catalog.Find(id);
    FATHOM_TRY(Remove(entry.info.name, entry.bytes(), why));
    listing_.catalog.Remove(id);
    return {};
  }

  DiskIo& io_;
  CacheListing& listing_;
  const PruneOptions& options_;
  std::vector<Pruned> pruned_;
};

}  // namespace

Expected<std::vector<Pruned>> Prune(DiskIo& io, CacheListing& listing,
                                    const PruneOptions& options) {
  Pruner pruner(io, listing, options);
  if (options.bad) FATHOM_TRY(pruner.Bad());
  if (options.older_than_ns) FATHOM_TRY(pruner.Old(*options.older_than_ns));
  if (options.max_bytes) FATHOM_TRY(pruner.Large(*options.max_bytes));
  return pruner.Take();
}

Expected<int64_t> ParseDuration(const std::string& text) {
  int64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  int64_t seconds = 0;
  if (error == std::errc() && end - rest == 1) {
    switch (*rest) {
      case 's': seconds = 1; break;
      case 'm': seconds = 60; break;
      case 'h': seconds = 3600; break;
      case 'd': seconds = 86'400; break;
      case 'w': seconds = 7 * 86'400; break;
      default: break;
    }
  }
  constexpr int64_t kLongest = int64_t{100} * 366 * 86'400;
  if (seconds == 0 || number < 0 || number > kLongest / seconds) {
    return Fail(Code::kInvalidArgument, "'{}' is not a duration (90s, 30m, 12h, 7d, 2w)", text);
  }
  return number * seconds * 1'000'000'000;
}

}  // namespace fathom
