// compressor on CUDA, two launches: rows first, from the old state and the step's tokens, then the
// state. A block per token: the token that completes a group owns its row, all others leave at
// once, so the host needs to know no position. A thread per channel walks its members or tokens
// oldest first; the record of a group of 128 that began before the step starts from the state, and
// the operations are spelled out, so rows and state have the same bits for every chunking.
//
// Tokens and sequences that only fill up a captured batch have a position below 0 or no tokens.
#include <algorithm>

#include "ops/compressor/cuda.h"
#include "ops/cuda/hopper.cuh"
#include "ops/quantise/cuda.cuh"

namespace fathom::ops {
namespace cuda {
namespace {

constexpr int kStateThreads = 128;

struct CompressorParams {
  StepView step;
  const float* c;
  const float* g;
  int64_t c_stride, g_stride;
  const float* ape;
  const float* norm;
  float frequencies[kRopePairs];
  float* state;
  int64_t state_stride;
  PagedRows rows;
  bool product;
  bool round_kv;
};

// A sequence's part of the step.
struct Span {
  int32_t first_token, begin, end;  // positions [begin, end)
};

__device__ Span SpanOf(const StepView& step, int32_t s) {
  const int32_t first = step.query_start[s];
  const int32_t count = step.query_start[s + 1] - first;
  if (count <= 0) return {first, 0, 0};
  const int32_t begin = step.position[first];
  return {first, begin, begin + count};
}

// The sum over the block, in one order; `partial` holds a float per warp.
template <int kThreads>
__device__ float BlockSum(float x, float* partial) {
  x = WarpSum(x);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < kThreads / 32; ++i) sum += partial[i];
  __syncthreads();
  return sum;
}

// model.md 5.4 on a pooled row whose channel threadIdx.x is x, and its encoding as row j.
template <int kChannels>
__device__ void FinishRow(const CompressorParams& p, float x, int32_t sequence, int32_t j,
                          int ratio) {
  // The same for the whole block: the position decides.
  if (p.step.emit_from != nullptr && (int64_t{j} + 1) * ratio <= p.step.emit_from[sequence]) return;
  __shared__ float partial[kChannels / 32];
  __shared__ alignas(16) float row[kChannels];
  const int ch = threadIdx.x;
  x = RoundIf(x, p.product);
  const float squares = BlockSum<kChannels>(__fmul_rn(x, x), partial);
  const float inverse = 1.0f / sqrtf(__fadd_rn(squares / kChannels, kNormEps));
  x = RoundIf(__fmul_rn(p.norm[ch], __fmul_rn(x, inverse)), p.product);

  constexpr int kStraight = kChannels - kRopeDim;
  const float pair = __shfl_xor_sync(0xffffffffu, x, 1);
  if (ch >= kStraight) {
    const float angle =
        __fmul_rn(static_cast<float>(int64_t{j} * ratio), p.frequencies[(ch - kStraight) / 2]);
    const float c = cosf(angle), s = sinf(angle);
    const float crossed = __fmul_rn(pair, s);
    x = ch % 2 == 0 ? __fsub_rn(__fmul_rn(x, c), crossed) : __fadd_rn(crossed, __fmul_rn(x, c));
    x = RoundIf(x, p.product);
  }

  // What is left works on blocks of channels: one warp does it.
  row[ch] = x;
  __syncthreads();
  if (ch >= 32) return;
  float v[kChannels / 32];
  LoadWarpRow(row, v, ch);
  const RowFormat format = p.rows.format;
  if constexpr (kChannels == kIndexDim) {
    if (format == RowFormat::kFp4Index) HadamardWarpRow(v, ch, p.product);
  } else {
    // kFp8Main rounds while it encodes.
    if (p.product && p.round_kv && format != RowFormat::kFp8Main) RoundKvWarpRow(v, ch);
  }
  const int32_t block =
      p.step.block_table[int64_t{sequence} * p.step.max_blocks + j / p.rows.rows_per_page];
  const int32_t in_page = j % p.rows.rows_per_page;
  EncodeWarpRow(format, v, RowData(p.rows, block, in_page), RowScale(p.rows, block, in_page), ch);
}

template <int kChannels>
__global__ void __launch_bounds__(kChannels) Ratio4Rows(const CompressorParams p) {
  LetNextStart();
  WaitForPrevious();
  const int32_t t = blockIdx.x;
  const int32_t position = p.step.position[t];
  if (position < 0 || position % 4 != 3) return;
  const int32_t s = p.step.sequence[t];
  const Span span = SpanOf(p.step, s);
  const float* state = p.state + p.step.slot[s] * p.state_stride;
  const int ch = threadIdx.x;
  // Half 0 of a token's channels is for the group after its own, half 1 for its own. Tokens before
  // the step are read from the state: the group before that of the step's first token in rows
  // 0..3, that group in rows 4..7.
  float gate[8], value[8];
  const int first = position < 4 ? 4 : 0;  // row 0 has no previous group
  float max = -INFINITY;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < first) continue;
    const int32_t member = position - 7 + i;
    const int column = i / 4 * kChannels + ch;
    if (member < span.begin) {
      const int row = member % 4 + (member / 4 == span.begin / 4 ? 4 : 0);
      value[i] = state[row * 4 * kChannels + column];
      gate[i] = state[row * 4 * kChannels + 2 * kChannels + column];
    } else {
      const int64_t token = span.first_token + member - span.begin;
      value[i] = p.c[token * p.c_stride + column];
      gate[i] =
          __fadd_rn(p.g[token * p.g_stride + column], p.ape[member % 4 * 2 * kChannels + column]);
    }
    max = fmaxf(max, gate[i]);
  }
  float weights = 0, sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < first) continue;
    const float weight = expf(__fsub_rn(gate[i], max));
    weights = __fadd_rn(weights, weight);
    sum = __fmaf_rn(weight, value[i], sum);
  }
  FinishRow<kChannels>(p, __fdiv_rn(sum, weights), s, position / 4, 4);
}

