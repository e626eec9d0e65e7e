#include "engine/replay.h"

#include <new>
#include <utility>

namespace fathom {

Expected<std::unique_ptr<Replay>> Replay::Make(const ModelConfig& config, const Weights& weights,
                                               ops::Backend& backend,
                                               const ReplayOptions& options) {
  FATHOM_ASSIGN(const Geometry geometry, MakeGeometry(config, options.cache));
  const int64_t per_sequence = geometry.blocks_for(options.max_context);
  FATHOM_ASSIGN(
      Reservation blocks,
      options.memory(options.sequences * per_sequence * geometry.block_bytes, "cache blocks"));
  FATHOM_ASSIGN(Reservation slots,
                options.memory(options.sequences * geometry.slot_bytes, "sequence slots"));
  FATHOM_ASSIGN(Reservation logits, options.memory(0, "logits"));
  try {
    return std::unique_ptr<Replay>(new Replay(config, weights, backend, options, geometry,
                                              std::move(blocks), std::move(slots),
                                              std::move(logits)));
  } catch (const std::bad_alloc&) {
    return Fail(Code::kResourceExhausted, "the buffers of a step of {} tokens do not fit",
                options.max_step_tokens);
  }
}

Replay::Replay(const ModelConfig& config, const Weights& weights, ops::Backend& backend,
               const ReplayOptions& options, const Geometry& geometry, Reservation blocks,
               Reservation slots, Reservation logits)
    : config_(config),
      backend_(backend),
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
      arrays_(backend, {.tokens = options.max_step_tokens,
                        .sequences = options.sequences,
                        .blocks_per_sequence = geometry.blocks_for(options.max_context),
                        .logit_rows = options.max_step_tokens}),
      logits_memory_(std::move(logits)),
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
  const int64_t bytes = rows * config_.vocab_size * static_cast<int64_t>(sizeof(float));
  if (bytes > logits_memory_.size()) {
    FATHOM_ASSIGN(logits_memory_, options_.memory(bytes, "logits"));
  }
  auto* logits_at = reinterpret_cast<float*>(logits_memory_.data());
  const StepArrays::Uploaded step = arrays_.Upload(plan_);
  forward_.Run(step.view, kv_, step.logit_rows, F32Matrix(logits_at, rows, config_.vocab_size),
               tap);
  logits_.resize(static_cast<size_t>(rows * config_.vocab_size));
  backend_.ToHost(logits_.data(), logits_at, bytes);
  return std::span<const float>(logits_);
}

std::vector<std::byte> Replay::slot_bytes(int sequence) const {
  std::vector<std::byte> bytes(static_cast<size_t>(geometry_.slot_bytes));
  backend_.ToHost(bytes.data(), slots_.address(slot_of_[sequence]), geometry_.slot_bytes);
  return bytes;
}

std::vector<std::byte> Replay::block_bytes(int sequence, int64_t block) const {
  std::vector<std::byte> bytes(static_cast<size_t>(geometry_.block_bytes));
  backend_.ToHost(bytes.data(), blocks_.address(blocks_of_[sequence][block]),
                  geometry_.block_bytes);
  return bytes;
}

void Replay::CopySequence(int from, int to) {
  Restart(to);
  for (BlockId block : blocks_of_[from]) {
    blocks_of_[to].push_back(*blocks_.Allocate());
    backend_.Copy(blocks_.address(blocks_of_[to].back()), blocks_.address(block),
                  geometry_.block_bytes);
  }
  backend_.Copy(slots_.address(slot_of_[to]), slots_.address(slot_of_[from]), geometry_.slot_bytes);
  positions_[to] = positions_[from];
}

void Replay::Restart(int sequence) {
  for (BlockId block : blocks_of_[sequence]) {
    backend_.Fill(blocks_.address(block), 0xff, geometry_.block_bytes);
    blocks_.Release(block);
  }
  blocks_of_[sequence].clear();
  backend_.Fill(slots_.address(slot_of_[sequence]), 0xff, geometry_.slot_bytes);
  positions_[sequence] = 0;
}

}  // namespace fathom
