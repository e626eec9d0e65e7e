// Test and benchmark data for the compressor: sequences whose projections are a function of
// (seed, sequence, position), stepped in any chunks; state and pages start as NaN bytes.
#pragma once

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "ops/compressor/compressor.h"
#include "ops/quantise/quantise.h"

namespace fathom::ops {

struct CompressorOptions {
  int ratio = 4;
  int channels = kHeadDim;
  RowFormat format = RowFormat::kFp8Main;
  Numerics numerics = Numerics::kProduct;
  int sequences = 1;
  int32_t max_tokens = 1024;  // of a sequence, beyond `origin`
  int32_t origin = 0;         // position where every sequence starts (multiple of 128)
  uint64_t seed = 1;
};

// Tokens [first, first + count) of a sequence.
struct CompressorChunk {
  int sequence = 0;
  int32_t first = 0;
  int32_t count = 0;
  int32_t emit_from = 0;  // StepView::emit_from
};

class CompressorScenario {
 public:
  explicit CompressorScenario(const CompressorOptions& options)
      : options_(options),
        width_(options.channels * (options.ratio == 4 ? 2 : 1)),
        rope_(YarnRope(160000, {})) {
    ape_ = Normal(int64_t{options.ratio} * width_, options.seed * 7 + 1, 0.5f);
    norm_ = Normal(options.channels, options.seed * 7 + 2, 0.2f);
    for (float& x : norm_) x = 1.0f + x;
    state_stride_ = CompressorStateFloats(options.ratio, options.channels) + 16;
    state_.assign((options.sequences + 1) * state_stride_ * sizeof(float), 0xff);
    // Blocks before the origin are never touched; they share a page that holds no row.
    blocks_ = (options.origin + options.max_tokens + 255) / 256;
    const int32_t used = blocks_ - options.origin / 256;
    std::vector<int32_t> pages(int64_t{options.sequences} * used);
    std::mt19937_64 shuffle(options.seed);
    for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(i) + 1;
    std::shuffle(pages.begin(), pages.end(), shuffle);
    table_.assign(int64_t{options.sequences} * blocks_, 0);
    for (int s = 0; s < options.sequences; ++s) {
      std::copy_n(&pages[int64_t{s} * used], used,
                  &table_[int64_t{s} * blocks_ + options.origin / 256]);
    }
    rows_.format = options.format;
    rows_.channels = options.channels;
    rows_.rows_per_page = 256 / options.ratio;
    rows_.block_stride = rows_.rows_per_page * (RowDataBytes(options.format, options.channels) +
                                                RowScaleBytes(options.format)) +
                         64;
    pages_.assign((pages.size() + 1) * rows_.block_stride, std::byte{0xff});
  }
  CompressorScenario(const CompressorScenario&) = delete;

  int32_t Slot(int sequence) const { return options_.sequences - sequence; }

  // Runs one step over the chunks; pool == nullptr means the reference.
  void Step(const std::vector<CompressorChunk>& chunks, ThreadPool* pool) {
    Prepare(chunks);
    Run(pool);
  }

  void Prepare(const std::vector<CompressorChunk>& chunks) {
    position_.clear(), sequence_.clear(), slot_.clear(), block_table_.clear();
    emit_from_.clear();
    c_.clear(), g_.clear();
    query_start_.assign(1, 0);
    for (const CompressorChunk& chunk : chunks) {
      for (int32_t i = 0; i < chunk.count; ++i) {
        position_.push_back(chunk.first + i);
        sequence_.push_back(static_cast<int32_t>(query_start_.size()) - 1);
        Append(&c_, chunk.sequence, chunk.first + i, 0);
        Append(&g_, chunk.sequence, chunk.first + i, 1);
      }
      slot_.push_back(Slot(chunk.sequence));
      emit_from_.push_back(chunk.emit_from);
      query_start_.push_back(static_cast<int32_t>(position_.size()));
      const auto* blocks = &table_[int64_t{chunk.sequence} * blocks_];
      block_table_.insert(block_table_.end(), blocks, blocks + blocks_);
    }
    step_ = {};
    step_.num_tokens = static_cast<int32_t>(position_.size());
    step_.num_sequences = static_cast<int32_t>(chunks.size());
    step_.position = position_.data();
    step_.sequence = sequence_.data();
    step_.query_start = query_start_.data();
    step_.slot = slot_.data();
    step_.block_table = block_table_.data();
    step_.max_blocks = blocks_;
    step_.emit_from = emit_from_.data();
  }