// Leaves what a run token by token leaves: rows 0..3 hold the last complete group, row 4 + i the
// last token with remainder i. A thread keeps to its columns of c and g, so it may read rows 4..7
// before it overwrites them.
__global__ void Ratio4State(const CompressorParams p, int channels) {
  LetNextStart();
  WaitForPrevious();
  const int32_t s = blockIdx.x;
  const Span span = SpanOf(p.step, s);
  const int column = blockIdx.y * kStateThreads + threadIdx.x;  // of [c | g]
  const int half = 2 * channels, width = 4 * channels;
  if (span.begin < 0 || span.end <= span.begin || column >= width) return;
  float* state = p.state + p.step.slot[s] * p.state_stride + column;
  const auto token_value = [&](int32_t position) {
    const int64_t token = span.first_token + position - span.begin;
    if (column < half) return p.c[token * p.c_stride + column];
    return __fadd_rn(p.g[token * p.g_stride + column - half],
                     p.ape[position % 4 * half + column - half]);
  };
  if (span.end / 4 > span.begin / 4) {
    for (int i = 0; i < 4; ++i) {
      const int32_t position = span.end / 4 * 4 - 4 + i;
      state[i * width] = position < span.begin ? state[(4 + i) * width] : token_value(position);
    }
  }
  for (int32_t position = max(span.begin, span.end - 4); position < span.end; ++position) {
    state[(4 + position % 4) * width] = token_value(position);
  }
}

struct Record {
  float m, l, a;
};

