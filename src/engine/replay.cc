#include "engine/replay.h"

#include <cstring>
#include <utility>

namespace fathom {

Expected<std::unique_ptr<Replay>> Replay::Make(const ModelConfig& config, const Weights& weights,
                                               ops::Backend& backend,
                                               const ReplayOptions& options) {
  FATHOM_ASSIGN(const Geometry geometry, MakeGeometry(config, options.cache));
  const int64_t per_sequence = geometry.blocks_for(options.max_context);
  FATHOM_ASSIGN(
      Reservation blocks,
      Reservation::Make(options.sequences * per_sequence * geometry.block_bytes, "cache blocks"));
  FATHOM_ASSIGN(Reservation slots,
                Reservation::Make(options.sequences * geometry.slot_bytes, "sequence slots"));
  return std::unique_ptr<Replay>(
      new Replay(config, weights, backend, options, geometry, std::move(blocks), std::move(slots)));
}

Replay::Replay(const ModelConfig& config, const Weights& weights, ops::Backend& backend,
               const ReplayOptions& options, const Geometry& geometry, Reservation blocks,
               Reservation slots)
    : config_(config),
      options_(options),
      geometry_(geometry),
      block_memory_(std::move(blocks)),
      slot_memory_(std::move(slots)),
      blocks_(block_memory_.data(), geometry.block_bytes,
              static_cast<int32_t>(options.sequences * geometry.blocks_for(options.max_context))),
      slots_(slot_memory_.data(), geometry.slot_bytes, options.sequences),
      kv_(MakeKvView(geometry, config.num_layers, blocks_.base(), slots_.base())),
      forward_(config, weights, backend,
               {.numerics = options.numerics,
                .max_tokens = options.max_step_tokens,
                .max_logit_rows = options.max_step_tokens}),
      positions_(options.sequences, 0),
      blocks_of_(options.sequences) {
  for (int s = 0; s < options.sequences; ++s) slot_of_.push_back(*slots_.Allocate());
}

Expected<std::span<const float>> Replay::Step(std::span<const Chunk> chunks, Logits logits,
                                              Tap* tap) {
  plan_.Clear();
  for (const Chunk& chunk : chunks) {
    const auto count = static_cast<int64_t>(chunk.tokens.size());
    int64_t& position = positions_[chunk.sequence];
    if (position + count > options_.max_context) {
      return Fail(Code::kInvalidArgument, "{} tokens are more than the {} reserved",
                  position + count, options_.max_context);
    }
    auto& blocks = blocks_of_[chunk.sequence];
    while (static_cast<int64_t>(blocks.size()) < geometry_.blocks_for(position + count)) {
      blocks.push_back(*blocks_.Allocate());
    }
    plan_.AddSequence(RequestId{static_cast<uint64_t>(chunk.sequence)}, slot_of_[chunk.sequence],
                      blocks);
    for (int64_t i = 0; i < count; ++i) {
      const TokenId token = chunk.tokens[i];
      if (token < 0 || token >= config_.vocab_size) {
        return Fail(Code::kInvalidArgument, "token id {} at position {} is outside 0..{}", token,
                    position + i, config_.vocab_size - 1);
      }
      const bool wanted = logits == Logits::kAll || (logits == Logits::kLast && i + 1 == count);
      plan_.AddToken(token, position + i, wanted);
    }
    position += count;
  }
  plan_.Finish();
  if (plan_.num_tokens() == 0 || plan_.num_tokens() > options_.max_step_tokens) {
    return Fail(Code::kInvalidArgument, "a step of {} tokens, allowed are 1..{}",
                plan_.num_tokens(), options_.max_step_tokens);
  }
  const auto rows = static_cast<int64_t>(plan_.logit_rows.size());
  logits_.resize(rows * config_.vocab_size);
  forward_.Run(plan_.view(), kv_, plan_.logit_rows,
               F32Matrix(logits_.data(), rows, config_.vocab_size), tap);
  return std::span<const float>(logits_);
}

std::span<const std::byte> Replay::slot_bytes(int sequence) const {
  return {slots_.address(slot_of_[sequence]), static_cast<size_t>(geometry_.slot_bytes)};
}

std::span<const std::byte> Replay::block_bytes(int sequence, int64_t block) const {
  return {blocks_.address(blocks_of_[sequence][block]), static_cast<size_t>(geometry_.block_bytes)};
}

void Replay::CopySequence(int from, int to) {
  Restart(to);
  for (BlockId block : blocks_of_[from]) {
    blocks_of_[to].push_back(*blocks_.Allocate());
    std::memcpy(blocks_.address(blocks_of_[to].back()), blocks_.address(block),
                geometry_.block_bytes);
  }
  std::memcpy(slots_.address(slot_of_[to]), slots_.address(slot_of_[from]), geometry_.slot_bytes);
  positions_[to] = positions_[from];
}

void Replay::Restart(int sequence) {
  for (BlockId block : blocks_of_[sequence]) {
    std::memset(blocks_.address(block), 0xff, geometry_.block_bytes);
    blocks_.Release(block);
  }
  blocks_of_[sequence].clear();
  std::memset(slots_.address(slot_of_[sequence]), 0xff, geometry_.slot_bytes);
  positions_[sequence] = 0;
}

}  // namespace fathom
