// A cluster of eight blocks for each row: a block keeps its eighth of the logits, and then their
// weights, in shared memory, so that memory is read once however many passes a setting takes.
#include <cooperative_groups.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "ops/cuda/hopper.cuh"
#include "ops/sampling/cuda.h"
#include "ops/sampling/philox.h"
#include "ops/sampling/rules.h"

namespace fathom::ops {
namespace {

namespace cg = cooperative_groups;

constexpr int kCluster = 8;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 256;  // of a digit of a key
constexpr int kDigits = 4;
constexpr int kUnit = 1 << 30;              // weight of the most likely token
constexpr int64_t kMostShared = 200 << 10;  // bytes of logits and weights of a block
constexpr uint32_t kInfinity = 0x7f800000u;

// Changes one logit; lists of a row: biases by token, then counts, then bans.
struct Edit {
  int32_t token;
  int32_t generated;  // of a count
  float bias;
};

struct Row {
  int32_t row;                        // of the logits
  int32_t biases, counts, bans, end;  // where its lists begin among the edits
  float repetition, frequency, presence;
  float inverse;  // 1 / temperature
  int32_t floor;  // of min_p
  int32_t top_k;  // 0: off
  float top_p;
  uint64_t bits;  // of the draw
  bool greedy;
};

// Keys as unsigned numbers: larger logit, larger key. NaN counts as -inf, -0 equals +0.
__device__ uint32_t KeyOf(float logit) {
  const auto bits = __float_as_int(logit);
  const int magnitude = bits & 0x7fffffff;
  const int key = bits < 0 ? -magnitude : magnitude;
  return static_cast<uint32_t>(
             magnitude > static_cast<int>(kInfinity) ? -static_cast<int>(kInfinity) : key) ^
         0x80000000u;
}
__device__ float LogitOf(uint32_t key) {
  const auto value = static_cast<int>(key ^ 0x80000000u);
  return __int_as_float(value >= 0 ? value : (-value | static_cast<int>(0x80000000u)));
}
constexpr uint32_t kLeastKey = (0u - kInfinity) ^ 0x80000000u;  // -inf
constexpr uint32_t kMostKey = kInfinity ^ 0x80000000u;          // +inf

// Weight of scan_loops.inc: the same operations, none of them fused.
__device__ int WeightOf(float logit, float max, float inverse, int floor) {
  const float x = __fmul_rn(__fsub_rn(logit, max), inverse);
  if (!(x > -22.0f)) return 0;
  const int n = static_cast<int>(__fsub_rn(__fmul_rn(x, 1.44269504088896341f), 0.5f));
  const auto f = static_cast<float>(n);
  const float r =
      __fsub_rn(__fsub_rn(x, __fmul_rn(f, 0.693359375f)), __fmul_rn(f, -2.12194440e-4f));
  float p = 1.9875691500e-4f;
  p = __fadd_rn(__fmul_rn(p, r), 1.3981999507e-3f);
  p = __fadd_rn(__fmul_rn(p, r), 8.3334519073e-3f);
  p = __fadd_rn(__fmul_rn(p, r), 4.1665795894e-2f);
  p = __fadd_rn(__fmul_rn(p, r), 1.6666665459e-1f);
  p = __fadd_rn(__fmul_rn(p, r), 5.0000001201e-1f);
  p = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.0f);
  const float scaled = __fmul_rn(p, __int_as_float((n + 30 + 127) << 23));
  const auto weight = static_cast<int>(__fadd_rn(scaled, 0.5f));
  return weight >= floor ? weight : 0;
}

// Sums over the cluster that a row may need; each has its place, used once.
enum Total { kAlive, kTopKTies, kAll, kTopPTies, kLeft, kTotals };

struct SampleShared {
  uint64_t best[kCluster];
  uint64_t totals[kTotals][kCluster];  // of every block
  uint64_t mass[2][kDigits][kBins];    // of top_k's passes and of top_p's
  uint64_t sum[kBins];                 // a pass over the cluster
  uint64_t warp[kWarps];
  uint64_t left;  // of what is wanted, within the bin found
  uint32_t bin;
};

struct Prefix {
  uint64_t before;  // of the threads in front, those of blocks of lower rank included
  uint64_t all;
};

struct Sampling {
  cg::cluster_group cluster;
  SampleShared& s;
  float* logits;     // [slice]
  int32_t* weights;  // [slice]
  int count;         // of this block
  int rank;

