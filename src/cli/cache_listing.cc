#include "cli/cache_listing.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "core/amounts.h"

namespace fathom {
namespace {

using Json = nlohmann::ordered_json;
using Entry = DiskCatalog::Entry;

constexpr size_t kShownDigits = 12;

// As ASCII: sessions and model names are what somebody wrote into a file.
std::string Plain(const std::string& text, size_t width) {
  std::string plain = Json(text).dump(-1, ' ', true, Json::error_handler_t::replace);
  plain = plain.substr(1, plain.size() - 2);
  return plain.size() <= width ? plain : plain.substr(0, width - 3) + "...";
}

Json FingerprintJson(const SegmentHeader& header) {
  Json value = Json::parse(header.fingerprint.json, nullptr, false);
  return value.is_discarded() ? Json(header.fingerprint.json) : value;
}

std::string ModelName(const SegmentHeader& header) {
  const Json fingerprint = FingerprintJson(header);
  if (!fingerprint.is_object() || !fingerprint.contains("model")) return "-";
  const Json& model = fingerprint["model"];
  return model.is_string() ? model.get<std::string>() : "-";
}

std::string Utc(int64_t microseconds) {
  constexpr int64_t kYear9999 = int64_t{253'402'300'799};
  const int64_t seconds = std::clamp<int64_t>(microseconds / 1'000'000, 0, kYear9999);
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(static_cast<std::time_t>(seconds)));
}

std::string ShortName(const std::string& name) {
  return name.substr(0, kShownDigits);
}

Json Summary(const Entry& entry) {
  const SegmentHeader& header = *entry.info.header;
  return {{"name", entry.info.name},
          {"begin", header.begin},
          {"end", header.end()},
          {"blocks", header.blocks.size()},
          {"bundles", header.bundles.size()},
          {"bytes", header.file_bytes},
          {"created", Utc(header.created_us)},
          {"used", Utc(entry.used_ns / 1000)},
          {"model", ModelName(header)},
          {"session", header.session},
          {"root", header.root.Hex()},
          {"parent", header.parent.Hex()},
          {"last_block", header.last_block().Hex()}};
}

Json PartJson(const SegmentPartEntry& entry) {
  return {{"at", entry.at},
          {"offset", entry.offset},
          {"bytes", entry.bytes},
          {"xxh3", fmt::format("{:016x}", entry.checksum)}};
}

Json PartsJson(const std::vector<SegmentPartEntry>& entries) {
  Json list = Json::array();
  for (const SegmentPartEntry& entry : entries) list.push_back(PartJson(entry));
  return list;
}

std::string PartLine(std::string_view kind, size_t index, const SegmentPartEntry& entry) {
  return fmt::format("  {:<7}{:>6}  at token {:>9}  offset {:>13}  {:>10}  xxh3 {:016x}\n", kind,
                     index, entry.at, entry.offset, Amount(entry.bytes), entry.checksum);
}

}  // namespace

std::string Age(int64_t nanoseconds) {
  const int64_t seconds = std::max<int64_t>(nanoseconds, 0) / 1'000'000'000;
  if (seconds < 120) return fmt::format("{} s", seconds);
  if (seconds < 7200) return fmt::format("{} min", seconds / 60);
  if (seconds < 48 * 3600) return fmt::format("{} h", seconds / 3600);
  return fmt::format("{} d", seconds / 86400);
}

Expected<CacheListing> ListCache(DiskIo& io, const std::string& path) {
  FATHOM_ASSIGN(const std::vector<FolderFile> files, ListFolder(path));
  CacheListing listing;
  listing.path = path;
  uint64_t id = 0;
  for (const FolderFile& file : files) {
    if (!file.regular && file.kind != FolderFile::Kind::kSegment) continue;
    if (file.kind == FolderFile::Kind::kBad) listing.put_aside.push_back(file);
    if (file.kind == FolderFile::Kind::kTemporary) listing.temporaries.push_back(file);
    if (file.kind != FolderFile::Kind::kSegment) continue;
    if (!file.regular) {
      listing.refused.push_back({.name = file.name,
                                 .reason = file.name + ": is no regular file",
                                 .code = Code::kInvalidArgument,
                                 .foreign = true});
      continue;
    }
    Expected<SegmentHeader> header = ReadSegmentHeader(io, path, file.name);
    if (!header) {
      if (header.error().code == Code::kNotFound) continue;  // evicted just now
      const Code code = header.error().code;
      listing.refused.push_back({.name = file.name,
                                 .reason = header.error().message,
                                 .code = code,
                                 .bytes = file.bytes,
                                 .foreign = code == Code::kUnimplemented});
      continue;
    }
    listing.catalog.Add({.id = SegmentId{++id},
                         .name = file.name,
                         .header = std::make_shared<const SegmentHeader>(std::move(*header))},
                        file.modified_ns);
  }
  return listing;
}

Expected<const Entry*> FindSegment(const CacheListing& listing, const std::string& name) {
  const Entry* found = nullptr;
  for (const auto& [full, entry] : listing.catalog.entries()) {
    if (!full.starts_with(name)) continue;
    if (found != nullptr) {
      return Fail(Code::kInvalidArgument, "{}: more than one segment begins with '{}'",
                  listing.path, name);
    }
    found = &entry;
  }
  for (const RefusedSegment& file : listing.refused) {
    if (found == nullptr && file.name.starts_with(name)) {
      return Fail(file.foreign ? Code::kUnimplemented : Code::kDataLoss, "{}", file.reason);
    }
  }
  if (found == nullptr) {
    return Fail(Code::kNotFound, "{}: there is no segment '{}'", listing.path, name);
  }
  return found;
}

std::string ListingText(const CacheListing& listing, int64_t now_ns) {
  std::string text =
      fmt::format("{:<12}  {:>17}  {:>6}  {:>7}  {:>10}  {:>7}  {:>7}  {:<20}  {}\n", "NAME",
                  "TOKENS", "BLOCKS", "BUNDLES", "BYTES", "AGE", "USED", "MODEL", "SESSION");
  for (const Entry* entry : listing.catalog.ParentsFirst()) {
    const SegmentHeader& header = *entry->info.header;
    text += fmt::format(
        "{:<12}  {:>17}  {:>6}  {:>7}  {:>10}  {:>7}  {:>7}  {:<20}  {}\n",
        ShortName(entry->info.name), fmt::format("{}..{}", header.begin, header.end()),
        header.blocks.size(), header.bundles.size(), Amount(header.file_bytes),
        Age(now_ns - header.created_us * 1000), Age(now_ns - entry->used_ns),
        Plain(ModelName(header), 20), header.session.empty() ? "-" : Plain(header.session, 40));
  }
  for (const RefusedSegment& file : listing.refused) {
    text += fmt::format("not usable: {}\n", Plain(file.reason, 200));
  }
  for (const FolderFile& file : listing.put_aside) {
    text +=
        fmt::format("put aside as damaged: {} ({})\n", Plain(file.name, 80), Amount(file.bytes));
  }
  for (const FolderFile& file : listing.temporaries) {
    text += fmt::format("being written, or left over: {} ({})\n", Plain(file.name, 100),
                        Amount(file.bytes));
  }
  text += fmt::format("{} segments, {}\n", listing.catalog.entries().size(),
                      Amount(listing.catalog.bytes()));
  return text;
}

Json ListingJson(const CacheListing& listing) {
  Json json = {{"path", listing.path},       {"bytes", listing.catalog.bytes()},
               {"segments", Json::array()},  {"refused", Json::array()},
               {"put_aside", Json::array()}, {"temporaries", Json::array()}};
  for (const Entry* entry : listing.catalog.ParentsFirst()) {
    json["segments"].push_back(Summary(*entry));
  }
  for (const RefusedSegment& file : listing.refused) {
    json["refused"].push_back({{"name", file.name},
                               {"reason", file.reason},
                               {"damaged", file.code == Code::kDataLoss},
                               {"bytes", file.bytes}});
  }
  for (const FolderFile& file : listing.put_aside) {
    json["put_aside"].push_back({{"name", file.name}, {"bytes", file.bytes}});
  }
  for (const FolderFile& file : listing.temporaries) {
    json["temporaries"].push_back({{"name", file.name}, {"bytes", file.bytes}});
  }
  return json;
}

std::string SegmentText(const CacheListing& listing, const Entry& entry) {
  const SegmentHeader& header = *entry.info.header;
  std::string text = fmt::format("{}\n", entry.info.name);
  const auto line = [&](std::string_view key, const std::string& value) {
    text += fmt::format("  {:<12} {}\n", key, value);
  };
  line("tokens", fmt::format("{}..{}", header.begin, header.end()));
  line("bytes", BytesAndAmount(header.file_bytes));
  line("created", Utc(header.created_us));
  line("used", Utc(entry.used_ns / 1000));
  line("session", header.session.empty() ? "-" : Plain(header.session, 200));
  line("root", header.root.Hex());
  line("parent", header.parent.Hex());
  line("last block", header.last_block().Hex());
  line("names", std::string(HashAlgorithmName(header.algorithm)));
  line("block", fmt::format("{} tokens, {} bytes", header.block_tokens, header.block_bytes));
  line("fingerprint", header.fingerprint.hash.Hex());
  const Json fingerprint = FingerprintJson(header);
  if (fingerprint.is_object()) {
    for (const auto& [key, value] : fingerprint.items()) {
      text += fmt::format("    {:<24} {}\n", Plain(key, 60),
                          value.is_primitive()
                              ? value.dump(-1, ' ', true, Json::error_handler_t::replace)
                              : value.type_name());
    }
  }
  text += "parts\n";
  for (size_t i = 0; i < header.blocks.size(); ++i) text += PartLine("block", i, header.blocks[i]);
  for (size_t i = 0; i < header.bundle_parts.size(); ++i) {
    text += PartLine("bundle", i, header.bundle_parts[i]);
  }
  text += "chain\n";
  const std::vector<const Entry*> chain = listing.catalog.Chain(entry);
  if (const int64_t begin = chain.front()->info.header->begin; begin > 0) {
    text += fmt::format("  tokens 0..{} are not in this folder\n", begin);
  }
  for (const Entry* part : chain) {
    text += fmt::format("  {}  {}..{}\n", ShortName(part->info.name), part->info.header->begin,
                        part->info.header->end());
  }
  return text;
}

Json SegmentJson(const CacheListing& listing, const Entry& entry) {
  const SegmentHeader& header = *entry.info.header;
  Json json = Summary(entry);
  json["hash"] = HashAlgorithmName(header.algorithm);
  json["block_tokens"] = header.block_tokens;
  json["block_bytes"] = header.block_bytes;
  json["fingerprint"] = {{"sha256", header.fingerprint.hash.Hex()},
                         {"fields", FingerprintJson(header)}};
  json["block_parts"] = PartsJson(header.blocks);
  json["bundle_parts"] = PartsJson(header.bundle_parts);
  const std::vector<const Entry*> chain = listing.catalog.Chain(entry);
  json["missing_before"] = chain.front()->info.header->begin;
  json["chain"] = Json::array();
  for (const Entry* part : chain) json["chain"].push_back(part->info.name);
  return json;
}

}  // namespace fathom
