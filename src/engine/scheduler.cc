#include "engine/scheduler.h"

#include <algorithm>

#include "core/status.h"

namespace fathom {
namespace {

// Decode leaves at least this part of a step to a waiting prefill.
constexpr int kPrefillShare = 8;
// Seconds after which a sequence that did not fit is looked up again though no room was gained:
// others may have computed some of its blocks.
constexpr double kLookAgain = 0.1;
// How often parts of one sequence are read from disk before it is computed instead.
constexpr int kMostLoads = 2;

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, BlockPool& blocks, SlotPool& slots,
                     std::vector<CacheOp>* ops, PrefixCache* cache, DiskTier* disk)
    : options_(options), blocks_(blocks), slots_(slots), ops_(ops), cache_(cache), disk_(disk) {
  FATHOM_CHECK(options.max_step_tokens > 0 && options.max_logit_rows > 0);
  FATHOM_CHECK(options.max_prefill_with_decode > 0 && options.block_tokens > 0);
}

int64_t Scheduler::BlocksFor(int64_t tokens) const {
  return (tokens + options_.block_tokens - 1) / options_.block_tokens;
}

// Blocks admission counts for a sequence: its known tokens and a block of head room, so that a
// sequence is not admitted only to be preempted at its next token.
int64_t Scheduler::Claim(const Sequence& sequence) const {
  return BlocksFor(std::min(sequence.limit, sequence.length() + options_.block_tokens));
}

void Scheduler::Add(Sequence* sequence) {
  FATHOM_CHECK(!sequence->slot && sequence->blocks.empty());
  FATHOM_CHECK(BlocksFor(sequence->limit) <= blocks_.capacity());
  Open(sequence);
  waiting_.insert(sequence);
}

void Scheduler::Open(Sequence* sequence) {
  if (cache_ != nullptr) sequence->path = cache_->Open(sequence->request.cache_salt);
}

void Scheduler::Remove(Sequence* sequence, bool save) {
  if (waiting_.erase(sequence) == 0) {
    const auto at = std::find(running_.begin(), running_.end(), sequence);
    FATHOM_CHECK(at != running_.end());
    running_.erase(at);
  }
  if (save && sequence->slot) SaveSlot(sequence);
  if (save && disk_ != nullptr && sequence->computed > 0) {
    disk_->Persist(sequence->path, sequence->tokens, sequence->request.session);
  }
  if (cache_ != nullptr && sequence->request.retain_seconds > 0 && sequence->computed > 0) {
    cache_->Keep(sequence->path, sequence->prompt_tokens - 1,
                 now_ + sequence->request.retain_seconds);
  }
  ReleaseUnits(sequence);
}

void Scheduler::ReleaseUnits(Sequence* sequence) {
  if (cache_ != nullptr) {
    cache_->Leave(&sequence->path, &sequence->blocks, now_);
  } else {
    for (const BlockId block : sequence->blocks) blocks_.Release(block);
    sequence->blocks.clear();
  }
  sequence->saves.clear();
  if (!sequence->slot) return;
  slots_.Release(*sequence->slot);
  sequence->slot.reset();
}

std::optional<BlockId> Scheduler::AllocateBlock() {
  return cache_ != nullptr ? cache_->AllocateBlock(now_) : blocks_.Allocate();
}

void Scheduler::SaveSlot(Sequence* sequence) {
  // While windows are being rebuilt the slot is of no use to others.
  if (cache_ == nullptr || sequence->computed == 0 || sequence->computed < sequence->emit_from) {
    return;
  }
  cache_->Save(sequence->path, sequence->tokens, sequence->computed, sequence->blocks,
               *sequence->slot, now_);
}

std::optional<PrefixMatch> Scheduler::Look(Sequence* sequence, int64_t room) {
  PrefixMatch match;
  match.report.prompt_tokens = sequence->prompt_tokens;
  match.report.reason = MissReason::kDisabled;
  // Log-probabilities of the prompt need the logits of all of it.
  if (cache_ == nullptr || sequence->request.prompt_logprobs >= 0) return match;
  match = cache_->Find(sequence->path, sequence->tokens, now_);
  if (match.loading) return std::nullopt;
  if (!match.on_disk) return match;
  PrefixMatch memory = cache_->Find(sequence->path, sequence->tokens, now_, false);
  // A few tokens are computed sooner than read.
  const bool worth = match.boundary - memory.boundary >= cache_->options().min_save;
  const bool fits = Claim(*sequence) - match.held_nodes <= room;
  if (!worth || sequence->loads == kMostLoads || !fits || !disk_->Load(match, now_)) return memory;
  ++sequence->loads;
  sequence->awaited = match.boundary;
  return std::nullopt;
}

// Whether what the sequence waits for is still to come.
bool Scheduler::IsBehind(const Sequence* sequence) const {
  if (sequence->behind_until == 0) return false;
  const auto at = std::find_if(running_.begin(), running_.end(), [&](const Sequence* other) {
    return other->id == sequence->behind;
  });
  return at != running_.end() && (*at)->computed < sequence->behind_until;
}

bool Scheduler::WaitBehind(Sequence* sequence, int64_t boundary) {
  sequence->behind_until = 0;
  if (cache_ == nullptr || sequence->request.prompt_logprobs >= 0) return false;
  const int64_t least = boundary + cache_->options().min_save;
  for (Sequence* other : running_) {
    // The one in front finishes whatever comes: nobody waits for those behind it.
    if (!Precedes{}(other, sequence)) break;
    if (other->request.cache_salt != sequence->request.cache_salt) continue;
    const int64_t most = std::min(other->prompt_tokens, sequence->prompt_tokens) - 1;
    if (most < least || most <= other->computed) continue;
    const auto end = sequence->tokens.begin() + most;
    const int64_t shared =
        std::mismatch(sequence->tokens.begin(), end, other->tokens.begin()).first -
        sequence->tokens.begin();
    if (shared < least || shared <= std::max(other->computed, other->emit_from)) continue;
    other->SaveAt(shared);
    sequence->behind = other->id;
    sequence->behind_until = shared;
    return true;
  }
  return false;
}

void Scheduler::Admit() {
  if (waiting_.empty() || slots_.free_count() == 0) return;
  int64_t wanted = 0;  // blocks that running sequences still need for what they know
  for (const Sequence* sequence : running_) {
    wanted +=
        std::max<int64_t>(0, Claim(*sequence) - static_cast<int64_t>(sequence->blocks.size()));
  }
  for (auto at = waiting_.begin(); at != waiting_.end() && slots_.free_count() > 0;) {
    Sequence* next = *at;
    const int64_t room = blocks_.available() - wanted;
    // A lookup of a million tokens takes a millisecond: not in every step that changes nothing.
    if (room <= next->blocked_room && now_ - next->blocked_at < kLookAgain) break;
    if (IsBehind(next)) {
      ++at;
      continue;
    }
    const std::optional<PrefixMatch> match = Look(next, room);
    if (!match || WaitBehind(next, match->boundary)) {
      ++at;
      continue;
    }
    if (wanted + Claim(*next) - match->held_nodes > blocks_.available()) {
      next->blocked_room = room;
      next->blocked_at = now_;
      break;
    }
    next->blocked_room = -1;
    at = waiting_.erase(at);
    running_.insert(std::upper_bound(running_.begin(), running_.end(), next, Precedes{}), next);
    admitted_.push_back(next);
    Enter(next, *match);
    wanted += std::max<int64_t>(0, Claim(*next) - static_cast<int64_t>(next->blocks.size()));
  }
}

// Gives a sequence its slot and what the prefix cache has for it.
void Scheduler::Enter(Sequence* sequence, const PrefixMatch& match) {
  sequence->slot = slots_.Allocate();
  ops_->push_back({.kind = CacheOp::Kind::kClearSlot, .to = sequence->slot->value});
  PrefixReport report = match.report;
  sequence->emit_from = 0;
  const bool attached = match.found() && cache_->Attach(match, *sequence->slot, &sequence->path,
                                                        &sequence->blocks, now_);
  if (attached) {
    sequence->computed = match.boundary;
    if (match.bundle == nullptr) sequence->emit_from = match.rows_to;
  } else if (match.found()) {
    report.rebuilt = 0;
    report.boundary = report.device_tokens = report.host_tokens = report.disk_tokens = 0;
    report.reason = MissReason::kTierFailed;
    report.detail = "no room to bring it up from host memory";
  }
  if (sequence->awaited > sequence->computed) {
    report.reason = MissReason::kTierFailed;
    report.detail = disk_->last_failure();
  }
  sequence->awaited = 0;
  if (sequence->admitted_at < 0) {
    sequence->admitted_at = now_;
    sequence->prefix = report;
    sequence->furthest_prefill = report.boundary;
  }
  if (cache_ == nullptr) return;
  sequence->saves =
      cache_->PlanSaves(std::max(sequence->computed, sequence->emit_from), sequence->prompt_tokens,
                        sequence->length(), sequence->request.boundaries, match.junction);
  // Where windows are rebuilt they were missing: the next request finds them.
  if (sequence->emit_from > 0) {
    sequence->saves.insert(sequence->saves.begin(), sequence->emit_from);
  }
  std::reverse(sequence->saves.begin(), sequence->saves.end());
}

void Scheduler::Advance(const Chunk& chunk) {
  Sequence& sequence = *chunk.sequence;
  sequence.computed = chunk.begin + chunk.count;
  if (cache_ == nullptr) return;
  cache_->Extend(&sequence.path, sequence.tokens, sequence.computed, &sequence.blocks);
  bool save = false;
  while (!sequence.saves.empty() && sequence.saves.back() <= sequence.computed) {
    save = save || sequence.saves.back() == sequence.computed;
    sequence.saves.pop_back();
  }
  // Generated tokens come one by one, so an interval's end is always met.
  save = save || (sequence.computed > sequence.prompt_tokens &&
                  sequence.computed % cache_->options().bundle_interval == 0);
  if (save) SaveSlot(&sequence);
}

void Scheduler::Preempt(Sequence* sequence) {
  SaveSlot(sequence);
  sequence->recomputed += sequence->computed;
  ReleaseUnits(sequence);
  Open(sequence);
  sequence->computed = 0;
  ++sequence->preemptions;
  ++preemptions_;
  std::erase(running_, sequence);
  std::erase(admitted_, sequence);
  std::erase_if(chunks_, [&](const Chunk& chunk) { return chunk.sequence == sequence; });
  waiting_.insert(sequence);
}

// Extends the block table to hold up to `tokens` more tokens, if need be at the expense of those
// after the sequence in order. Returns how many of them it holds now.
int64_t Scheduler::Grow(Sequence* sequence, int64_t tokens) {
  const int64_t needed = BlocksFor(sequence->computed + tokens);
  while (static_cast<int64_t>(sequence->blocks.size()) < needed) {
    if (const std::optional<BlockId> block = AllocateBlock()) {
      sequence->blocks.push_back(*block);
      continue;
    }
    const auto victim = std::find_if(running_.rbegin(), running_.rend(), [&](Sequence* other) {
      return other == sequence || !other->blocks.empty();
    });
    if (*victim == sequence) break;
    Preempt(*victim);
  }
  const int64_t room = static_cast<int64_t>(sequence->blocks.size()) * options_.block_tokens;
  return std::min(tokens, room - sequence->computed);
}

bool Scheduler::Plan(StepPlan& plan, double now) {
  ++step_;
  now_ = now;
  chunks_.clear();
  admitted_.clear();
  Admit();
  decoding_.clear();
  prefilling_.clear();
  for (Sequence* sequence : running_) {
    (sequence->decoding() ? decoding_ : prefilling_).push_back(sequence);
  }
  PlanDecode(decoding_, DecodeBudget(decoding_.size(), !prefilling_.empty()));
  const auto decoded = static_cast<int64_t>(chunks_.size());
  Budget rest{options_.max_step_tokens - decoded, options_.max_logit_rows - decoded};
  if (decoded > 0) {
    rest.tokens = std::min<int64_t>(rest.tokens, options_.max_prefill_with_decode);
  }
  PlanPrefill(prefilling_, rest);
  // It was the turn of prefill, but it has to wait for memory that decoding sequences hold.
  if (chunks_.empty()) {
    PlanDecode(decoding_, {options_.max_step_tokens, options_.max_logit_rows});
  }
  Build(plan);
  return !chunks_.empty();
}

Scheduler::Budget Scheduler::DecodeBudget(size_t decoding, bool prefill_waits) {
  const Budget whole{options_.max_step_tokens, options_.max_logit_rows};
  if (!prefill_waits || decoding == 0) return whole;
  const int64_t share = std::min(options_.max_prefill_with_decode,
                                 std::max(1, options_.max_step_tokens / kPrefillShare));
  const Budget left{whole.tokens - share, whole.rows - 1};
  if (left.tokens > 0 && left.rows > 0) return left;
  // A step of one token or one logit row cannot be shared: the two take turns.
  decode_turn_ = !decode_turn_;
  return decode_turn_ ? whole : Budget{};
}

void Scheduler::PlanDecode(std::vector<Sequence*>& decoding, Budget budget) {
  const auto most = static_cast<size_t>(std::min(budget.tokens, budget.rows));
  if (decoding.size() > most) {
    std::sort(decoding.begin(), decoding.end(), [](const Sequence* a, const Sequence* b) {
      return a->last_step != b->last_step ? a->last_step < b->last_step : Precedes{}(a, b);
    });
  }
  for (Sequence* sequence : decoding) {
    if (chunks_.size() >= most) break;
    if (!sequence->slot || Grow(sequence, 1) == 0) continue;  // preempted, or to wait for memory
    chunks_.push_back({.sequence = sequence, .begin = sequence->computed, .count = 1});
  }
}

// Adds at most `budget` to what the sequence already has in this step. Returns what was used.
Scheduler::Budget Scheduler::Extend(Sequence* sequence, Budget budget) {
  if (!sequence->slot) return {};  // preempted by one before it
  auto chunk = FindChunk(sequence);
  const int64_t planned = chunk == chunks_.end() ? 0 : chunk->count;
  const int64_t begin = sequence->computed + planned;
  const int64_t fits =
      Grow(sequence, planned + std::min(budget.tokens, sequence->UntilSave(begin))) - planned;
  Budget used;
  for (; used.tokens < fits; ++used.tokens) {
    if (!sequence->wants_logits(begin + used.tokens)) continue;
    if (used.rows == budget.rows) break;
    ++used.rows;
  }
  if (used.tokens == 0) return used;
  chunk = FindChunk(sequence);  // Grow may have preempted others and moved it
  if (chunk == chunks_.end()) {
    chunk = chunks_.insert(chunk, {.sequence = sequence, .begin = begin});
  }
  chunk->count += used.tokens;
  return used;
}

std::vector<Chunk>::iterator Scheduler::FindChunk(const Sequence* sequence) {
  return std::find_if(chunks_.begin(), chunks_.end(),
                      [&](const Chunk& chunk) { return chunk.sequence == sequence; });
}

void Scheduler::PlanPrefill(std::vector<Sequence*>& prefilling, Budget budget) {
  std::erase_if(prefilling, [](const Sequence* sequence) { return !sequence->slot; });
  if (prefilling.empty()) return;
  const auto extend = [&](Sequence* sequence, Budget share) {
    const Budget used = Extend(sequence, share);
    budget.tokens -= used.tokens;
    budget.rows -= used.rows;
  };
  Sequence* first = prefilling.front();
  extend(first, {(budget.tokens + 1) / 2, (budget.rows + 1) / 2});
  std::sort(prefilling.begin() + 1, prefilling.end(), [](const Sequence* a, const Sequence* b) {
    if (a->request.priority != b->request.priority) {
      return a->request.priority < b->request.priority;
    }
    return a->remaining() != b->remaining() ? a->remaining() < b->remaining() : a->id < b->id;
  });
  for (auto it = prefilling.begin() + 1; it != prefilling.end(); ++it) extend(*it, budget);
  extend(first, budget);
}

void Scheduler::Build(StepPlan& plan) {
  plan.Clear();
  for (Chunk& chunk : chunks_) {
    Sequence& sequence = *chunk.sequence;
    sequence.last_step = step_;
    chunk.first_row = static_cast<int64_t>(plan.logit_rows.size());
    plan.AddSequence(sequence.id, *sequence.slot, sequence.blocks, sequence.emit_from);
    for (int64_t at = chunk.begin; at < chunk.begin + chunk.count; ++at) {
      plan.AddToken(sequence.tokens[static_cast<size_t>(at)], at, sequence.wants_logits(at));
    }
    chunk.rows = static_cast<int64_t>(plan.logit_rows.size()) - chunk.first_row;
  }
  plan.Finish();
}

}  // namespace fathom