  // Thread t's share of an ordered pass: neighbours, an odd number to spread them over the banks.
  __device__ int share() const { return (count + kThreads - 1) / kThreads | 1; }
  __device__ int begin() const { return min(count, static_cast<int>(threadIdx.x) * share()); }
  __device__ int end() const { return min(count, begin() + share()); }

  // The sum of every thread's value, and of those in front of this thread.
  __device__ Prefix Scan(uint64_t value, Total total) {
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    uint64_t running = value;
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint64_t other = __shfl_up_sync(0xffffffffu, running, offset);
      if (lane >= offset) running += other;
    }
    __syncthreads();  // s.warp is free
    if (lane == 31) s.warp[warp] = running;
    __syncthreads();
    uint64_t before = running - value, block = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += s.warp[w];
      block += s.warp[w];
    }
    if (thread < kCluster) cluster.map_shared_rank(s.totals[total], thread)[rank] = block;
    cluster.sync();
    Prefix prefix{before, 0};
    for (int r = 0; r < kCluster; ++r) {
      if (r < rank) prefix.before += s.totals[total][r];
      prefix.all += s.totals[total][r];
    }
    return prefix;
  }

  // Whole weight.
  __device__ uint64_t Weigh(Total total) {
    uint64_t mine = 0;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) {
      mine += static_cast<uint32_t>(weights[i]);
    }
    return Scan(mine, total).all;
  }

  // Keeps the shortest prefix, most likely first, that amounts to `wanted` (at most what there is,
  // at least 1), by number of tokens above -inf or by weight; the weights of others become 0.
  // max, inverse, floor: of the weights.
  template <bool kByWeight>
  __device__ void KeepFirst(uint64_t wanted, Total ties_total, const Row& row, float max) {
    const int thread = static_cast<int>(threadIdx.x);
    uint32_t key = 0;  // the digits found
    for (int digit = 0; digit < kDigits; ++digit) {
      uint64_t* const mass = s.mass[kByWeight][digit];
      for (int i = thread; i < kBins; i += kThreads) mass[i] = 0;
      __syncthreads();
      const int shift = 24 - 8 * digit;
      for (int i = thread; i < count; i += kThreads) {
        const uint32_t k = KeyOf(logits[i]);
        if (digit > 0 && (k ^ key) >> (shift + 8) != 0) continue;
        const uint64_t amount =
            kByWeight ? static_cast<uint32_t>(weights[i]) : (k > kLeastKey ? 1u : 0u);
        if (amount == 0) continue;
        atomicAdd(reinterpret_cast<unsigned long long*>(&mass[k >> shift & (kBins - 1)]), amount);
      }
      cluster.sync();
      if (thread < kBins) {
        uint64_t sum = 0;
        for (int r = 0; r < kCluster; ++r) sum += cluster.map_shared_rank(mass, r)[thread];
        s.sum[thread] = sum;
      }
      __syncthreads();
      if (thread < 32) {  // eight bins a lane, from the top
        constexpr int kEach = kBins / 32;
        const int top = kBins - 1 - kEach * thread;
        uint64_t mine = 0;
        for (int i = 0; i < kEach; ++i) mine += s.sum[top - i];
        uint64_t running = mine;
        for (int offset = 1; offset < 32; offset *= 2) {
          const uint64_t other = __shfl_up_sync(0xffffffffu, running, offset);
          if (thread >= offset) running += other;
        }
        if (running - mine < wanted && running >= wanted) {
          uint64_t left = wanted - (running - mine);
          int bin = top;
          while (s.sum[bin] < left) left -= s.sum[bin--];
          s.bin = static_cast<uint32_t>(bin);
          s.left = left;
        }
      }
      __syncthreads();
      key |= s.bin << shift;
      wanted = s.left;
    }
    // Of equal logits those with lower ids come first.
    uint64_t ties = wanted;
    if (kByWeight) {
      const bool infinite = key == kMostKey;
      const auto each = static_cast<uint64_t>(
          infinite ? kUnit : WeightOf(LogitOf(key), max, row.inverse, row.floor));
      ties = (wanted + each - 1) / each;
    }
    uint64_t mine = 0;
    for (int i = begin(); i < end(); ++i) mine += KeyOf(logits[i]) == key ? 1 : 0;
    uint64_t before = Scan(mine, ties_total).before;
    for (int i = begin(); i < end(); ++i) {
      const uint32_t k = KeyOf(logits[i]);
      if (k < key || (k == key && before++ >= ties)) weights[i] = 0;
    }
    __syncthreads();
  }
};

