// Random operations on the prefix cache against a plain model: memory that holds token ids.
// Whatever is resumed must hold exactly the prompt's own tokens, and everything comes back in the
// end.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>

#include "cache/prefix_cache.h"
#include "core/status.h"

namespace fathom {
namespace {

constexpr int kBlockTokens = 4;
constexpr int kVocab = 3;  // so few that prompts share beginnings all the time
constexpr size_t kLongest = 60;

// A slot or bundle as the model sees it: the tokens it has advanced over.
using Tokens = std::vector<TokenId>;

struct Sequence {
  Tokens tokens;
  PrefixPath path;
  std::vector<BlockId> table;
  SlotId slot;
  int64_t computed = 0;
  int64_t emit_from = 0;  // rows below it are there already
  std::vector<int64_t> saves;
};

class World {
 public:
  World(uint64_t seed, bool host, int64_t rebuild)
      : random_(seed),
        blocks_(nullptr, 1, 24),
        slots_(nullptr, 1, 5),
        bundles_(nullptr, 1, 9),
        host_{{nullptr, 1, 16}, {nullptr, 1, 6}},
        cache_({.block_tokens = kBlockTokens,
                .bundle_interval = 8,
                .min_save = 1,
                .rebuild = rebuild,
                .events = true},
               blocks_, bundles_, host ? &host_ : nullptr, &ops_),
        block_memory_(24),
        host_memory_(16),
        slot_memory_(5),
        bundle_memory_(9),
        host_bundle_memory_(6) {}

  void Step() {
    ++now_;
    const int dice = Draw(100);
    if (dice < 12) Start(nullptr);
    else if (dice < 18 && !running_.empty()) Start(&Any());
    else if (dice < 75 && !running_.empty()) Advance(Any());
    else if (dice < 80 && !running_.empty()) RollBack(Any());
    else if (dice < 83 && !running_.empty()) cache_.Keep(Any().path, 1 + Draw(20), now_ + Draw(50));
    else if (dice < 95 && !running_.empty()) Finish(Draw(static_cast<int>(running_.size())));
    else if (dice == 95) Pressure();
    else if (dice == 96 && Draw(50) == 0) cache_.Clear(now_);
    Run();
    FollowEvents();
  }

  void End() {
    while (!running_.empty()) Finish(0);
    Run();
    cache_.CheckInvariants();
    EXPECT_EQ(blocks_.available(), blocks_.capacity());
    cache_.Clear(now_);
    EXPECT_EQ(blocks_.free_count(), blocks_.capacity());
    EXPECT_EQ(bundles_.free_count(), bundles_.capacity());
    EXPECT_EQ(slots_.free_count(), slots_.capacity());
    EXPECT_EQ(host_.blocks.free_count(), host_.blocks.capacity());
    EXPECT_EQ(host_.bundles.free_count(), host_.bundles.capacity());
    EXPECT_EQ(cache_.stats().nodes, 0);
    FollowEvents();
    EXPECT_TRUE(announced_.empty());
    cache_.CheckInvariants();
  }

  void Check() const { cache_.CheckInvariants(); }
  int64_t resumed = 0, from_host = 0, rebuilt = 0, cold = 0, preempted = 0;
  const PrefixStats& stats() const { return cache_.stats(); }

 private:
  int Draw(int below) { return static_cast<int>(random_() % static_cast<uint64_t>(below)); }
  Sequence& Any() {
    return *running_[static_cast<size_t>(Draw(static_cast<int>(running_.size())))];
  }

  // What a router makes of the events: nothing is stored twice or removed without having been
  // stored, and no block is stored before its parent.
  void FollowEvents() {
    for (const CacheEvent& event : cache_.TakeEvents()) {
      if (event.kind == CacheEvent::Kind::kCleared) {
        announced_.clear();
        continue;
      }
      const std::pair<BlockHash, CacheTier> place{event.hash, event.tier};
      if (event.kind == CacheEvent::Kind::kRemoved) {
        ASSERT_EQ(announced_.erase(place), 1u);
        continue;
      }
      ASSERT_TRUE(announced_.insert(place).second);
      if (event.first) continue;
      const auto parent = announced_.lower_bound({event.parent, CacheTier::kDevice});
      ASSERT_TRUE(parent != announced_.end() && parent->first == event.parent);
    }
  }