// The record of channel ch after the token at `last`, from the start of its group of 128.
__device__ Record RecordAt(const CompressorParams& p, const Span& span, const float* state,
                           int32_t last, int ch) {
  const int32_t start = last / 128 * 128;
  int32_t position = max(start, span.begin);
  Record r;
  if (position > start) {
    r = {state[ch], state[kHeadDim + ch], state[2 * kHeadDim + ch]};
  } else {
    r = {-INFINITY, 0, 0};
  }
  constexpr int kBatch = 8;  // loads in flight; the record itself is a chain
  for (; position <= last; position += kBatch) {
    float c[kBatch], g[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (position + i > last) break;
      const int64_t token = span.first_token + position + i - span.begin;
      c[i] = p.c[token * p.c_stride + ch];
      g[i] = __fadd_rn(p.g[token * p.g_stride + ch], p.ape[(position + i) % 128 * kHeadDim + ch]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (position + i > last) break;
      if (position + i == start) {
        r = {g[i], 1, c[i]};
        continue;
      }
      const float m = fmaxf(r.m, g[i]);
      const float keep = expf(__fsub_rn(r.m, m)), weight = expf(__fsub_rn(g[i], m));
      r.m = m;
      r.l = __fmaf_rn(r.l, keep, weight);
      r.a = __fmaf_rn(r.a, keep, __fmul_rn(c[i], weight));
    }
  }
  return r;
}

__global__ void __launch_bounds__(kHeadDim) Ratio128Rows(const CompressorParams p) {
  LetNextStart();
  WaitForPrevious();
  const int32_t t = blockIdx.x;
  const int32_t position = p.step.position[t];
  if (position < 0 || position % 128 != 127) return;
  const int32_t s = p.step.sequence[t];
  const Span span = SpanOf(p.step, s);
  const float* state = p.state + p.step.slot[s] * p.state_stride;
  const Record r = RecordAt(p, span, state, position, threadIdx.x);
  FinishRow<kHeadDim>(p, __fdiv_rn(r.a, r.l), s, position / 128, 128);
}

__global__ void Ratio128State(const CompressorParams p) {
  LetNextStart();
  WaitForPrevious();
  const int32_t s = blockIdx.x;
  const Span span = SpanOf(p.step, s);
  if (span.begin < 0 || span.end <= span.begin) return;
  float* state = p.state + p.step.slot[s] * p.state_stride;
  const int ch = blockIdx.y * kStateThreads + threadIdx.x;
  const Record r = RecordAt(p, span, state, span.end - 1, ch);
  state[ch] = r.m;
  state[kHeadDim + ch] = r.l;
  state[2 * kHeadDim + ch] = r.a;
}

}  // namespace
}  // namespace cuda

void CompressorCuda(const CompressorArgs& args, CudaStream stream) {
  if (args.step->num_tokens == 0) return;
  cuda::CompressorParams p;
  p.step = *args.step;
  p.c = args.c.f32();
  p.g = args.g.f32();
  p.c_stride = args.c.stride;
  p.g_stride = args.g.stride;
  p.ape = args.ape;
  p.norm = args.norm;
  std::copy(args.rope->f.begin(), args.rope->f.end(), p.frequencies);
  p.state = args.state;
  p.state_stride = args.state_stride;
  p.rows = args.rows;
  p.product = args.numerics == Numerics::kProduct;
  p.round_kv = args.round_kv;
  const auto tokens = static_cast<unsigned>(args.step->num_tokens);
  const auto sequences = static_cast<unsigned>(args.step->num_sequences);
  const auto launch = [&](auto kernel, dim3 grid, int threads, auto... arguments) {
    cuda::LaunchOverlapped(kernel, grid, threads, 0, stream, 1, p, arguments...);
  };
  if (args.ratio == 128) {
    launch(cuda::Ratio128Rows, tokens, kHeadDim);
    launch(cuda::Ratio128State, dim3(sequences, kHeadDim / cuda::kStateThreads),
           cuda::kStateThreads);
    return;
  }
  if (args.channels == kHeadDim) {
    launch(cuda::Ratio4Rows<kHeadDim>, tokens, kHeadDim);
  } else {
    launch(cuda::Ratio4Rows<kIndexDim>, tokens, kIndexDim);
  }
  launch(cuda::Ratio4State, dim3(sequences, cuda::Blocks(4 * args.channels, cuda::kStateThreads)),
         cuda::kStateThreads, args.channels);
}

}  // namespace fathom::ops