__device__ void Apply(const Row& row, const Edit* edits, int64_t first, int count, float* logits) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto mine = [&](const Edit& edit) {
    return edit.token >= first && edit.token < first + count;
  };
  for (int i = row.biases + thread; i < row.counts; i += kThreads) {
    if (!mine(edits[i]) || (i > row.biases && edits[i - 1].token == edits[i].token)) continue;
    float& logit = logits[edits[i].token - first];  // all biases of a token in their order
    for (int j = i; j < row.counts && edits[j].token == edits[i].token; ++j) {
      logit = __fadd_rn(logit, edits[j].bias);
    }
  }
  __syncthreads();
  for (int i = row.counts + thread; i < row.bans; i += kThreads) {
    if (!mine(edits[i])) continue;
    float& logit = logits[edits[i].token - first];
    if (row.repetition != 1.0f) {
      logit = logit > 0 ? __fdiv_rn(logit, row.repetition) : __fmul_rn(logit, row.repetition);
    }
    if (edits[i].generated > 0) {
      logit = __fsub_rn(logit, __fmul_rn(row.frequency, static_cast<float>(edits[i].generated)));
      logit = __fsub_rn(logit, row.presence);
    }
  }
  __syncthreads();
  for (int i = row.bans + thread; i < row.end; i += kThreads) {
    if (mine(edits[i])) logits[edits[i].token - first] = __int_as_float(0xff800000);
  }
  __syncthreads();
}

// Least weight that reaches `top_p` of `total`; at least 1.
__device__ uint64_t Share(float top_p, uint64_t total) {
  if (!(top_p < 1.0f)) return total;
  const double wanted = ceil(__dmul_rn(static_cast<double>(top_p), static_cast<double>(total)));
  const uint64_t least = wanted > 0 ? static_cast<uint64_t>(wanted) : 0;
  return least < 1 ? 1 : least > total ? total : least;
}

// Grid: clusters, one a row. Dynamic shared memory: logits and weights [slice]. out [rows]: the
// token and its logit; token -1 when no logit is above -inf.
__global__ void __launch_bounds__(kThreads, 1)
    SampleKernel(const float* all_logits, int64_t stride, int vocabulary, int slice,
                 const Row* rows, const Edit* edits, SampledToken* out) {
  extern __shared__ float sample_memory[];
  __shared__ SampleShared s;
  cg::cluster_group cluster = cg::this_cluster();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int rank = static_cast<int>(cluster.block_rank());
  const int index = static_cast<int>(blockIdx.x) / kCluster;
  const int first = rank * slice;
  const int count = max(0, min(slice, vocabulary - first));
  Sampling sampling{cluster, s,   sample_memory, reinterpret_cast<int32_t*>(sample_memory + slice),
                    count,   rank};
  float* const logits = sampling.logits;
  auto started = cluster.barrier_arrive();
  cuda::WaitForPrevious();
  const Row row = rows[index];
  const float* const from = all_logits + row.row * stride + first;
  for (int i = thread; i < count; i += kThreads) logits[i] = from[i];
  __syncthreads();
  Apply(row, edits, first, count, logits);

  // The most likely token: largest key, lowest id.
  uint64_t best = 0;
  for (int i = thread; i < count; i += kThreads) {
    const uint64_t one = uint64_t{KeyOf(logits[i])} << 32 | ~static_cast<uint32_t>(first + i);
    best = one > best ? one : best;
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, best, offset);
    best = other > best ? other : best;
  }
  if (lane == 0) s.warp[thread / 32] = best;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) best = s.warp[w] > best ? s.warp[w] : best;
  cluster.barrier_wait(std::move(started));  // the others exist: what follows is stored in them
  if (thread < kCluster) cluster.map_shared_rank(s.best, thread)[rank] = best;
  cluster.sync();
  for (int r = 0; r < kCluster; ++r) best = s.best[r] > best ? s.best[r] : best;
  const auto best_key = static_cast<uint32_t>(best >> 32);
  const auto best_token = static_cast<int32_t>(~static_cast<uint32_t>(best));
  if (best_key == kLeastKey || row.greedy) {
    if (rank == 0 && thread == 0) {
      out[index] = {best_key == kLeastKey ? -1 : best_token, LogitOf(best_key)};
    }
    return;
  }

  const bool infinite = best_key == kMostKey;
  const float max = LogitOf(best_key);
  uint64_t alive = 0;
  for (int i = thread; i < count; i += kThreads) {
    const uint32_t key = KeyOf(logits[i]);
    sampling.weights[i] =
        infinite ? (key == kMostKey ? kUnit : 0) : WeightOf(logits[i], max, row.inverse, row.floor);
    alive += key > kLeastKey ? 1 : 0;
  }
  __syncthreads();
  if (row.top_k > 0 && row.top_k < vocabulary) {
    if (sampling.Scan(alive, kAlive).all > static_cast<uint64_t>(row.top_k)) {
      sampling.KeepFirst<false>(static_cast<uint64_t>(row.top_k), kTopKTies, row, max);
    }
  }
  if (row.top_p < 1.0f) {
    const uint64_t total = sampling.Weigh(kAll);
    const uint64_t wanted = Share(row.top_p, total);
    if (wanted < total) sampling.KeepFirst<true>(wanted, kTopPTies, row, max);
  }
  // The draw, in the order of ids.
  uint64_t mine = 0;
  for (int i = sampling.begin(); i < sampling.end(); ++i) {
    mine += static_cast<uint32_t>(sampling.weights[i]);
  }
  const Prefix prefix = sampling.Scan(mine, kLeft);
  uint64_t rest = __umul64hi(row.bits, prefix.all);
  if (rest >= prefix.before && rest < prefix.before + mine) {
    rest -= prefix.before;
    int i = sampling.begin();
    for (; rest >= static_cast<uint32_t>(sampling.weights[i]); ++i) {
      rest -= static_cast<uint32_t>(sampling.weights[i]);
    }
    out[index] = {first + i, logits[i]};
  }
  cluster.sync();  // another block may still read this one's passes
}

