// Scheduler: which tokens of which sequences run in the next step. Pure bookkeeping: no thread, no
// clock, no device; it owns no sequence.
//
//   scheduler.Add(&sequence);
//   if (scheduler.Plan(plan)) {
//     ... run the plan ...
//     for (const Chunk& chunk : scheduler.chunks()) scheduler.Advance(chunk);
//   }
//   scheduler.Remove(&sequence, save);                 // finished or cancelled, in any state
//
// Policy
// - Order. Everything follows one order, Precedes: lower priority value, then arrival.
// - Decode first. Each decoding sequence gets one token in every step. While any decodes, prefill
//   takes at most max_prefill_with_decode tokens of the step, so a long prompt cannot stretch the
//   steps of others.
// - Prefill always moves. With a prompt waiting, decode leaves at least an eighth of the step (or
//   max_prefill_with_decode when that is less, at least one token) and one logit row. Decoding
//   sequences beyond what is left take turns, least recently run first.
// - Prefill is shared. The first prefilling sequence in order gets half of the prefill tokens,
//   which bounds its time whatever short prompts stream in; the other half goes to the rest, by
//   priority and then shortest remaining prompt, which bounds the wait of a short prompt behind a
//   long one. What one side leaves, the other takes.
// - Admission. In order and without overtaking, as long as a slot is free and the blocks that all
//   running sequences' known tokens, this one's, and a block of head room for each still need are
//   free or evictable. What is shared is counted once. A sequence whose prefix is being read from
//   disk, or computed by one before it in order, waits for that; others pass it.
// - Prefix reuse. A sequence starts where the prefix cache lets it go on, with blocks and
// `computed`
//   > 0, and is saved at the boundaries the cache plans, where chunks end. One that another waits
//   for is saved where their prompts part.
// - Memory grows with the sequence, block by block, never copied. When none is free the running
//   sequence last in order is saved, gives up everything (slot, blocks) and waits again with its
//   tokens; later it goes on from what is still cached of it, with the same result because results
//   depend on no chunk boundary. A
//   sequence takes only from those after it in order, and Engine::Submit refuses what cannot fit
//   into an empty pool, so the first in order always finishes and nothing deadlocks.
//
// Blocks are counted in tokens alone; no rule here knows a compression ratio.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "cache/block_pool.h"
#include "cache/cache_op.h"
#include "cache/disk_tier.h"
#include "cache/prefix_cache.h"
#include "engine/sequence.h"
#include "engine/step_plan.h"

namespace fathom {

struct SchedulerOptions {
  int max_step_tokens = 512;
  int max_logit_rows = 64;
  int max_prefill_with_decode = 256;
  int block_tokens = 256;
};

// Tokens [begin, begin + count) of a sequence in the current step. Its logits are rows
// [first_row, first_row + rows) of the step's.
struct Chunk {
  Sequence* sequence = nullptr;
  int64_t begin = 0;
  int64_t count = 0;
  int64_t first_row = 0;
  int64_t rows = 0;
};

class Scheduler {
 public:
  using WaitingQueue = std::set<Sequence*, Precedes>;

  // Borrows everything. Without a cache nothing is reused. `ops` receives what has to be moved
  // before the step runs.
  Scheduler(const SchedulerOptions& options, BlockPool& blocks, SlotPool& slots,
            std::vector<CacheOp>* ops, PrefixCache* cache = nullptr, DiskTier* disk = nullptr);

  void Add(Sequence* sequence);
  // Returns the sequence's units to their pools and forgets it; with `save`, its slot stays in the
  // prefix cache first.
  void Remove(Sequence* sequence, bool save);

  // Admits, chooses and builds the next step. False when nothing can run: nothing waits or runs, or
  // what waits needs memory that a tier's transfer holds. `now`: seconds on the engine's clock.
  bool Plan(StepPlan& plan, double now);
  // The chunk has run: enters its blocks into the prefix cache and saves the slot where planned.
  void Advance(const Chunk& chunk);
  std::span<const Chunk> chunks() const { return chunks_; }
  // Sequences admitted in this Plan.
  std::span<Sequence* const> admitted() const { return admitted_; }

  const WaitingQueue& waiting() const { return waiting_; }
  const std::vector<Sequence*>& running() const { return running_; }  // in order
  uint64_t preemptions() const { return preemptions_; }

 private:
  struct Budget {
    int64_t tokens = 0;
    int64_t rows = 0;
  };

  int64_t BlocksFor(int64_t tokens) const;
  int64_t Claim(const Sequence& sequence) const;
  void Open(Sequence* sequence);
  // What the cache has for a waiting sequence; nullopt while parts of it are read from disk.
  std::optional<PrefixMatch> Look(Sequence* sequence, int64_t room);
  bool IsBehind(const Sequence* sequence) const;
  // Makes a waiting sequence, of which the cache has `boundary` tokens, wait for a running one that
  // computes more of its prompt. False: there is none.
  bool WaitBehind(Sequence* sequence, int64_t boundary);
  void Admit();
  void Enter(Sequence* sequence, const PrefixMatch& match);
  std::optional<BlockId> AllocateBlock();
  void SaveSlot(Sequence* sequence);
  void Preempt(Sequence* sequence);
  void ReleaseUnits(Sequence* sequence);
  int64_t Grow(Sequence* sequence, int64_t tokens);
  Budget DecodeBudget(size_t decoding, bool prefill_waits);
  void PlanDecode(std::vector<Sequence*>& decoding, Budget budget);
  void PlanPrefill(std::vector<Sequence*>& prefilling, Budget budget);
  Budget Extend(Sequence* sequence, Budget budget);
  std::vector<Chunk>::iterator FindChunk(const Sequence* sequence);
  void Build(StepPlan& plan);

  SchedulerOptions options_;
  BlockPool& blocks_;
  SlotPool& slots_;
  std::vector<CacheOp>* ops_;
  PrefixCache* cache_;
  DiskTier* disk_;
  double now_ = 0;
  WaitingQueue waiting_;
  std::vector<Sequence*> running_;  // sorted by Precedes
  std::vector<Chunk> chunks_;       // decode first
  std::vector<Sequence*> admitted_;
  std::vector<Sequence*> decoding_, prefilling_;  // scratch of Plan
  uint64_t step_ = 0;
  uint64_t preemptions_ = 0;
  bool decode_turn_ = false;
};

}  // namespace fathom
