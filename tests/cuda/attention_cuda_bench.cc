// Times sparse_attention and the indexer's scan on the device, with a cold L2 cache: one query
// token per sequence, as in decode. Prints CSV.
//
// The bound is the larger of the bytes at 4.30 TB/s and the multiply-adds at 784 bf16 TFLOP/s, both
// measured on an H200 (design: performance.md). Bytes are every row read once, queries and outputs.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "ops/indexer/cuda.h"
#include "ops/quantise/quantise.h"
#include "ops/sparse_attention/cuda.h"

namespace fathom::ops {
namespace {

constexpr double kBytesPerSecond = 4.30e12;
constexpr double kFlopsPerSecond = 784e12;

class Memory {
 public:
  explicit Memory(int64_t bytes) {
    FATHOM_CUDA_CHECK(cudaMalloc(&data_, static_cast<size_t>(std::max<int64_t>(bytes, 1))));
    FATHOM_CUDA_CHECK(cudaMemset(data_, 0, static_cast<size_t>(std::max<int64_t>(bytes, 1))));
  }
  template <class T>
  explicit Memory(const std::vector<T>& host) : Memory(host.size() * sizeof(T)) {
    FATHOM_CUDA_CHECK(
        cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  Memory(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

// Median over 20 runs, each after overwriting more than the L2 cache holds.
template <class Fn>
double TimeUs(Fn&& run) {
  constexpr int64_t kFlushBytes = int64_t{256} << 20;
  static const Memory flush(kFlushBytes);
  cudaEvent_t begin, end;
  FATHOM_CUDA_CHECK(cudaEventCreate(&begin));
  FATHOM_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 23; ++i) {
    FATHOM_CUDA_CHECK(cudaMemsetAsync(flush.as<char>(), i, kFlushBytes, nullptr));
    FATHOM_CUDA_CHECK(cudaEventRecord(begin, nullptr));
    run();
    FATHOM_CUDA_CHECK(cudaEventRecord(end, nullptr));
    FATHOM_CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    FATHOM_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return 1e3 * times[times.size() / 2];
}

void Print(const char* op, const std::string& name, int batch, double us, double bytes,
           double flops) {
  const double bound = 1e6 * std::max(bytes / kBytesPerSecond, flops / kFlopsPerSecond);
  std::printf("%s,%s,%d,%.2f,%.1f,%.2f,%.3f\n", op, name.c_str(), batch, us, bytes / us * 1e-3,
              flops / us * 1e-6, bound / us);
  std::fflush(stdout);
}

std::vector<uint16_t> RandomBf16(int64_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint16_t> out(n);
  for (uint16_t& x : out) {
    x = F32ToBf16(static_cast<float>(random() % 4001) * 1e-3f - 2.0f);
  }
  return out;
}

// Pages of random rows: the same 1,024 over and over, in memory of their own.
struct Cache {
  Cache(RowFormat format, int channels, int rows_per_page, int64_t pages, uint64_t seed) {
    rows.format = format;
    rows.channels = channels;
    rows.rows_per_page = rows_per_page;
    const int64_t data_bytes = RowDataBytes(format, channels), scale_bytes = RowScaleBytes(format);
    rows.block_stride = (rows_per_page * (data_bytes + scale_bytes) + 127) / 128 * 128;
    constexpr int kDistinct = 1024;
    std::vector<std::byte> data(kDistinct * data_bytes), scales(kDistinct * 8);
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (int i = 0; i < kDistinct; ++i) {
      std::vector<float> row(channels);
      for (float& x : row) x = normal(random);
      EncodeRow(format, channels, row.data(), &data[i * data_bytes], &scales[i * 8]);
    }
    std::vector<std::byte> host(pages * rows.block_stride);
    rows.base = host.data();
    for (int64_t page = 0; page < pages; ++page) {
      for (int r = 0; r < rows_per_page; ++r) {
        const auto i = static_cast<int>(random() % kDistinct);
        const auto block = static_cast<int32_t>(page);
        std::memcpy(rows.data(block, r), &data[i * data_bytes], data_bytes);
        std::memcpy(rows.scale(block, r), &scales[i * 8], scale_bytes);
      }
    }
    memory = std::make_unique<Memory>(host);
    rows.base = memory->as<std::byte>();
  }

  PagedRows rows;
  std::unique_ptr<Memory> memory;
};

// One token each of `batch` sequences, all with the same context, blocks in random order.
struct Batch {
  Batch(int batch, int32_t position, uint64_t seed)
      : blocks((position + 256) / 256),
        position_(std::vector<int32_t>(batch, position)),
        index_(Iota(batch + 1)),
        table_(Shuffled(int64_t{batch} * blocks, seed)) {
    view.num_tokens = view.num_sequences = batch;
    view.position = position_.as<int32_t>();
    view.sequence = view.query_start = view.slot = index_.as<int32_t>();
    view.block_table = table_.as<int32_t>();
    view.max_blocks = blocks;
  }

  static std::vector<int32_t> Iota(int64_t n) {
    std::vector<int32_t> out(n);
    std::iota(out.begin(), out.end(), 0);
    return out;
  }
  static std::vector<int32_t> Shuffled(int64_t n, uint64_t seed) {
    std::vector<int32_t> out = Iota(n);
    std::shuffle(out.begin(), out.end(), std::mt19937_64(seed));
    return out;
  }

  int32_t blocks;
  Memory position_, index_, table_;
  StepView view;
};

struct AttentionCase {
  const char* name;
  int heads;
  int ratio;        // 0: window only
  int top_k;        // ratio 4
  int32_t context;  // tokens
};

void BenchAttention(const AttentionCase& c, int batch, bool sharing = false) {
  const int32_t position = c.context - 1;
  const Batch step(batch, position, 1);
  const Cache step_rows(RowFormat::kFp8Main, kHeadDim, batch, 1, 2);
  const Cache ring(RowFormat::kFp8Main, kHeadDim, kWindow, batch, 3);
  const int64_t pages = c.ratio == 0 ? 1 : int64_t{batch} * step.blocks;
  const Cache compressed(RowFormat::kFp8Main, kHeadDim, c.ratio == 0 ? 2 : 256 / c.ratio, pages, 4);
  const int64_t width = int64_t{c.heads} * kHeadDim;
  const Memory q(RandomBf16(batch * width, 5)), out(batch * width * 2);
  const Memory sink(std::vector<float>(c.heads, 0.5f));
  const Memory scratch(kSparseAttentionCudaScratchBytes);

  SparseAttentionArgs args;
  int64_t entries = std::min<int64_t>(kWindow, c.context);
  std::vector<int32_t> selected, counts(batch, c.top_k);
  if (c.ratio == 4) {
    std::mt19937_64 random(6);
    for (int b = 0; b < batch; ++b) {
      std::vector<int32_t> all = Batch::Shuffled(c.context / 4, random());
      std::sort(all.begin(), all.begin() + c.top_k);
      selected.insert(selected.end(), all.begin(), all.begin() + c.top_k);
    }
    entries += c.top_k;
  } else if (c.ratio == 128) {
    entries += c.context / 128;
  }
  const Memory selected_memory(selected), counts_memory(counts);
  args.step = &step.view;
  args.heads = c.heads;
  args.q = {q.as<void>(), DType::kBF16, batch, width, width};
  args.out = {out.as<void>(), DType::kBF16, batch, width, width};
  args.step_rows = step_rows.rows;
  args.ring = ring.rows;
  if (c.ratio != 0) args.compressed = compressed.rows;
  if (c.ratio == 4) {
    args.selected = selected_memory.as<int32_t>();
    args.counts = counts_memory.as<int32_t>();
    args.top_k = c.top_k;
  }
  args.sink = sink.as<float>();
  const auto bench = [&](const std::string& name, int blocks) {
    const double us =
        TimeUs([&] { SparseAttentionCuda(args, scratch.as<void>(), nullptr, blocks); });
    const double row_bytes = 584;
    Print("sparse_attention", name, batch, us,
          batch * (static_cast<double>(entries) * row_bytes + 4.0 * static_cast<double>(width)),
          4.0 * batch * static_cast<double>(width) * static_cast<double>(entries));
  };
  bench(c.name, 0);
  if (!sharing || c.ratio == 0) return;
  for (const int blocks : {1, 2, 3, 4, 5, 6, 8, 9, 10, 16, 20}) {
    if (blocks > 1 && batch * c.heads * blocks > 4 * 132 * 64) continue;
    bench(std::string(c.name) + ": " + std::to_string(blocks) + " blocks", blocks);
  }
}

void BenchIndexer(RowFormat format, const char* name, int32_t context, int batch) {
  constexpr int kHeads = 64, kTopK = 512;
  const Batch step(batch, context - 1, 1);
  const Cache keys(format, kIndexDim, 64, int64_t{batch} * step.blocks, 2);
  const int64_t width = kHeads * kIndexDim;
  const Memory q(RandomBf16(batch * width, 3)), w(RandomBf16(batch * kHeads, 4));
  const Memory rope(std::vector<float>(batch * kRopeDim, 0.70710678f));
  const Memory selected(int64_t{batch} * kTopK * 4), counts(int64_t{batch} * 4);
  const Memory scratch(IndexerCudaScratchBytes(batch));
  IndexerArgs args;
  args.step = &step.view;
  args.heads = kHeads;
  args.top_k = kTopK;
  args.q = {q.as<void>(), DType::kBF16, batch, width, width};
  args.w = {w.as<void>(), DType::kBF16, batch, kHeads, kHeads};
  args.rope = rope.as<float>();
  args.keys = keys.rows;
  args.selected = selected.as<int32_t>();
  args.counts = counts.as<int32_t>();
  const double us = TimeUs([&] { IndexerCuda(args, scratch.as<void>(), nullptr); });
  const double rows = static_cast<double>(context) / 4 * batch;
  const auto row_bytes =
      static_cast<double>(RowDataBytes(format, kIndexDim) + RowScaleBytes(format));
  Print("indexer", name, batch, us, rows * row_bytes + 4.0 * batch * static_cast<double>(width),
        2.0 * rows * static_cast<double>(width));
}

}  // namespace
}  // namespace fathom::ops

// attention_cuda_bench [attention|indexer|sharing]: everything without an argument; sharing times
// attention with 1 to 20 blocks for a token beside the number it chooses.
int main(int argc, char** argv) {
  using namespace fathom::ops;
  const std::string only = argc > 1 ? argv[1] : "";
  std::printf("op,case,batch,us,gbs,tflops,share\n");
  const AttentionCase attention[] = {
      {"flash window", 64, 0, 0, 131'072},      {"flash c4 128+512", 64, 4, 512, 16'384},
      {"flash c128 128K", 64, 128, 0, 131'072}, {"flash c128 1M", 64, 128, 0, 1'048'576},
      {"pro window", 128, 0, 0, 131'072},       {"pro c4 128+1024", 128, 4, 1024, 16'384},
      {"pro c128 128K", 128, 128, 0, 131'072},
  };
  if (only == "sharing") {
    for (const AttentionCase& c : attention) {
      for (const int batch : {1, 8, 32, 128}) BenchAttention(c, batch, /*sharing=*/true);
    }
    return 0;
  }
  for (const AttentionCase& c : attention) {
    if (only == "indexer") break;
    for (int batch : {1, 8, 32, 128}) BenchAttention(c, batch);
  }
  for (int32_t context : {4'096, 131'072, 1'048'576}) {
    if (only == "attention") break;
    const std::string name = context == 4'096 ? "4K" : context == 131'072 ? "128K" : "1M";
    for (int batch : {1, 8, 32, 128}) {
      if (batch == 128 && context != 131'072) continue;
      BenchIndexer(RowFormat::kFp4Index, ("fp4 " + name).c_str(), context, batch);
      BenchIndexer(RowFormat::kFp8Index, ("fp8 " + name).c_str(), context, batch);
    }
  }
}