int64_t Align(int64_t bytes) {
  return (bytes + 255) / 256 * 256;
}
int64_t SliceOf(int64_t vocabulary) {
  return (vocabulary + kCluster - 1) / kCluster;
}
// As many as a row without repeated biases may need.
int64_t EditsOf(int64_t vocabulary) {
  return vocabulary + 4096;
}

struct Lists {
  std::vector<Row> rows;
  std::vector<Edit> edits;
};

// Appends a row and its edits.
void Append(const SamplingRow& from, int64_t vocabulary, Lists* lists) {
  const SamplingParams& params = *from.params;
  const auto inside = [&](TokenId token) { return token >= 0 && token < vocabulary; };
  const auto here = [&] { return static_cast<int32_t>(lists->edits.size()); };
  Row row{};
  row.row = from.row;
  row.biases = here();
  for (const auto& [token, bias] : params.logit_bias) {
    if (inside(token)) lists->edits.push_back({token, 0, bias});
  }
  std::stable_sort(lists->edits.begin() + row.biases, lists->edits.end(),
                   [](const Edit& a, const Edit& b) { return a.token < b.token; });
  row.counts = here();
  if (params.repetition_penalty != 1.0f || params.presence_penalty != 0.0f ||
      params.frequency_penalty != 0.0f) {
    for (const TokenCount& count : from.counts) {
      if (inside(count.token) && (count.in_prompt > 0 || count.in_generated > 0)) {
        lists->edits.push_back({count.token, count.in_generated, 0});
      }
    }
  }
  row.bans = here();
  for (const TokenId token : from.banned) {
    if (inside(token)) lists->edits.push_back({token, 0, 0});
  }
  row.end = here();
  row.repetition = params.repetition_penalty;
  row.frequency = params.frequency_penalty;
  row.presence = params.presence_penalty;
  row.greedy = !(params.temperature > 0) || params.top_k == 1;
  const WeightRule rule = MakeWeightRule(params);
  row.inverse = rule.inverse;
  row.floor = rule.floor;
  row.top_k = std::max(params.top_k, 0);
  row.top_p = params.top_p;
  row.bits = PhiloxBits(params.seed, from.step);
  lists->rows.push_back(row);
}

}  // namespace

