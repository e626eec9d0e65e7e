// Replay: given token ids through the forward pass, chunk by chunk, without scheduler or sampler.
// What `fathom dump` and the golden tests run: the same cache layouts, step arrays and forward pass
// as the server, with every step's composition in the caller's hands.
//
//   FATHOM_ASSIGN(auto replay, Replay::Make(config, weights, backend, options));
//   std::vector<Replay::Chunk> step = {{0, ids}, {1, other_ids}};
//   std::span<const float> logits = replay->Step(step, Replay::Logits::kAll);
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "cache/block_pool.h"
#include "cache/geometry.h"
#include "core/status.h"
#include "engine/step_arrays.h"
#include "engine/step_plan.h"
#include "model/forward.h"

namespace fathom {

struct ReplayOptions {
  ops::Numerics numerics = ops::Numerics::kProduct;
  CacheOptions cache;
  int sequences = 1;
  int64_t max_context = 0;                  // tokens of the longest sequence
  int max_step_tokens = 1024;               // of one step, all sequences together
  MemorySource memory = Reservation::Make;  // where the backend computes
};

class Replay {
 public:
  struct Chunk {
    int sequence = 0;  // 0 .. sequences-1
    std::span<const TokenId> tokens;
  };
  enum class Logits { kNone, kLast, kAll };  // of every chunk: nothing, its last token, all tokens

  // Borrows config, weights and backend. Fails when the cache cannot be reserved.
  static Expected<std::unique_ptr<Replay>> Make(const ModelConfig& config, const Weights& weights,
                                                ops::Backend& backend,
                                                const ReplayOptions& options);

  // Runs one step. Logits [rows, V] in step order, valid until the next call. kInvalidArgument:
  // ids outside the vocabulary, more tokens than max_step_tokens or max_context allow.
  Expected<std::span<const float>> Step(std::span<const Chunk> chunks, Logits logits,
                                        Tap* tap = nullptr);

  int64_t position(int sequence) const { return positions_[sequence]; }  // tokens run so far
  // Copies of the memory a sequence owns, for comparing bytes: its slot, and its blocks in order.
  std::vector<std::byte> slot_bytes(int sequence) const;
  std::vector<std::byte> block_bytes(int sequence, int64_t block) const;
  const Geometry& geometry() const { return geometry_; }
  // Makes `to` a copy of `from`: same position, blocks and slot copied.
  void CopySequence(int from, int to);
  // Frees a sequence's cache and starts it again at position 0 with poisoned memory.
  void Restart(int sequence);

 private:
  Replay(const ModelConfig& config, const Weights& weights, ops::Backend& backend,
         const ReplayOptions& options, const Geometry& geometry, Reservation blocks,
         Reservation slots, Reservation logits);

  const ModelConfig& config_;
  ops::Backend& backend_;
  ReplayOptions options_;
  Geometry geometry_;
  Reservation block_memory_, slot_memory_;
  BlockPool blocks_;
  SlotPool slots_;
  KvView kv_;
  Forward forward_;
  StepPlan plan_;
  StepArrays arrays_;
  Reservation logits_memory_;  // [rows, V], as many rows as a step has asked for
  std::vector<float> logits_;
  std::vector<int64_t> positions_;
  std::vector<SlotId> slot_of_;
  std::vector<std::vector<BlockId>> blocks_of_;
};

}  // namespace fathom
