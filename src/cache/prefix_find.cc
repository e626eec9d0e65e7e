// Lookup: the longest resumable boundary of a prompt, and why none longer.
#include <algorithm>

#include "cache/prefix_cache.h"
#include "cache/prefix_node.h"

namespace fathom {
namespace {

// Tokens that two lists share from their beginnings.
int64_t Common(std::span<const TokenId> a, std::span<const TokenId> b) {
  return std::ranges::mismatch(a, b).in1 - a.begin();
}

bool Begins(std::span<const TokenId> tokens, std::span<const TokenId> beginning) {
  return tokens.size() >= beginning.size() &&
         std::equal(beginning.begin(), beginning.end(), tokens.begin());
}

}  // namespace

bool PrefixCache::Reachable(const PrefixNode& node, bool disk) {
  return node.device || node.host || (disk && node.disk.there());
}

bool PrefixCache::Reachable(const PrefixBundle& bundle, bool disk) {
  const bool windows = bundle.device || bundle.host || (disk && bundle.disk.there());
  const bool tail = bundle.tail.empty() || bundle.tail_device || bundle.tail_host ||
                    (disk && bundle.tail_disk.there());
  return windows && tail;
}

PrefixMatch PrefixCache::Find(const PrefixPath& path, std::span<const TokenId> tokens, double now,
                              bool disk) const {
  PrefixMatch match;
  match.report.prompt_tokens = static_cast<int64_t>(tokens.size());
  const int64_t size = options_.block_tokens;
  const auto known = static_cast<int64_t>(tokens.size());
  std::vector<PrefixNode*> chain{path.root};
  while (chain.back()->end + size <= known) {
    PrefixNode* parent = chain.back();
    const auto ids = tokens.subspan(static_cast<size_t>(parent->end), static_cast<size_t>(size));
    PrefixNode* node = Child(parent, Name(path, tokens, chain.size() - 1), ids);
    if (node == nullptr || !Reachable(*node, disk)) break;
    chain.push_back(node);
  }
  // The last token is always computed: its logits are wanted.
  for (size_t i = chain.size(); i-- > 0 && match.bundle == nullptr;) {
    const auto rest = tokens.subspan(static_cast<size_t>(chain[i]->end));
    for (const auto& bundle : chain[i]->bundles) {
      if (bundle->tokens >= known || bundle->tokens <= match.boundary) continue;
      if (!Reachable(*bundle, disk) || !Begins(rest, bundle->tail)) continue;
      match.bundle = bundle.get();
      match.boundary = bundle->tokens;
    }
    if (match.bundle != nullptr) match.nodes.assign(chain.begin() + 1, chain.begin() + i + 1);
  }
  match.rows_to = match.boundary;
  // Rows that reach far beyond the bundle: their windows are rebuilt.
  const int64_t rows = std::min(chain.back()->end, (known - 1) / size * size);
  if (options_.rebuild > 0 && rows - options_.rebuild >= match.boundary + size) {
    match.bundle = nullptr;
    match.rows_to = rows;
    match.boundary = rows - options_.rebuild;
    match.nodes.assign(chain.begin() + 1, chain.begin() + 1 + rows / size);
  }
  CountSources(&match);
  Explain(chain, tokens, now, &match);
  return match;
}

void PrefixCache::CountSources(PrefixMatch* match) const {
  PrefixReport& report = match->report;
  report.boundary = match->boundary;
  report.rebuilt = match->rows_to - match->boundary;
  const auto count = [&](bool device, bool host, bool from_disk, int64_t tokens) {
    if (from_disk || (!device && !host)) report.disk_tokens += tokens;
    else if (device) report.device_tokens += tokens;
    else report.host_tokens += tokens;
    if (!device && !host) match->on_disk = true;
  };
  for (const PrefixNode* node : match->nodes) {
    const bool skipped = match->bundle != nullptr || node->end <= match->boundary;
    count(node->device.has_value(), node->host.has_value(), node->from_disk,
          skipped ? options_.block_tokens : 0);
    if (node->device && !blocks_.evictable(*node->device)) ++match->held_nodes;
    if (node->loading > 0) match->loading = true;
  }
  if (match->bundle == nullptr) return;
  const PrefixBundle& bundle = *match->bundle;
  if (bundle.loading > 0) match->loading = true;
  count(bundle.device.has_value(), bundle.host.has_value(), bundle.from_disk, 0);
  if (!bundle.tail.empty()) {
    count(bundle.tail_device.has_value(), bundle.tail_host.has_value(), bundle.from_disk,
          static_cast<int64_t>(bundle.tail.size()));
  }
}

void PrefixCache::Explain(const std::vector<PrefixNode*>& chain, std::span<const TokenId> tokens,
                          double now, PrefixMatch* match) const {
  PrefixReport& report = match->report;
  const PrefixNode* deepest = chain.back();
  const auto rest = tokens.subspan(static_cast<size_t>(deepest->end));
  // How far into the next block the ids still agree with some cached path, and whether that path
  // goes on from there.
  int64_t common = 0;
  bool goes_on = false;
  const auto compare = [&](std::span<const TokenId> cached) {
    const int64_t shared = Common(rest, cached);
    if (shared < common) return;
    if (shared > common) goes_on = false;
    common = shared;
    goes_on = goes_on || shared < static_cast<int64_t>(cached.size());
  };
  for (const PrefixNode* child : deepest->children) compare(child->tokens);
  for (const auto& bundle : deepest->bundles) compare(bundle->tail);
  const auto known = static_cast<int64_t>(tokens.size());
  report.matched_blocks = deepest->end / options_.block_tokens;
  report.matched_tokens = deepest->end + common;
  report.diverged_at = report.matched_tokens;
  const bool diverged = goes_on && report.matched_tokens < known;
  if (diverged && report.matched_tokens - match->rows_to >= options_.min_save) {
    match->junction = report.matched_tokens;
  }
  match->parts = diverged && report.matched_tokens - match->rows_to < options_.block_tokens;

  if (match->boundary == known - 1) {
    report.reason = MissReason::kNone;
    return;
  }
  // Windows that were there and are not any more.
  double evicted = -1;
  for (const PrefixNode* node : chain) {
    if (node->end + options_.block_tokens > match->boundary) {
      evicted = std::max(evicted, node->bundle_evicted);
    }
  }
  const bool next_whole = static_cast<int64_t>(rest.size()) >= options_.block_tokens;
  const auto next = next_whole ? rest.subspan(0, static_cast<size_t>(options_.block_tokens)) : rest;
  if (next_whole && common < options_.block_tokens) {
    const auto grave = graves_.find(hasher_.Next(deepest->hash, next));
    if (grave != graves_.end()) {
      report.reason = MissReason::kBlockEvicted;
      report.seconds_ago = now - grave->second;
      return;
    }
  }
  if (report.matched_tokens - match->boundary >= options_.block_tokens ||
      report.matched_tokens == known) {
    report.reason = evicted >= 0 ? MissReason::kBundleEvicted : MissReason::kNoBundle;
    if (evicted >= 0) report.seconds_ago = now - evicted;
  } else if (report.matched_tokens == 0) {
    const bool elsewhere =
        next_whole && first_blocks_.contains(hasher_.Next(hasher_.Root(""), next));
    report.reason = elsewhere ? MissReason::kSaltDiffers : MissReason::kNothingCached;
  } else if (evicted >= 0 && match->boundary < report.matched_tokens) {
    report.reason = MissReason::kBundleEvicted;
    report.seconds_ago = now - evicted;
  } else if (report.matched_tokens < options_.block_tokens && match->boundary == 0) {
    report.reason = MissReason::kFirstBlockDiffers;
  } else {
    report.reason = diverged ? MissReason::kDiverged : MissReason::kEnded;
  }
}

}  // namespace fathom