  // A prompt of its own, or one that follows another sequence's for a while.
  void Start(const Sequence* like) {
    const std::optional<SlotId> slot = slots_.Allocate();
    if (!slot) return;
    auto sequence = std::make_unique<Sequence>();
    if (like != nullptr) {
      const auto length = 1 + Draw(static_cast<int>(like->tokens.size()));
      sequence->tokens.assign(like->tokens.begin(), like->tokens.begin() + length);
    }
    const size_t more = static_cast<size_t>(1 + Draw(30));
    for (size_t i = 0; i < more; ++i) sequence->tokens.push_back(Draw(kVocab));
    sequence->slot = *slot;
    const std::string salt = Draw(10) == 0 ? "other" : "";
    sequence->path = cache_.Open(salt);
    Enter(*sequence);
    running_.push_back(std::move(sequence));
  }

  // From wherever the cache lets it go on.
  void Enter(Sequence& sequence) {
    ops_.push_back({CacheOp::Kind::kClearSlot, -1, sequence.slot.value});
    const PrefixMatch match = cache_.Find(sequence.path, sequence.tokens, now_);
    ASSERT_LT(match.boundary, static_cast<int64_t>(sequence.tokens.size()));
    ASSERT_GE(match.report.matched_tokens, match.boundary);
    ASSERT_EQ(match.report.device_tokens + match.report.host_tokens, match.boundary);
    sequence.computed = sequence.emit_from = 0;
    if (match.found() &&
        cache_.Attach(match, sequence.slot, &sequence.path, &sequence.table, now_)) {
      sequence.computed = match.boundary;
      if (match.bundle == nullptr) {
        ++rebuilt;
        sequence.emit_from = match.rows_to;
        Run();
        // The windows will be right at emit_from; the rows are right now.
        slot_memory_[Index(sequence.slot)].assign(sequence.tokens.begin(),
                                                  sequence.tokens.begin() + sequence.computed);
        Verify(sequence, sequence.emit_from);
      }
      ++resumed;
      from_host += match.report.host_tokens > 0 ? 1 : 0;
      Run();
      const Tokens right(sequence.tokens.begin(), sequence.tokens.begin() + sequence.computed);
      ASSERT_EQ(slot_memory_[Index(sequence.slot)], right);
      ASSERT_EQ(
          static_cast<int64_t>(sequence.table.size()),
          (std::max(sequence.computed, sequence.emit_from) + kBlockTokens - 1) / kBlockTokens);
    } else {
      ++cold;
    }
    const auto known = static_cast<int64_t>(sequence.tokens.size());
    const std::vector<int64_t> boundaries = {known / 2};
    sequence.saves = cache_.PlanSaves(std::max(sequence.computed, sequence.emit_from), known, known,
                                      boundaries, match.junction);
    for (const int64_t at : sequence.saves) ASSERT_TRUE(at > sequence.computed && at < known);
  }