  // The arguments of the step prepared last, in this object's memory.
  CompressorArgs Args() {
    CompressorArgs args;
    args.step = &step_;
    args.ratio = options_.ratio;
    args.channels = options_.channels;
    args.c = F32Matrix(c_.data(), step_.num_tokens, width_);
    args.g = F32Matrix(g_.data(), step_.num_tokens, width_);
    args.ape = ape_.data();
    args.norm = norm_.data();
    args.rope = &rope_;
    args.state = reinterpret_cast<float*>(state_.data());
    args.state_stride = state_stride_;
    rows_.base = pages_.data();
    args.rows = rows_;
    args.numerics = options_.numerics;
    return args;
  }

  void Run(ThreadPool* pool) {
    pool == nullptr ? CompressorReference(Args()) : CompressorCpu(Args(), *pool);
  }

  // Takes over state and pages that a device computed.
  void Adopt(std::vector<uint8_t> state, std::vector<std::byte> pages) {
    state_ = std::move(state);
    pages_ = std::move(pages);
  }

  const std::vector<uint8_t>& state() const { return state_; }
  const std::vector<std::byte>& pages() const { return pages_; }
  std::vector<float> StateFloats(int sequence) const {
    const auto* begin =
        reinterpret_cast<const float*>(state_.data()) + Slot(sequence) * state_stride_;
    return {begin, begin + state_stride_ - 16};
  }
  std::vector<std::byte> RowBytes(int sequence, int32_t row) {
    const auto [data, scale] = Locate(sequence, row);
    std::vector<std::byte> bytes(data, data + RowDataBytes(options_.format, options_.channels));
    bytes.insert(bytes.end(), scale, scale + RowScaleBytes(options_.format));
    return bytes;
  }
  std::vector<float> Row(int sequence, int32_t row) {
    const auto [data, scale] = Locate(sequence, row);
    std::vector<float> x(options_.channels);
    DecodeRow(options_.format, options_.channels, data, scale, x.data());
    return x;
  }

  // From now on the projections of this token differ.
  void Perturb(int sequence, int32_t position) { perturbed_ = Key(sequence, position, 0); }

 private:
  std::pair<const std::byte*, const std::byte*> Locate(int sequence, int32_t row) {
    rows_.base = pages_.data();
    const int32_t block = table_[int64_t{sequence} * blocks_ + row / rows_.rows_per_page];
    return {rows_.data(block, row % rows_.rows_per_page),
            rows_.scale(block, row % rows_.rows_per_page)};
  }
  uint64_t Key(int sequence, int32_t position, int kind) const {
    return ((options_.seed * 131 + sequence) * (1ull << 22) + position) * 2 + kind;
  }
  static std::vector<float> Normal(int64_t n, uint64_t key, float scale) {
    std::mt19937_64 generator(key);
    std::vector<float> out(n);
    for (float& x : out) {
      const uint64_t r = generator();
      const auto sum = static_cast<float>((r & 0x1fffff) + ((r >> 21) & 0x1fffff) + (r >> 43));
      x = (sum * (1.0f / (1 << 20)) - 3.0f) * scale;
    }
    return out;
  }
  void Append(std::vector<float>* out, int sequence, int32_t position, int kind) const {
    uint64_t key = Key(sequence, position, kind);
    if (Key(sequence, position, 0) == perturbed_) key += 1ull << 60;
    const std::vector<float> x = Normal(width_, key, kind == 0 ? 1.0f : 2.0f);
    out->insert(out->end(), x.begin(), x.end());
  }

  CompressorOptions options_;
  int width_;
  RopeFrequencies rope_;
  int32_t blocks_ = 0;
  int64_t state_stride_ = 0;
  uint64_t perturbed_ = ~0ull;
  PagedRows rows_;
  StepView step_;
  std::vector<float> ape_, norm_, c_, g_;
  std::vector<uint8_t> state_;
  std::vector<std::byte> pages_;
  std::vector<int32_t> table_, position_, sequence_, slot_, block_table_, query_start_, emit_from_;
};

}  // namespace fathom::ops