bool SamplesOnCuda(int64_t vocabulary) {
  return SliceOf(vocabulary) * 8 <= kMostShared;
}

int64_t SampleCudaScratchBytes(int64_t rows, int64_t vocabulary) {
  return Align(rows * static_cast<int64_t>(sizeof(Row))) +
         Align(EditsOf(vocabulary) * static_cast<int64_t>(sizeof(Edit))) +
         Align(rows * static_cast<int64_t>(sizeof(SampledToken)));
}

void SampleBatchCuda(const SampleBatchArgs& args, int64_t max_rows, void* scratch, void* host,
                     CudaStream stream) {
  const int64_t vocabulary = args.logits.cols;
  const int64_t slice = SliceOf(vocabulary), shared = slice * 8;
  const int64_t edits_at = Align(max_rows * static_cast<int64_t>(sizeof(Row)));
  const int64_t out_at = edits_at + Align(EditsOf(vocabulary) * static_cast<int64_t>(sizeof(Edit)));
  auto* const device = static_cast<char*>(scratch);
  auto* const pinned = static_cast<char*>(host);
  Lists lists;
  int64_t done = 0;
  const auto run = [&] {
    const size_t row_bytes = lists.rows.size() * sizeof(Row);
    const size_t edit_bytes = lists.edits.size() * sizeof(Edit);
    const size_t out_bytes = lists.rows.size() * sizeof(SampledToken);
    std::memcpy(pinned, lists.rows.data(), row_bytes);
    FATHOM_CUDA_CHECK(cudaMemcpyAsync(device, pinned, row_bytes, cudaMemcpyHostToDevice, stream));
    if (edit_bytes > 0) {
      std::memcpy(pinned + edits_at, lists.edits.data(), edit_bytes);
      FATHOM_CUDA_CHECK(cudaMemcpyAsync(device + edits_at, pinned + edits_at, edit_bytes,
                                        cudaMemcpyHostToDevice, stream));
    }
    cuda::AllowShared(SampleKernel, shared);
    cuda::LaunchOverlapped(
        SampleKernel, static_cast<unsigned>(lists.rows.size() * kCluster), kThreads, shared, stream,
        kCluster, static_cast<const float*>(args.logits.data), args.logits.stride,
        static_cast<int>(vocabulary), static_cast<int>(slice), reinterpret_cast<const Row*>(device),
        reinterpret_cast<const Edit*>(device + edits_at),
        reinterpret_cast<SampledToken*>(device + out_at));
    FATHOM_CUDA_CHECK(cudaMemcpyAsync(pinned + out_at, device + out_at, out_bytes,
                                      cudaMemcpyDeviceToHost, stream));
    FATHOM_CUDA_CHECK(cudaStreamSynchronize(stream));
    std::memcpy(args.out + done, pinned + out_at, out_bytes);
    done += static_cast<int64_t>(lists.rows.size());
    lists.rows.clear();
    lists.edits.clear();
  };
  std::vector<float> row_of_host;
  for (const SamplingRow& row : args.rows) {
    const int64_t most = EditsOf(vocabulary);
    const auto edits =
        static_cast<int64_t>(row.params->logit_bias.size() + row.counts.size() + row.banned.size());
    const auto held = static_cast<int64_t>(lists.edits.size());
    if (!lists.rows.empty() &&
        (held + edits > most || static_cast<int64_t>(lists.rows.size()) == max_rows)) {
      run();
    }
    if (edits > most) {  // more than there are tokens: biases that repeat
      row_of_host.resize(static_cast<size_t>(vocabulary));
      FATHOM_CUDA_CHECK(cudaMemcpyAsync(
          row_of_host.data(),
          static_cast<const float*>(args.logits.data) + row.row * args.logits.stride,
          row_of_host.size() * sizeof(float), cudaMemcpyDeviceToHost, stream));
      FATHOM_CUDA_CHECK(cudaStreamSynchronize(stream));
      args.out[done++] = SampleRow(row, row_of_host);
      continue;
    }
    Append(row, vocabulary, &lists);
  }
  if (!lists.rows.empty()) run();
  for (size_t i = 0; i < args.rows.size(); ++i) {
    if (args.out[i].token < 0) {
      args.out[i].token = LowestFree(args.rows[i].banned, vocabulary);
    }
  }
}

}  // namespace fathom::ops