  // A chunk, up to the next boundary at most; then perhaps a generated token.
  void Advance(Sequence& sequence) {
    const auto known = static_cast<int64_t>(sequence.tokens.size());
    int64_t to = std::min(known, sequence.computed + 1 + Draw(7));
    if (!sequence.saves.empty()) to = std::min(to, sequence.saves.front());
    while (static_cast<int64_t>(sequence.table.size()) * kBlockTokens < to) {
      const std::optional<BlockId> block = cache_.AllocateBlock(now_);
      if (!block) {
        Preempt(sequence);
        return;
      }
      sequence.table.push_back(*block);
    }
    Run();
    Tokens& slot = slot_memory_[Index(sequence.slot)];
    ASSERT_EQ(static_cast<int64_t>(slot.size()), sequence.computed);
    for (int64_t at = sequence.computed; at < to; ++at) {
      const BlockId block = sequence.table[static_cast<size_t>(at / kBlockTokens)];
      Tokens& rows = block_memory_[Index(block)];
      rows.resize(kBlockTokens, -1);
      if (at >= sequence.emit_from) {
        rows[static_cast<size_t>(at % kBlockTokens)] = sequence.tokens[static_cast<size_t>(at)];
      }
      slot.push_back(sequence.tokens[static_cast<size_t>(at)]);
    }
    sequence.computed = to;
    cache_.Extend(&sequence.path, sequence.tokens, to, &sequence.table);
    Verify(sequence, sequence.computed);
    if (!sequence.saves.empty() && sequence.saves.front() == to) {
      sequence.saves.erase(sequence.saves.begin());
      Save(sequence);
    }
    if (to == known && sequence.tokens.size() < kLongest) sequence.tokens.push_back(Draw(kVocab));
  }

  void Save(const Sequence& sequence) {
    if (sequence.computed == 0 || sequence.computed < sequence.emit_from) return;
    cache_.Save(sequence.path, sequence.tokens, sequence.computed, sequence.table, sequence.slot,
                now_);
  }

  // Every row of [0, to) is the sequence's own token.
  void Verify(const Sequence& sequence, int64_t to) {
    for (int64_t at = 0; at < to; ++at) {
      const BlockId block = sequence.table[static_cast<size_t>(at / kBlockTokens)];
      ASSERT_EQ(block_memory_[Index(block)][static_cast<size_t>(at % kBlockTokens)],
                sequence.tokens[static_cast<size_t>(at)]);
    }
  }

  void Preempt(Sequence& sequence) {
    ++preempted;
    Run();
    Save(sequence);
    const PrefixPath root{sequence.path.root, sequence.path.root};
    const PrefixPath again = cache_.Open(Salt(root));
    cache_.Leave(&sequence.path, &sequence.table, now_);
    sequence.path = again;
    Enter(sequence);
  }

  // Opening by salt needs the salt; two are in use.
  std::string Salt(const PrefixPath& path) {
    PrefixPath other = cache_.Open("other");
    const bool is_other = other.root == path.root;
    std::vector<BlockId> none;
    cache_.Leave(&other, &none, now_);
    return is_other ? "other" : "";
  }

  // Forgets some tokens and goes on differently, as a rejected draft or a shorter retry does.
  void RollBack(Sequence& sequence) {
    const std::string salt = Salt(sequence.path);
    const PrefixPath again = cache_.Open(salt);
    cache_.Leave(&sequence.path, &sequence.table, now_);
    sequence.path = again;
    sequence.tokens.resize(static_cast<size_t>(1 + Draw(static_cast<int>(sequence.tokens.size()))));
    sequence.tokens.push_back(Draw(kVocab));
    Enter(sequence);
  }

  void Finish(int index) {
    Sequence& sequence = *running_[static_cast<size_t>(index)];
    if (Draw(5) != 0) Save(sequence);  // else cancelled
    cache_.Leave(&sequence.path, &sequence.table, now_);
    slots_.Release(sequence.slot);
    running_.erase(running_.begin() + index);
  }

  // Takes all the memory there is and gives it back: everything that can be evicted is.
  void Pressure() {
    std::vector<BlockId> taken;
    const int most = 1 + Draw(blocks_.capacity());
    while (static_cast<int>(taken.size()) < most) {
      const std::optional<BlockId> block = cache_.AllocateBlock(now_);
      if (!block) break;
      taken.push_back(*block);
    }
    Run();
    for (const BlockId block : taken) block_memory_[Index(block)].assign(kBlockTokens, -7);
    for (const BlockId block : taken) blocks_.Release(block);
  }

  template <class Id>
  static size_t Index(Id id) {
    return static_cast<size_t>(id.value);
  }

