// Test and benchmark data for sparse_attention: a step over several sequences with shuffled slots
// and blocks, caches filled with encoded random rows, and everything a step must not read poisoned.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "core/dtype.h"
#include "ops/quantise/quantise.h"
#include "ops/sparse_attention/sparse_attention.h"

namespace fathom::ops {

enum class Compressed { kNone, kCsa, kHca };

struct ScenarioSequence {
  int32_t first = 0;   // position of its first token in the step
  int32_t tokens = 1;  // tokens in the step
};

struct ScenarioOptions {
  std::vector<ScenarioSequence> sequences;
  int heads = 4;
  Compressed compressed = Compressed::kNone;
  int top_k = 128;
  RowFormat format = RowFormat::kFp8Main;
  Numerics numerics = Numerics::kProduct;
  uint64_t seed = 1;
  int32_t ring_rows = 131;
  int32_t block_tokens = 256;
  bool clustered = true;  // neighbouring tokens select mostly the same rows
};

// Every value is a function of (seed, sequence, position or row), never of how the tokens are cut
// into steps, so that two scenarios over different chunks hold the same model state.
class AttentionScenario {
 public:
  explicit AttentionScenario(const ScenarioOptions& options) : options_(options) {
    const auto count = static_cast<int32_t>(options.sequences.size());
    query_start_.push_back(0);
    int32_t last = 0;
    for (int32_t s = 0; s < count; ++s) {
      const ScenarioSequence& sequence = options.sequences[s];
      for (int32_t i = 0; i < sequence.tokens; ++i) {
        position_.push_back(sequence.first + i);
        sequence_.push_back(s);
      }
      query_start_.push_back(query_start_.back() + sequence.tokens);
      last = std::max(last, sequence.first + sequence.tokens);
    }
    tokens_ = query_start_.back();
    std::mt19937_64 shuffle(options.seed + 99);
    slot_.resize(count + 2);
    for (size_t i = 0; i < slot_.size(); ++i) slot_[i] = static_cast<int32_t>(i);
    std::shuffle(slot_.begin(), slot_.end(), shuffle);
    ratio_ = options.compressed == Compressed::kHca ? 128 : 4;
    const int32_t max_blocks = (last + options.block_tokens - 1) / options.block_tokens;
    std::vector<int32_t> blocks(int64_t{count} * max_blocks + 3);
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<int32_t>(i);
    std::shuffle(blocks.begin(), blocks.end(), shuffle);
    block_table_.assign(blocks.begin(), blocks.begin() + int64_t{count} * max_blocks);

    step_.num_tokens = tokens_;
    step_.num_sequences = count;
    step_.position = position_.data();
    step_.sequence = sequence_.data();
    step_.query_start = query_start_.data();
    step_.slot = slot_.data();
    step_.block_table = block_table_.data();
    step_.max_blocks = max_blocks;

    args_.step = &step_;
    args_.heads = options.heads;
    args_.numerics = options.numerics;
    args_.step_rows = Allocate(&step_memory_, 1, tokens_ + 1);
    args_.ring = Allocate(&ring_memory_, count + 2, options.ring_rows);
    if (options.compressed != Compressed::kNone) {
      args_.compressed = Allocate(&compressed_memory_, static_cast<int32_t>(blocks.size()),
                                  options.block_tokens / ratio_);
    }
    for (int32_t s = 0; s < count; ++s) FillSequence(s);
    if (options.compressed == Compressed::kCsa) Select();

    const int64_t width = int64_t{options.heads} * kHeadDim;
    q_.resize(tokens_ * width);
    for (int32_t t = 0; t < tokens_; ++t) {
      Random(Key(sequence_[t], 3, position_[t]), 1.5f, &q_[t * width], width);
    }
    out_.assign(tokens_ * width, NAN);
    sink_.resize(options.heads);
    Random(options.seed + 5, 2.0f, sink_.data(), options.heads);
    args_.q = F32Matrix(q_.data(), tokens_, width);
    args_.out = F32Matrix(out_.data(), tokens_, width);
    args_.sink = sink_.data();
  }
  AttentionScenario(const AttentionScenario&) = delete;

  SparseAttentionArgs& args() { return args_; }
  StepView& step() { return step_; }
  std::vector<float>& out() { return out_; }
  std::vector<float>& q() { return q_; }
  std::vector<int32_t>& selected() { return selected_; }
  std::vector<float> Row(int32_t token) const {
    const int64_t width = int64_t{options_.heads} * kHeadDim;
    return {out_.begin() + token * width, out_.begin() + (token + 1) * width};
  }

