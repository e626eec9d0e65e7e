// Scheduler: which tokens of which sequences run in the next step. Pure bookkeeping: no thread, no
// clock, no device; it owns no sequence.
//
//   scheduler.Add(&sequence);
//   if (scheduler.Plan(plan)) {
//     ... run the plan ...
//     for (const Chunk& chunk : scheduler.chunks()) chunk.sequence->computed += chunk.count;
//   }
//   scheduler.Remove(&sequence);                       // finished or cancelled, in any state
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
// - Admission. In order and without overtaking, as long as a slot is free and the blocks of all
//   running sequences' known tokens, this one's, and a block of head room for each fit together.
// - Memory grows with the sequence, block by block, never copied. When none is free the running
//   sequence last in order gives up everything (slot, blocks) and waits again with its tokens; it
//   is computed anew later, with the same result because results depend on no chunk boundary. A
//   sequence takes only from those after it in order, and Engine::Submit refuses what cannot fit
//   into an empty pool, so the first in order always finishes and nothing deadlocks.
//
// Blocks are counted in tokens alone; no rule here knows a compression ratio. Prefix reuse enters
// in Admit: a sequence that starts with blocks and `computed` > 0 needs no other rule.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "cache/block_pool.h"
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

  // Borrows the pools.
  Scheduler(const SchedulerOptions& options, BlockPool& blocks, SlotPool& slots);

  void Add(Sequence* sequence);
  // Returns the sequence's units to their pools and forgets it.
  void Remove(Sequence* sequence);

  // Admits, chooses and builds the next step. False when nothing can run, which is so only when
  // nothing waits or runs.
  bool Plan(StepPlan& plan);
  std::span<const Chunk> chunks() const { return chunks_; }
  // Sequences that received a slot in this Plan; the slot is to be zeroed before the step runs.
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
  void Admit();
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