  void Run() {
    for (const CacheOp& op : ops_) {
      const auto from = static_cast<size_t>(op.from), to = static_cast<size_t>(op.to);
      switch (op.kind) {
        case CacheOp::Kind::kClearSlot: slot_memory_[to].clear(); break;
        case CacheOp::Kind::kSaveSlot:
          bundle_memory_[to] = slot_memory_[from];
          ASSERT_EQ(static_cast<int64_t>(bundle_memory_[to].size()), op.tokens);
          break;
        case CacheOp::Kind::kRestoreSlot:
          slot_memory_[to] = bundle_memory_[from];
          ASSERT_EQ(static_cast<int64_t>(bundle_memory_[from].size()), op.tokens);
          break;
        case CacheOp::Kind::kCopyBlock: block_memory_[to] = block_memory_[from]; break;
        case CacheOp::Kind::kBlockToHost: host_memory_[to] = block_memory_[from]; break;
        case CacheOp::Kind::kBlockFromHost: block_memory_[to] = host_memory_[from]; break;
        case CacheOp::Kind::kBundleToHost: host_bundle_memory_[to] = bundle_memory_[from]; break;
        case CacheOp::Kind::kBundleFromHost: bundle_memory_[to] = host_bundle_memory_[from]; break;
        default: FAIL() << "no disk here";
      }
    }
    ops_.clear();
  }

  std::mt19937_64 random_;
  double now_ = 0;
  BlockPool blocks_;
  SlotPool slots_;
  BundlePool bundles_;
  HostTier host_;
  std::vector<CacheOp> ops_;
  PrefixCache cache_;
  std::vector<Tokens> block_memory_, host_memory_, slot_memory_, bundle_memory_,
      host_bundle_memory_;
  std::set<std::pair<BlockHash, CacheTier>> announced_;
  std::vector<std::unique_ptr<Sequence>> running_;
};

void RunWorld(uint64_t seed, bool host, int64_t rebuild, int64_t steps) {
  World world(seed, host, rebuild);
  for (int64_t i = 0; i < steps && !::testing::Test::HasFailure(); ++i) {
    world.Step();
    if (i % 97 == 0) world.Check();
  }
  world.End();
  std::printf(
      "%lld steps: %lld resumed (%lld from host, %lld with windows rebuilt), %lld cold, %lld "
      "preempted, %llu blocks "
      "evicted, %llu bundles thinned\n",
      static_cast<long long>(steps), static_cast<long long>(world.resumed),
      static_cast<long long>(world.from_host), static_cast<long long>(world.rebuilt),
      static_cast<long long>(world.cold), static_cast<long long>(world.preempted),
      static_cast<unsigned long long>(world.stats().blocks_evicted),
      static_cast<unsigned long long>(world.stats().bundles_thinned));
  EXPECT_GT(world.resumed, steps / 100);
  EXPECT_GT(world.preempted, 0);
  if (host) {
    EXPECT_GT(world.from_host, steps / 10'000);
  }
}

// FATHOM_RANDOM_STEPS sets the length; the sanitizer lane runs ten million.
int64_t Steps() {
  const char* text = std::getenv("FATHOM_RANDOM_STEPS");
  return text != nullptr ? std::atoll(text) : 200'000;
}

TEST(PrefixRandom, ResumesOnlyWhatIsRight) {
  RunWorld(1, false, 0, Steps() / 4);
}
TEST(PrefixRandom, ResumesOnlyWhatIsRightWithAHostTier) {
  RunWorld(2, true, 0, Steps() / 4);
}
TEST(PrefixRandom, ResumesOnlyWhatIsRightWithWindowsRebuilt) {
  RunWorld(3, false, 8, Steps() / 4);
}
TEST(PrefixRandom, ResumesOnlyWhatIsRightWithAllOfIt) {
  RunWorld(4, true, 8, Steps() / 4);
}

}  // namespace
}  // namespace fathom