 private:
  uint64_t Key(int32_t sequence, int kind, int64_t index) const {
    return ((options_.seed * 1315423911u + sequence) * 8 + kind) * (1ull << 24) + index;
  }

  static void Random(uint64_t key, float scale, float* out, int64_t n) {
    std::mt19937_64 generator(key);
    // Sums of three uniform numbers: near enough normal, and quick for a million rows.
    constexpr uint64_t kMask = (1u << 21) - 1;
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t r = generator();
      const auto sum = static_cast<float>((r & kMask) + ((r >> 21) & kMask) + (r >> 43));
      out[i] = RoundBf16((sum * (1.0f / (1 << 20)) - 3.0f) * scale);
    }
  }

  PagedRows Allocate(std::vector<std::byte>* memory, int32_t blocks, int32_t rows) {
    PagedRows out;
    out.format = options_.format;
    out.channels = kHeadDim;
    out.rows_per_page = rows;
    const int64_t page = rows * (RowDataBytes(out.format, kHeadDim) + RowScaleBytes(out.format));
    out.block_stride = (page + 575) / 576 * 576 + 64;
    memory->assign(blocks * out.block_stride, std::byte{0xff});  // NaN in every format
    out.base = memory->data();
    return out;
  }

  void Fill(const PagedRows& rows, int32_t block, int32_t row, uint64_t key) {
    float x[kHeadDim];
    Random(key, 1.0f, x, kHeadDim);
    EncodeRow(rows.format, kHeadDim, x, rows.data(block, row), rows.scale(block, row));
  }

  void FillSequence(int32_t s) {
    const auto [first, tokens] = options_.sequences[s];
    for (int32_t p = std::max(0, first - (kWindow - 1)); p < first; ++p) {
      Fill(args_.ring, slot_[s], p % options_.ring_rows, Key(s, 1, p));
    }
    for (int32_t i = 0; i < tokens; ++i) {
      Fill(args_.step_rows, 0, query_start_[s] + i, Key(s, 1, first + i));
    }
    if (args_.compressed.base == nullptr) return;
    for (int32_t r = 0; r < (first + tokens) / ratio_; ++r) {
      Fill(args_.compressed, step_.blocks_of(s)[r / args_.compressed.rows_per_page],
           r % args_.compressed.rows_per_page, Key(s, 2, r));
    }
  }

  // Ascending selections, nearly the same for tokens of the same 64.
  void Select() {
    const int top_k = options_.top_k;
    selected_.assign(int64_t{tokens_} * top_k, -1);
    counts_.resize(tokens_);
    for (int32_t t = 0; t < tokens_; ++t) {
      const int32_t visible = (position_[t] + 1) / 4;
      const int32_t count = std::min(top_k, visible);
      counts_[t] = count;
      std::vector<std::pair<uint32_t, int32_t>> order(visible);
      const int32_t group = options_.clustered ? position_[t] / 64 : position_[t];
      for (int32_t r = 0; r < visible; ++r) {
        uint64_t h = Key(sequence_[t], 4, group) * 0x9e3779b97f4a7c15ull + r;
        h = (h ^ (h >> 31)) * 0xbf58476d1ce4e5b9ull;
        h = (h ^ (h >> 29)) * 0x94d049bb133111ebull;
        order[r] = {static_cast<uint32_t>(h >> 32) + (r % 7 == position_[t] % 7 ? 1u << 28 : 0u),
                    r};
      }
      std::nth_element(order.begin(), order.begin() + count, order.end());
      int32_t* out = &selected_[int64_t{t} * top_k];
      for (int32_t i = 0; i < count; ++i) out[i] = order[i].second;
      std::sort(out, out + count);
    }
    args_.selected = selected_.data();
    args_.counts = counts_.data();
    args_.top_k = top_k;
  }

  ScenarioOptions options_;
  SparseAttentionArgs args_;
  StepView step_;
  int32_t tokens_ = 0;
  int32_t ratio_ = 4;
  std::vector<int32_t> position_, sequence_, query_start_, slot_, block_table_, selected_, counts_;
  std::vector<std::byte> step_memory_, ring_memory_, compressed_memory_;
  std::vector<float> q_, out_, sink_;
};

}  // namespace fathom::ops
