#include "cache/disk_tier.h"

#include <algorithm>
#include <charconv>
#include <thread>

#include "cache/prefix_node.h"
#include "core/log.h"

namespace fathom {
namespace {

// A disk that says nothing for so long is not waited for.
constexpr double kLoadSilence = 30;
// Bytes in the store's hands before writing pauses, and bytes copied between two steps.
constexpr int64_t kBacklog = int64_t{64} << 20;
constexpr int64_t kBetweenSteps = int64_t{16} << 20;

DiskPlace Place(SegmentId segment, SegmentPart part) {
  return {segment.value + 1, part.index};
}
SegmentId SegmentOf(const DiskPlace& place) {
  return SegmentId{place.segment - 1};
}

}  // namespace

Expected<DiskWindows> DiskWindows::Parse(const std::string& text, int64_t block_tokens) {
  if (text == "full") return DiskWindows{};
  if (text == "none") return DiskWindows{.policy = Policy::kNone};
  constexpr std::string_view kCheckpoint = "checkpoint:";
  int64_t every = 0;
  if (text.starts_with(kCheckpoint)) {
    const char* begin = text.data() + kCheckpoint.size();
    const char* end = text.data() + text.size();
    const auto [at, error] = std::from_chars(begin, end, every);
    if (error == std::errc() && at == end && every > 0 && every % block_tokens == 0) {
      return DiskWindows{.policy = Policy::kCheckpoint, .every = every};
    }
  }
  return FailParam(
      Code::kInvalidArgument, "--disk-windows",
      "--disk-windows '{}' is not full, none, or checkpoint:N with N a multiple of the "
      "block size {}",
      text, block_tokens);
}

// Something to be read: the block of a node, the windows of a bundle or the block of its tail.
struct DiskTier::Target {
  PrefixNode* node = nullptr;
  PrefixBundle* bundle = nullptr;  // with `tail`: its tail, else its windows
  bool tail = false;
  DiskPlace place;
  std::optional<BlockId> block;  // where it goes
  std::optional<BundleId> unit;
};

struct DiskTier::Load_ {
  std::vector<PrefixNode*> nodes;  // the whole path, busy and loading
  PrefixBundle* bundle = nullptr;
  std::vector<BlockId> held;  // blocks of the path that are in device memory
  std::vector<Target> targets;
  std::vector<std::pair<ReadTicket, size_t>> tickets;  // and the first target of each
  size_t arrived = 0;
  double last_news = 0;
};

// A segment being written.
struct DiskTier::Job {
  SegmentHeader header;
  // By name, not by pointer: what is evicted meanwhile is simply not found.
  std::vector<BlockHash> blocks;
  BlockHash last;  // node of the bundles' tails
  std::unique_ptr<SegmentWriter> writer;
  size_t next = 0;
};

DiskTier::DiskTier(DiskStore& store, PrefixCache& cache, BlockPool& blocks, BundlePool& bundles,
                   const DiskWindows& windows, std::vector<CacheOp>* ops)
    : store_(store),
      cache_(cache),
      blocks_(blocks),
      bundles_(bundles),
      windows_(windows),
      ops_(ops) {
  for (const SegmentInfo& segment : store.segments()) Enter(segment.id, segment.header);
}

DiskTier::~DiskTier() = default;

DiskTierStats DiskTier::stats() const {
  DiskTierStats stats = stats_;
  stats.store = store_.stats();
  return stats;
}

// --- what lies on disk ---

void DiskTier::Enter(SegmentId id, std::shared_ptr<const SegmentHeader> header) {
  PrefixNode* node = nullptr;
  if (header->begin == 0) {
    std::unique_ptr<PrefixNode>& root = cache_.nodes_[header->root];
    if (root == nullptr) {
      root = std::make_unique<PrefixNode>();
      root->id = ++cache_.next_id_;
      root->hash = header->root;
      root->root = root.get();
    }
    node = root.get();
  } else {
    const auto parent = cache_.nodes_.find(header->parent);
    if (parent != cache_.nodes_.end()) node = parent->second.get();
  }
  if (node == nullptr || node->end != header->begin || node->root->hash != header->root) {
    ++stats_.orphans;
    return;
  }
  segments_[id.value] = header;
  const int64_t size = cache_.options().block_tokens;
  const std::span<const TokenId> tokens(header->tokens);
  std::vector<PrefixNode*> chain{node};
  for (size_t i = 0; i < header->block_names.size(); ++i) {
    const auto ids = tokens.subspan(i * static_cast<size_t>(size), static_cast<size_t>(size));
    const BlockHash& name = header->block_names[i];
    PrefixNode* child = cache_.Child(node, name, ids);
    if (child == nullptr) {
      if (cache_.nodes_.contains(name)) return;  // names collide: the rest is not reachable
      child = cache_.AddNode(node, name, ids);
    }
    if (!child->disk.there()) ++cache_.stats_.disk_nodes;
    child->disk = Place(id, BlockPart(static_cast<int32_t>(i)));
    node = child;
    chain.push_back(node);
  }
  for (size_t i = 0; i < header->bundles.size(); ++i) {
    const int64_t at = header->bundles[i].at;
    const auto step = static_cast<size_t>((at - header->begin) / size);
    EnterBundle(chain[step], *header, id.value, static_cast<int32_t>(i));
  }
}

void DiskTier::EnterBundle(PrefixNode* node, const SegmentHeader& header, uint64_t place,
                           int32_t index) {
  const int64_t at = header.bundles[static_cast<size_t>(index)].at;
  const auto tail = std::span<const TokenId>(header.tokens)
                        .subspan(static_cast<size_t>(node->end - header.begin),
                                 static_cast<size_t>(at - node->end));
  const SegmentId id{place};
  PrefixBundle* bundle = nullptr;
  for (const auto& there : node->bundles) {
    if (there->tokens == at && std::ranges::equal(there->tail, tail)) bundle = there.get();
  }
  if (bundle == nullptr) bundle = cache_.AddBundle(node, at, tail);
  bundle->disk = Place(id, BundlePart(index));
  if (!tail.empty()) {
    const int64_t block = (node->end - header.begin) / cache_.options().block_tokens;
    bundle->tail_disk = Place(id, BlockPart(static_cast<int32_t>(block)));
  }
  cache_.Refresh(bundle);
}

// The segment is gone: so is what only it had.
void DiskTier::Forget(SegmentId id, double now) {
  const auto found = segments_.find(id.value);
  if (found == segments_.end()) return;
  const std::shared_ptr<const SegmentHeader> header = found->second;
  segments_.erase(found);
  const int64_t size = cache_.options().block_tokens;
  const auto node_of = [&](int64_t block) -> PrefixNode* {  // -1: the parent
    const BlockHash& name =
        block < 0 ? header->parent : header->block_names[static_cast<size_t>(block)];
    const auto at = cache_.nodes_.find(name);
    return at == cache_.nodes_.end() ? nullptr : at->second.get();
  };
  for (size_t i = header->bundles.size(); i-- > 0;) {
    const int64_t at = header->bundles[i].at;
    PrefixNode* node = node_of((at - header->begin) / size - 1);
    if (node == nullptr) continue;
    for (size_t k = node->bundles.size(); k-- > 0;) {
      PrefixBundle* bundle = node->bundles[k].get();
      if (bundle->tokens != at) continue;
      if (bundle->disk.there() && SegmentOf(bundle->disk) == id) bundle->disk = {};
      if (bundle->tail_disk.there() && SegmentOf(bundle->tail_disk) == id) bundle->tail_disk = {};
      const bool usable = bundle->has_windows() && bundle->has_tail();
      if (!usable && bundle->busy == 0) cache_.RemoveBundle(bundle, now, true);
    }
  }
  for (auto i = static_cast<int64_t>(header->block_names.size()); i-- > 0;) {
    PrefixNode* node = node_of(i);
    if (node == nullptr || !node->disk.there() || SegmentOf(node->disk) != id) continue;
    DropPlace(node);
    if (node->busy == 0) cache_.RemoveIfGone(node, now);
  }
}

void DiskTier::DropPlace(PrefixNode* node) {
  if (!node->disk.there()) return;
  node->disk = {};
  cache_.Announce(node);
  --cache_.stats_.disk_nodes;
}

// --- reading ---

bool DiskTier::Load(const PrefixMatch& match, double now) {
  FATHOM_CHECK(match.found() && !match.loading);
  auto load = std::make_unique<Load_>();
  load->nodes = match.nodes;
  load->bundle = match.bundle;
  load->last_news = now;
  PrefixBundle* bundle = match.bundle;
  if (bundle != nullptr) {
    ++bundle->busy;
    cache_.Refresh(bundle);
  }
  for (PrefixNode* node : load->nodes) {
    ++node->busy;
    if (node->device) {
      blocks_.Retain(*node->device);
      load->held.push_back(*node->device);
    }
    cache_.Refresh(node);
  }
  bool room = true;
  const auto target_block = [&](Target target) {
    target.block = cache_.AllocateBlock(now);
    room = target.block.has_value();
    if (room) load->targets.push_back(target);
  };
  for (PrefixNode* node : load->nodes) {
    if (!room) break;
    if (node->device) continue;
    if (node->host) {
      room = cache_.BringUp(node, now);
      if (room) load->held.push_back(*node->device);
      continue;
    }
    target_block({.node = node, .place = node->disk});
  }
  if (room && bundle != nullptr && !bundle->tail.empty() && !bundle->tail_device &&
      !bundle->tail_host) {
    target_block({.bundle = bundle, .tail = true, .place = bundle->tail_disk});
  }
  if (room && bundle != nullptr && !bundle->device && !bundle->host) {
    Target target{.bundle = bundle, .place = bundle->disk};
    target.unit = cache_.AllocateBundle(now);
    room = target.unit.has_value();
    if (room) load->targets.push_back(target);
  }
  for (const Target& target : load->targets) {
    ++(target.node != nullptr ? target.node->loading : target.bundle->loading);
  }
  ++stats_.loads;
  loads_.push_back(std::move(load));
  Load_* started = loads_.back().get();
  if (!room) {
    --stats_.loads;
    EndLoad(started, now);
    return false;
  }
  // One ticket for each run of parts of one segment.
  for (size_t i = 0; i < started->targets.size();) {
    const SegmentId segment = SegmentOf(started->targets[i].place);
    std::vector<SegmentPart> parts;
    const size_t first = i;
    for (; i < started->targets.size() && SegmentOf(started->targets[i].place) == segment; ++i) {
      const Target& target = started->targets[i];
      const bool windows = target.bundle != nullptr && !target.tail;
      parts.push_back(windows ? BundlePart(target.place.part) : BlockPart(target.place.part));
    }
    started->tickets.emplace_back(store_.Read(segment, std::move(parts)), first);
  }
  return true;
}

void DiskTier::TakePart(DiskEvent event, double now) {
  for (const auto& load : loads_) {
    const bool ours = std::ranges::any_of(
        load->tickets, [&](const auto& ticket) { return ticket.first == event.ticket; });
    if (!ours) continue;
    load->last_news = now;
    // Parts come in the order they were asked for, tickets too.
    Target& target = load->targets[load->arrived++];
    auto buffer = std::make_shared<const std::vector<std::byte>>(std::move(event.data));
    if (target.unit) {
      ops_->push_back({.kind = CacheOp::Kind::kBundleFromBuffer,
                       .to = target.unit->value,
                       .tokens = target.bundle->tokens,
                       .buffer = buffer});
      target.bundle->device = std::exchange(target.unit, std::nullopt);
      target.bundle->from_disk = true;
      ++cache_.stats_.device_bundles;
      ++stats_.bundles_loaded;
    } else if (target.tail) {
      ops_->push_back(
          {.kind = CacheOp::Kind::kBlockFromBuffer, .to = target.block->value, .buffer = buffer});
      blocks_.RetainCached(*target.block);
      target.bundle->tail_device = target.block;
      target.bundle->from_disk = true;
      load->held.push_back(*std::exchange(target.block, std::nullopt));
      ++stats_.blocks_loaded;
    } else if (!target.node->device) {  // else computed by someone else meanwhile
      ops_->push_back(
          {.kind = CacheOp::Kind::kBlockFromBuffer, .to = target.block->value, .buffer = buffer});
      cache_.SetDevice(target.node, *target.block);
      target.node->from_disk = true;
      load->held.push_back(*std::exchange(target.block, std::nullopt));
      ++stats_.blocks_loaded;
    } else {
      blocks_.Retain(*target.node->device);
      load->held.push_back(*target.node->device);
    }
    if (load->arrived == load->targets.size()) EndLoad(load.get(), now);
    return;
  }
}

void DiskTier::FailRead(const DiskEvent& event, double now) {
  last_failure_ = event.message;
  for (const auto& load : loads_) {
    const bool ours = std::ranges::any_of(
        load->tickets, [&](const auto& ticket) { return ticket.first == event.ticket; });
    if (!ours) continue;
    ++stats_.loads_failed;
    // The part that failed is not asked for again.
    const Target& target = load->targets[load->arrived];
    if (target.node != nullptr) DropPlace(target.node);
    else if (target.tail) target.bundle->tail_disk = {};
    else target.bundle->disk = {};
    EndLoad(load.get(), now);
    return;
  }
}

// Gives back everything the load holds; what has arrived stays in the cache.
void DiskTier::EndLoad(Load_* load, double now) {
  for (const auto& [ticket, first] : load->tickets) store_.CancelRead(ticket);
  for (const Target& target : load->targets) {
    if (target.block) blocks_.Release(*target.block);
    if (target.unit) bundles_.Release(*target.unit);
    --(target.node != nullptr ? target.node->loading : target.bundle->loading);
  }
  for (const BlockId block : load->held) blocks_.Release(block);
  PrefixBundle* bundle = load->bundle;
  if (bundle != nullptr) --bundle->busy;
  for (PrefixNode* node : load->nodes) --node->busy;
  if (bundle != nullptr) {
    const bool usable = bundle->has_windows() && bundle->has_tail();
    usable ? cache_.Refresh(bundle) : cache_.RemoveBundle(bundle, now, true);
  }
  for (size_t i = load->nodes.size(); i-- > 0;) {
    PrefixNode* node = load->nodes[i];
    cache_.Refresh(node);
    cache_.RefreshBundles(node);
    // Below a node that is gone nothing can be reached.
    if (!node->resident() && node->busy == 0) cache_.RemoveNode(node, now);
  }
  std::erase_if(loads_, [&](const auto& other) { return other.get() == load; });
}

// --- writing ---

void DiskTier::Persist(const PrefixPath& path, std::span<const TokenId> tokens,
                       const std::string& session) {
  if (path.closed) return;
  const int64_t size = cache_.options().block_tokens;
  std::vector<PrefixNode*> chain;  // from the root's first child on
  for (PrefixNode* node = path.node; node->parent != nullptr; node = node->parent) {
    chain.push_back(node);
  }
  std::ranges::reverse(chain);
  const auto first_new = static_cast<int64_t>(
      std::ranges::find_if(chain, [](const PrefixNode* node) { return !node->disk.there(); }) -
      chain.begin());
  // The last bundle on the path decides where the segment ends.
  int64_t end = path.node->end;
  for (const auto& bundle : path.node->bundles) {
    const auto rest = tokens.subspan(static_cast<size_t>(path.node->end));
    if (bundle->tail.size() > rest.size() || !windows_.Wants(bundle->tokens)) continue;
    if (!std::equal(bundle->tail.begin(), bundle->tail.end(), rest.begin())) continue;
    const bool memory = (bundle->device || bundle->host) &&
                        (bundle->tail.empty() || bundle->tail_device || bundle->tail_host);
    if (memory && !bundle->disk.there()) end = std::max(end, bundle->tokens);
  }
  int64_t begin = first_new * size;
  const auto wanted = [&](const PrefixBundle& bundle) {
    return windows_.Wants(bundle.tokens) && !bundle.disk.there() &&
           (bundle.device || bundle.host) && bundle.tokens <= end;
  };
  const auto any_new = [&](const PrefixNode* node) {
    return std::ranges::any_of(node->bundles, [&](const auto& bundle) { return wanted(*bundle); });
  };
  if (begin == end) {  // every row is there; a bundle at the last edge may not be
    if (begin == 0 || !any_new(path.node)) return;
    begin -= size;
  }
  auto job = std::make_unique<Job>();
  job->header.root = path.root->hash;
  job->header.parent =
      begin == 0 ? path.root->hash : chain[static_cast<size_t>(begin / size - 1)]->hash;
  job->header.begin = begin;
  job->header.tokens.assign(tokens.begin() + begin, tokens.begin() + end);
  job->header.session = session;
  const int64_t whole = end / size;
  for (int64_t i = begin / size; i < whole; ++i) {
    job->blocks.push_back(chain[static_cast<size_t>(i)]->hash);
  }
  job->last = path.node->hash;
  // Bundles within (begin, end] that lie on this path.
  for (int64_t i = begin / size; i <= whole; ++i) {
    const PrefixNode* node = i == 0 ? path.root : chain[static_cast<size_t>(i - 1)];
    const auto rest = tokens.subspan(static_cast<size_t>(node->end));
    for (const auto& bundle : node->bundles) {
      if (!wanted(*bundle) || bundle->tokens <= begin || bundle->tail.size() > rest.size())
        continue;
      if (!std::equal(bundle->tail.begin(), bundle->tail.end(), rest.begin())) continue;
      job->header.bundles.push_back({.at = bundle->tokens});
    }
  }
  std::ranges::sort(job->header.bundles, {}, &SegmentBundle::at);
  const auto same = [](const SegmentBundle& a, const SegmentBundle& b) { return a.at == b.at; };
  auto& bundles = job->header.bundles;
  bundles.erase(std::unique(bundles.begin(), bundles.end(), same), bundles.end());
  // What is queued and not begun may be the beginning of this: then one file will do.
  std::erase_if(jobs_, [&](const auto& queued) {
    const std::vector<TokenId>& ids = queued->header.tokens;
    return queued->writer == nullptr && queued->header.root == job->header.root &&
           queued->header.begin == begin && ids.size() <= job->header.tokens.size() &&
           std::equal(ids.begin(), ids.end(), job->header.tokens.begin());
  });
  jobs_.push_back(std::move(job));
}

// Appends the next part. False: it is not in memory any more.
bool DiskTier::AppendNext(Job* job, CacheReader& reader) {
  const int64_t size = cache_.options().block_tokens;
  const SegmentHeader& header = job->header;
  const auto node_at = [&](int64_t end) -> PrefixNode* {  // the node whose block ends there
    const BlockHash& name = end == header.begin
                                ? header.parent
                                : job->blocks[static_cast<size_t>((end - header.begin) / size - 1)];
    const auto at = cache_.nodes_.find(name);
    return at == cache_.nodes_.end() ? nullptr : at->second.get();
  };
  const auto bundle_at = [&](int64_t tokens) -> PrefixBundle* {
    PrefixNode* node = node_at(tokens / size * size);
    if (node == nullptr) return nullptr;
    const auto tail = std::span<const TokenId>(header.tokens)
                          .subspan(static_cast<size_t>(node->end - header.begin),
                                   static_cast<size_t>(tokens - node->end));
    for (const auto& bundle : node->bundles) {
      if (bundle->tokens == tokens && std::ranges::equal(bundle->tail, tail)) return bundle.get();
    }
    return nullptr;
  };
  const size_t index = job->next++;
  if (index < job->blocks.size()) {
    const PrefixNode* node = node_at(header.begin + static_cast<int64_t>(index + 1) * size);
    if (node == nullptr || (!node->device && !node->host)) return false;
    job->writer->Append(node->device ? reader.ReadBlock(*node->device)
                                     : reader.ReadHostBlock(*node->host));
    return true;
  }
  const bool partial = header.end() % size != 0;
  if (partial && index == job->blocks.size()) {
    const PrefixBundle* bundle = bundle_at(header.end());
    if (bundle == nullptr || (!bundle->tail_device && !bundle->tail_host)) return false;
    job->writer->Append(bundle->tail_device ? reader.ReadBlock(*bundle->tail_device)
                                            : reader.ReadHostBlock(*bundle->tail_host));
    return true;
  }
  const size_t k = index - job->blocks.size() - (partial ? 1 : 0);
  const PrefixBundle* bundle = bundle_at(header.bundles[k].at);
  if (bundle == nullptr || (!bundle->device && !bundle->host)) return false;
  job->writer->Append(bundle->device ? reader.ReadBundle(*bundle->device, bundle->tokens)
                                     : reader.ReadHostBundle(*bundle->host, bundle->tokens));
  return true;
}

bool DiskTier::Work(CacheReader& reader, double now) {
  bool changed = false;
  for (DiskEvent& event : store_.TakeEvents()) {
    changed = true;
    switch (event.kind) {
      case DiskEvent::Kind::kPart: TakePart(std::move(event), now); break;
      case DiskEvent::Kind::kReadFailed:
        Log().warn("disk tier: {}; computed again instead", event.message);
        FailRead(event, now);
        break;
      case DiskEvent::Kind::kWritten:
        ++stats_.paths_written;
        full_named_ = false;
        Enter(event.segment, event.header);
        break;
      case DiskEvent::Kind::kWriteFailed:
        ++stats_.write_failures;
        // A disk that stays full fails every path there is to write.
        if (!event.disk_full || !std::exchange(full_named_, true)) {
          Log().warn("disk tier: {}", event.message);
        }
        break;
      case DiskEvent::Kind::kDiskFull: Log().warn("disk tier: {}", event.message); break;
      case DiskEvent::Kind::kFound: Enter(event.segment, event.header); break;
      case DiskEvent::Kind::kRemoved: Forget(event.segment, now); break;
    }
  }
  for (size_t i = loads_.size(); i-- > 0;) {
    if (now - loads_[i]->last_news <= kLoadSilence) continue;
    changed = true;
    ++stats_.loads_failed;
    last_failure_ = fmt::format("the disk gave nothing for {} s", kLoadSilence);
    Log().warn("disk tier: {}; computed again instead", last_failure_);
    EndLoad(loads_[i].get(), now);
  }
  int64_t copied = 0;
  while (!jobs_.empty() && copied < kBetweenSteps && store_.write_backlog_bytes() < kBacklog) {
    Job& job = *jobs_.front();
    if (job.writer == nullptr) {
      if (store_.write_paused()) {
        ++stats_.paths_abandoned;
        jobs_.pop_front();
        continue;
      }
      job.writer = store_.Write(job.header);
    }
    const int64_t before = job.writer->parts_left();
    const bool there = before == 0 || AppendNext(&job, reader);
    copied += blocks_.unit_bytes();
    if (!there || job.writer->failed()) {
      if (!there) ++stats_.paths_abandoned;
      job.writer->Abandon();
      jobs_.pop_front();
    } else if (job.writer->parts_left() == 0) {
      job.writer->Commit();
      jobs_.pop_front();
    }
  }
  return changed;
}

bool DiskTier::Flush(CacheReader& reader, double now,
                     std::chrono::steady_clock::time_point deadline) {
  while (writing()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    Work(reader, now);
    if (writing()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return store_.Flush(deadline);
}

}  // namespace fathom
