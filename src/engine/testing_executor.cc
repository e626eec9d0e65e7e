#include "engine/testing_executor.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

namespace fathom {
namespace {

constexpr float kAnswerLogit = 100.0f;

uint64_t Mix(uint64_t hash, TokenId token) {  // splitmix64's finaliser
  uint64_t x = hash + 0x9e3779b97f4a7c15u + static_cast<uint32_t>(token);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// What a slot holds: zeros when handed out.
struct SlotState {
  int64_t length = 0;  // tokens seen
  uint64_t hash = 0;   // of them
};

class ScriptedExecutor : public Executor {
 public:
  ScriptedExecutor(ScriptedOptions options, BlockPool& blocks, SlotPool& slots)
      : options_(std::move(options)),
        blocks_(blocks),
        slots_(slots),
        logits_(static_cast<size_t>(options_.limits.max_logit_rows * options_.vocab_size)) {}

  Status Execute(const StepPlan& plan) override {
    if (options_.on_step) FATHOM_TRY(options_.on_step(plan));
    FATHOM_TRY(CheckShape(plan));
    FATHOM_TRY(CheckOwnership(plan));
    const ops::StepView step = plan.view();
    size_t row = 0;
    for (int32_t s = 0; s < step.num_sequences; ++s) {
      SlotState state = LoadSlot(step.slot[s]);
      // Windows are rebuilt from rows that are there: from an empty slot in the middle of a prompt.
      if (state.length == 0 && step.first_position(s) > 0 &&
          step.emit_from[s] > step.first_position(s)) {
        state = {step.first_position(s),
                 HistoryHash(History(step.blocks_of(s), step.first_position(s)))};
      }
      if (step.first_position(s) == 0 && (state.length != 0 || state.hash != 0)) {
        return Fail(Code::kInternal, "slot {} was handed out without being zeroed", step.slot[s]);
      }
      for (int32_t t = step.query_start[s]; t < step.query_start[s + 1]; ++t) {
        FATHOM_TRY(Store(step, s, t, state));
        if (row < plan.logit_rows.size() && plan.logit_rows[row] == t) {
          FATHOM_TRY(Answer(plan.requests[s], step.blocks_of(s), state, Row(row)));
          ++row;
        }
      }
      StoreSlot(step.slot[s], state);
    }
    return {};
  }
  void CopyLogits(int64_t row, std::span<float> to) override {
    std::ranges::copy(Row(static_cast<size_t>(row)), to.begin());
  }
  void Sample(std::span<const ops::SamplingRow> rows, std::span<ops::SampledToken> out) override {
    ops::SampleBatchReference(
        {F32Matrix(logits_.data(), options_.limits.max_logit_rows, options_.vocab_size), rows,
         out.data()});
  }

  int64_t vocab_size() const override { return options_.vocab_size; }
  ExecutorLimits limits() const override { return options_.limits; }

 private:
  Status CheckShape(const StepPlan& plan) const {
    if (plan.num_tokens() == 0 || plan.num_tokens() > options_.limits.max_step_tokens) {
      return Fail(Code::kInternal, "step of {} tokens, limit {}", plan.num_tokens(),
                  options_.limits.max_step_tokens);
    }
    if (plan.logit_rows.size() > static_cast<size_t>(options_.limits.max_logit_rows)) {
      return Fail(Code::kInternal, "{} logit rows, limit {}", plan.logit_rows.size(),
                  options_.limits.max_logit_rows);
    }
    if (!std::is_sorted(plan.logit_rows.begin(), plan.logit_rows.end())) {
      return Fail(Code::kInternal, "logit rows are not ascending");
    }
    return {};
  }

  // No two sequences of a step share a slot, a request or a block that one of them writes.
  Status CheckOwnership(const StepPlan& plan) const {
    const ops::StepView step = plan.view();
    std::unordered_set<int32_t> slots, written;
    std::unordered_set<RequestId> requests;
    const int block_tokens = options_.geometry.options.block_tokens;
    for (int32_t s = 0; s < step.num_sequences; ++s) {
      if (!slots.insert(step.slot[s]).second) {
        return Fail(Code::kInternal, "slot {} is used twice in a step", step.slot[s]);
      }
      if (!requests.insert(plan.requests[s]).second) {
        return Fail(Code::kInternal, "request {} is twice in a step", plan.requests[s].value);
      }
      const int32_t last = step.first_position(s) + step.tokens_of(s) - 1;
      const int32_t first = std::max(step.first_position(s), step.emit_from[s]);
      for (int32_t b = first / block_tokens; b <= last / block_tokens; ++b) {
        if (b >= step.max_blocks) {
          return Fail(Code::kInternal, "block table of request {} ends before position {}",
                      plan.requests[s].value, last);
        }
        if (!written.insert(step.blocks_of(s)[b]).second) {
          return Fail(Code::kInternal, "block {} is written by two sequences",
                      step.blocks_of(s)[b]);
        }
      }
    }
    return {};
  }

  std::byte* TokenAddress(const int32_t* table, int64_t position) const {
    const int block_tokens = options_.geometry.options.block_tokens;
    return blocks_.address(BlockId{table[position / block_tokens]}) +
           position % block_tokens * static_cast<int64_t>(sizeof(TokenId));
  }

  Status Store(const ops::StepView& step, int32_t s, int32_t t, SlotState& state) {
    if (step.sequence[t] != s) return Fail(Code::kInternal, "token {} names sequence {}", t, s);
    if (step.position[t] != state.length) {
      return Fail(Code::kInternal, "slot {} holds {} tokens, the next has position {}",
                  step.slot[s], state.length, step.position[t]);
    }
    const int32_t block =
        step.blocks_of(s)[step.position[t] / options_.geometry.options.block_tokens];
    if (block < 0 || block >= blocks_.capacity() || blocks_.references(BlockId{block}) < 1) {
      return Fail(Code::kInternal, "block {} is not allocated", block);
    }
    if (step.position[t] >= step.emit_from[s]) {
      std::memcpy(TokenAddress(step.blocks_of(s), state.length), &step.token[t], sizeof(TokenId));
    }
    ++state.length;
    state.hash = Mix(state.hash, step.token[t]);
    return {};
  }

  Status Answer(RequestId request, const int32_t* table, const SlotState& state,
                std::span<float> logits) {
    if (HistoryHash(History(table, state.length)) != state.hash) {
      return Fail(Code::kInternal, "request {}: the blocks hold another history than the slot",
                  request.value);
    }
    if (options_.fill_logits) {
      options_.fill_logits(request, history_, logits);
      return {};
    }
    const TokenId answer = options_.next_token(request, history_);
    if (answer < 0 || answer >= options_.vocab_size) {
      return Fail(Code::kInternal, "the script answered token {} of a vocabulary of {}", answer,
                  options_.vocab_size);
    }
    std::fill(logits.begin(), logits.end(), 0.0f);
    logits[static_cast<size_t>(answer)] = kAnswerLogit;
    return {};
  }

  // The tokens that the blocks hold.
  const std::vector<TokenId>& History(const int32_t* table, int64_t length) {
    history_.resize(static_cast<size_t>(length));
    for (int64_t i = 0; i < length; ++i) {
      std::memcpy(&history_[static_cast<size_t>(i)], TokenAddress(table, i), sizeof(TokenId));
    }
    return history_;
  }

  std::span<float> Row(size_t row) {
    const auto vocab = static_cast<size_t>(options_.vocab_size);
    return std::span<float>(logits_).subspan(row * vocab, vocab);
  }

  SlotState LoadSlot(int32_t slot) const {
    SlotState state;
    std::memcpy(&state, slots_.address(SlotId{slot}), sizeof(state));
    return state;
  }
  void StoreSlot(int32_t slot, const SlotState& state) {
    std::memcpy(slots_.address(SlotId{slot}), &state, sizeof(state));
  }

  ScriptedOptions options_;
  BlockPool& blocks_;
  SlotPool& slots_;
  std::vector<float> logits_;
  std::vector<TokenId> history_;
};

}  // namespace

Geometry ScriptedGeometry(int block_tokens, int64_t max_positions) {
  ModelConfig config;
  config.num_layers = 1;
  config.compress_ratios = {4};
  config.max_position_embeddings = max_positions;
  Expected<Geometry> geometry = MakeGeometry(config, {.block_tokens = block_tokens});
  FATHOM_CHECK(geometry.has_value());
  return *geometry;
}

uint64_t HistoryHash(std::span<const TokenId> history) {
  uint64_t hash = 0;
  for (const TokenId token : history) hash = Mix(hash, token);
  return hash;
}

Engine::ExecutorFactory MakeScriptedExecutor(ScriptedOptions options) {
  return [options = std::move(options)](BlockPool& blocks,
                                        SlotPool& slots) -> Expected<std::unique_ptr<Executor>> {
    const Geometry& geometry = options.geometry;
    if (geometry.block_bytes < geometry.options.block_tokens * int64_t{sizeof(TokenId)} ||
        geometry.slot_bytes < int64_t{sizeof(SlotState)}) {
      return Fail(Code::kInvalidArgument, "a scripted model needs blocks of 4 bytes a token");
    }
    if (options.vocab_size <= 0) {
      return Fail(Code::kInvalidArgument, "vocabulary size {} is not positive", options.vocab_size);
    }
    if (!options.next_token && !options.fill_logits) {
      return Fail(Code::kInvalidArgument, "a scripted model needs next_token or fill_logits");
    }
    return std::make_unique<ScriptedExecutor>(options, blocks, slots);
  };
}

}  // namespace fathom
