// Scores of all visible rows of a token, by warpgroup products: a warpgroup takes 64 rows, whose
// codes go from memory into registers once for all heads and all tokens of the block.
//
//   Fp4Keys   integer products, exact (cuda_query.cuh). A row whose block scales lie further apart
//             than a factor of 8, or a query with such a head, takes blocks one by one (Slow).
//   Fp8Keys, Bf16Keys   bf16 products.
//
// A lane of a quad adds a quarter of the heads (those of its columns) in ascending order, then the
// quarters are added in pairs: one order, whatever the number of tokens, ranges and warps. Rows of
// float32, or float32 queries, take the contract's chain in ScanFloat, a thread per row.
#pragma once

#include "ops/indexer/cuda_scores.cuh"

namespace fathom::ops::cuda {

constexpr int kScanThreads = 256;
constexpr int kScanRows = 64;   // of a warpgroup at a time
constexpr int kScanTokens = 4;  // of one sequence that a block scores together, at most

// The rows of one sequence.
struct KeyRows {
  PagedRows pages;
  const int32_t* blocks = nullptr;

  int page_shift = -1;  // log2 of rows_per_page, or -1

  // Whether 16 rows from a multiple of 16 on always share a page.
  __device__ bool WholeSixteens() const { return page_shift >= 4; }

  __device__ const std::byte* Page(int32_t page) const {
    return pages.base + __ldg(blocks + page) * pages.block_stride;
  }
  // Where row `row` of `data_bytes` and `scale_bytes` lies.
  __device__ void Find(int32_t row, int data_bytes, int scale_bytes, const std::byte** data,
                       const std::byte** scale) const {
    const int32_t page = page_shift >= 0 ? row >> page_shift : row / pages.rows_per_page;
    const int32_t in_page = row - page * pages.rows_per_page;
    const std::byte* base = Page(page);
    *data = base + in_page * data_bytes;
    *scale = base + pages.rows_per_page * data_bytes + in_page * scale_bytes;
  }
};

// A lane's part of rows g and g + 8 of a tile on its way from memory: pieces of 16 bytes and the
// rows' scales, in slots of shared memory that only this lane writes and reads. (Loads to registers
// would not do: a warpgroup product waits for every load in flight.)
template <int kPieces, bool kScaled>
struct Slots {
  static constexpr int kBytes = kScanThreads * (16 * 2 * kPieces + (kScaled ? 8 : 0));
  char* first;  // kBytes for all threads of the block

  __device__ uint4& Piece(int row, int piece) const {
    return reinterpret_cast<uint4*>(first)[(row * kPieces + piece) * kScanThreads + threadIdx.x];
  }
  __device__ uint32_t& Scale(int row) const {
    return reinterpret_cast<uint32_t*>(first + kScanThreads * 32 *
                                                   kPieces)[row * kScanThreads + threadIdx.x];
  }
  // The lane's pieces of a row at `data`; they lie side by side.
  __device__ void Load(const std::byte* data, const std::byte* scale, int row) const {
    data += threadIdx.x % 4 * kPieces * 16;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      CopyAsync16(SharedAddress(&Piece(row, i)), data + i * 16);
    }
    if constexpr (kScaled) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(SharedAddress(&Scale(row))),
                   "l"(scale)
                   : "memory");
    }
  }
};

// Bytes of `low` and `high` by the nibbles of `selector`, where a set top bit asks for the byte's
// sign instead: __byte_perm ignores that bit.
__device__ inline uint32_t Permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(selector));
  return out;
}

// Twice the magnitudes of the eight e2m1 codes without sign, one per byte.
constexpr uint32_t kTwiceLow = 0x03020100u, kTwiceHigh = 0x0c080604u;

// Four e2m1 codes (the low 16 bits) as signed bytes of twice their value. As all magnitudes are
// positive bytes, a permutation gives those of the codes whose sign bit is clear, and 0 elsewhere.
__device__ inline uint32_t TwiceE2m1(uint32_t codes) {
  const uint32_t positive = Permute(kTwiceLow, kTwiceHigh, codes);
  const uint32_t negative = Permute(kTwiceLow, kTwiceHigh, codes ^ 0x8888u);
  return ((positive | 0x80808080u) - negative) ^ 0x80808080u;
}

__device__ inline void MmaS8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

// A token's packed query in shared memory.
struct ScanQuery {
  const char* image;
  const float4* pairs;
  const float4* blocks;
};

__device__ inline float Relu(float x) {
  return fmaxf(x, 0.0f);
}

__device__ inline float SumQuad(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

struct Fp4Keys {
  using Sum = int32_t;
  static constexpr bool kFp4 = true;
  static constexpr int kDataBytes = 64, kScaleBytes = 4;
  static constexpr int kSteps = 4;
  static constexpr int kAhead = 4;  // tiles on their way
  static constexpr int kMinBlocks = 2;

  using Raw = Slots<1, true>;  // the codes of channels 32 q .. 32 q + 31, the row's four scales
  struct Tile {
    uint32_t a[kSteps][4];
    float scale[2];
    bool exact;  // no row of the warp needs Slow
  };

  __device__ static void Decode(const Raw& raw, Tile* tile) {
    int most_shift = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int mine = static_cast<int>(Permute(raw.Scale(i), 0, 0x4440u | threadIdx.x % 4));
      int least = min(mine, __shfl_xor_sync(0xffffffffu, mine, 1));
      least = min(least, __shfl_xor_sync(0xffffffffu, least, 2));
      const int shift = mine - least;
      most_shift = max(most_shift, shift);
      const uint32_t low = kTwiceLow << (shift & 3), high = kTwiceHigh << (shift & 3);
      const uint4 all = raw.Piece(i, 0);
      const uint32_t words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t codes = half == 0 ? words[s] : words[s] >> 16;
          // 128 + value: the bytes of a difference do not borrow from each other.
          tile->a[s][2 * half + i] =
              Permute(low, high, codes) + 0x80808080u - Permute(low, high, codes ^ 0x8888u);
        }
      }
      tile->scale[i] = FromE8m0(static_cast<uint8_t>(least)) * 0.5f;
    }
    tile->exact = __all_sync(0xffffffffu, most_shift <= 3);
  }

  // relu(sum - excess), at most 2^22, by way of the float32 whose unit is 1. `excess` is stored as
  // the bits of 2^23 less the excess.
  __device__ static float ReluDot(int32_t sum, float excess) {
    constexpr int32_t kTwo23 = 0x4b000000;
    const int32_t bits = __viaddmax_s32(sum, __float_as_int(excess), kTwo23);
    return __fsub_rn(__int_as_float(bits), 0x1p23f);
  }

  template <int kN>
  __device__ static void Multiply(int32_t (&sum)[kN / 2], const uint32_t (&a)[kSteps][4],
                                  uint64_t image, int, int first_head) {
    WgmmaFence();
    WgmmaU8S8<false>(sum, a[0], image + first_head * 8);
#pragma unroll
    for (int s = 1; s < kSteps; ++s) {
      WgmmaU8S8<true>(sum, a[s], image + first_head * 8 + s * 2);
    }
    WgmmaCommit();
    WgmmaWait<0>();
  }

  // Two rows block by block: ((b0 + b1) + b2) + b3 of scaled exact sums. Any warp by itself.
  template <int kHeads>
  __device__ static void Slow(const KeyRows& keys, const int32_t (&row)[2], const ScanQuery& query,
                              float* score) {
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    uint32_t a[4][4];
    float key_scale[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::byte *data, *scale;
      keys.Find(row[i], kDataBytes, kScaleBytes, &data, &scale);
      const uint32_t scales = *reinterpret_cast<const uint32_t*>(scale);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint32_t codes = reinterpret_cast<const uint32_t*>(data)[4 * b + quad];
        a[b][i] = TwiceE2m1(codes & 0xffffu);
        a[b][2 + i] = TwiceE2m1(codes >> 16);
        key_scale[i][b] = FromE8m0(static_cast<uint8_t>(scales >> (8 * b))) * 0.5f;
      }
    }
    score[0] = score[1] = 0;
#pragma unroll 1
    for (int tile = 0; tile < kHeads / 8; ++tile) {
      int32_t sum[4][4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const char* head = query.image + SwizzledOffset(8 * tile + group, 32 * quad) + 4 * b;
        const char* other = query.image + SwizzledOffset(8 * tile + group, 32 * quad + 16) + 4 * b;
        MmaS8(sum[b], a[b], *reinterpret_cast<const uint32_t*>(head),
              *reinterpret_cast<const uint32_t*>(other));
      }
      const float4 pair = query.pairs[4 * tile + quad];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float4 unit = query.blocks[8 * tile + 2 * quad + j];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const auto block = [&](int b) {
            return __fmul_rn(__int2float_rn(sum[b][2 * i + j]), key_scale[i][b]);
          };
          float d = __fmul_rn(block(0), unit.x);
          d = __fmaf_rn(block(1), unit.y, d);
          d = __fmaf_rn(block(2), unit.z, d);
          d = __fmaf_rn(block(3), unit.w, d);
          score[i] = __fmaf_rn(j == 0 ? pair.x : pair.y, Relu(d), score[i]);
        }
      }
    }
    score[0] = SumQuad(score[0]);
    score[1] = SumQuad(score[1]);
  }
};

// What keys of 8 and 16 bits share: bf16 words of the lane's 32 channels of each row.
struct WideKeys {
  using Sum = float;
  static constexpr bool kFp4 = false;
  static constexpr int kSteps = 8;
  static constexpr int kMinBlocks = 1;

  struct Tile {
    uint32_t a[kSteps][4];
    float scale[2];
    bool exact;
  };

  __device__ static float ReluDot(float sum, float) { return Relu(sum); }

  template <int kN>
  __device__ static void Multiply(float (&sum)[kN / 2], const uint32_t (&a)[kSteps][4],
                                  uint64_t image, int heads, int first_head) {
    WgmmaFence();
    WgmmaBf16<false>(sum, a[0], image + first_head * 8);
#pragma unroll
    for (int s = 1; s < kSteps; ++s) {
      WgmmaBf16<true>(sum, a[s], image + (s / 4 * heads + first_head) * 8 + s % 4 * 2);
    }
    WgmmaCommit();
    WgmmaWait<0>();
  }

  template <int kHeads>
  __device__ static void Slow(const KeyRows&, const int32_t (&)[2], const ScanQuery&, float*) {}
};

struct Fp8Keys : WideKeys {
  static constexpr int kDataBytes = 128, kScaleBytes = 4;
  static constexpr int kAhead = 4;
  using Raw = Slots<2, true>;

  __device__ static void Decode(const Raw& raw, Tile* tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tile->scale[i] = __uint_as_float(raw.Scale(i));
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint4 four = raw.Piece(i, s / 4);
        const uint32_t codes = s % 4 == 0   ? four.x
                               : s % 4 == 1 ? four.y
                               : s % 4 == 2 ? four.z
                                            : four.w;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto two = static_cast<__nv_fp8x2_storage_t>(codes >> (16 * half));
          const float2 value = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
          tile->a[s][2 * half + i] = Bf16Word(value.x, value.y);
        }
      }
    }
    tile->exact = true;
  }
};

struct Bf16Keys : WideKeys {
  static constexpr int kDataBytes = 256, kScaleBytes = 0;
  static constexpr int kAhead = 2;
  using Raw = Slots<4, false>;

  __device__ static void Decode(const Raw& raw, Tile* tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tile->scale[i] = 1.0f;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uint4 four = raw.Piece(i, s / 2);
        tile->a[s][i] = s % 2 == 0 ? four.x : four.z;
        tile->a[s][2 + i] = s % 2 == 0 ? four.y : four.w;
      }
    }
    tile->exact = true;
  }
};

// Scores of the lane's two rows for one token, the same in all lanes of a quad. Warpgroup.
template <class Keys, int kHeads>
__device__ void ScoreRows(const typename Keys::Tile& tile, const ScanQuery& query, float* score) {
  constexpr int kN = kHeads >= 64 ? 64 : 8;
  const int quad = threadIdx.x % 4;
  const uint64_t image = PanelDescriptor(SharedAddress(query.image));
  float a = 0, b = 0;
#pragma unroll
  for (int first = 0; first < kHeads; first += kN) {
    typename Keys::Sum sum[kN / 2];
    Keys::template Multiply<kN>(sum, tile.a, image, kHeads, first);
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      const float4 pair = query.pairs[first / 2 + 4 * j + quad];
      a = __fmaf_rn(pair.x, Keys::ReluDot(sum[4 * j], pair.z), a);
      a = __fmaf_rn(pair.y, Keys::ReluDot(sum[4 * j + 1], pair.w), a);
      b = __fmaf_rn(pair.x, Keys::ReluDot(sum[4 * j + 2], pair.z), b);
      b = __fmaf_rn(pair.y, Keys::ReluDot(sum[4 * j + 3], pair.w), b);
    }
  }
  score[0] = __fmul_rn(SumQuad(a), tile.scale[0]);
  score[1] = __fmul_rn(SumQuad(b), tile.scale[1]);
}

// grid (ranges of rows, tiles of up to kScanTokens tokens). Dynamic shared memory:
// ScanSharedBytes.
template <class Keys, int kHeads>
__global__ void __launch_bounds__(kScanThreads, Keys::kMinBlocks)
    ScanRows(const __grid_constant__ IndexerParams p) {
  extern __shared__ char memory[];
  __shared__ int32_t visible[kScanTokens];
  __shared__ int32_t unaligned[kScanTokens];
  constexpr PackedLayout kLayout{kHeads, Keys::kFp4};
  constexpr int kStride = (kLayout.Bytes() + 1023) / 1024 * 1024;
  char* const queries = memory + (1024 - (SharedAddress(memory) & 1023u)) % 1024;
  LetNextStart();
  WaitForPrevious();

  const int last_token =
      min((static_cast<int>(blockIdx.y) + 1) * kScanTokens, p.num_tokens);  // of this pass
  int next = 0;
  for (int local = blockIdx.y * kScanTokens; local < last_token; local = next) {
    // Tokens of one sequence, in ascending position.
    const int32_t sequence = p.step.sequence[p.first_token + local];
    next = local + 1;
    while (next < last_token && p.step.sequence[p.first_token + next] == sequence) ++next;
    const int count = next - local;
    __syncthreads();
    if (threadIdx.x < count) {
      const int32_t rows = VisibleRows(p, p.first_token + local + threadIdx.x);
      visible[threadIdx.x] = IsScored(p, rows) ? rows : 0;
      unaligned[threadIdx.x] = 0;
    }
    __syncthreads();
    int32_t rows = 0;
    for (int t = 0; t < count; ++t) rows = max(rows, visible[t]);
    const int32_t tiles = (rows + kScanRows - 1) / kScanRows;
    const auto ranges = static_cast<int32_t>(gridDim.x);
    const int32_t per_range = (tiles + ranges - 1) / ranges;
    const int32_t begin = static_cast<int32_t>(blockIdx.x) * per_range;
    const int32_t end = min(begin + per_range, tiles);
    if (begin >= end) continue;

    KeyRows keys;
    keys.pages = p.keys;
    keys.page_shift = p.page_shift;
    keys.blocks = p.step.block_table + int64_t{sequence} * p.step.max_blocks;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    // Tile begin + group + 2 i of the group is its round i; its slots are number i % kAhead.
    const int32_t group = static_cast<int32_t>(threadIdx.x / 128);
    const int32_t rounds = (end - begin - group + 1) / 2;
    char* const slots = queries + kScanTokens * kStride;
    const bool sixteens = keys.WholeSixteens();
    const auto load = [&](int32_t round, int slot_at) {
      if (round < rounds) {
        const int32_t first = (begin + group + 2 * round) * kScanRows + warp * 16;
        const typename Keys::Raw slot{slots + slot_at};
        if (sixteens) {
          // Rows beyond the last may hold anything: their scores are not stored.
          const int32_t sixteen = min(first, (rows - 1) & ~15);
          const std::byte* page = keys.Page(sixteen >> keys.page_shift);
          const int32_t in_page =
              (sixteen & (keys.pages.rows_per_page - 1)) + static_cast<int32_t>(lane / 4);
          const std::byte* data = page + in_page * Keys::kDataBytes;
          const std::byte* scale =
              page + keys.pages.rows_per_page * Keys::kDataBytes + in_page * Keys::kScaleBytes;
          slot.Load(data, scale, 0);
          slot.Load(data + 8 * Keys::kDataBytes, scale + 8 * Keys::kScaleBytes, 1);
        } else {
#pragma unroll 1
          for (int i = 0; i < 2; ++i) {
            const std::byte *data, *scale;
            keys.Find(min(first + lane / 4 + 8 * i, rows - 1), Keys::kDataBytes, Keys::kScaleBytes,
                      &data, &scale);
            slot.Load(data, scale, i);
          }
        }
      }
      CopyAsyncCommit();
    };
#pragma unroll 1
    for (int i = 0; i < Keys::kAhead; ++i) load(i, i * Keys::Raw::kBytes);

    for (int t = 0; t < count; ++t) {
      if (visible[t] == 0) continue;
      const auto* from = reinterpret_cast<const uint4*>(p.packed + (local + t) * p.packed_stride);
      auto* to = reinterpret_cast<uint4*>(queries + t * kStride);
      for (int i = threadIdx.x; i < kLayout.Bytes() / 16; i += kScanThreads) to[i] = from[i];
      if constexpr (Keys::kFp4) {
        const auto* aligned = reinterpret_cast<const int32_t*>(
            p.packed + (local + t) * p.packed_stride + kLayout.Aligned());
        if (threadIdx.x < kHeads && aligned[threadIdx.x] == 0) unaligned[t] = 1;
      }
    }
    FenceForWgmma();
    __syncthreads();

    int slot_at = 0;
#pragma unroll 1
    for (int32_t round = 0; round < rounds; ++round) {
      const int32_t index = begin + group + 2 * round;
      typename Keys::Tile tile;
      CopyAsyncWaitFor<Keys::kAhead - 1>();
      Keys::Decode(typename Keys::Raw{slots + slot_at}, &tile);
      load(round + Keys::kAhead, slot_at);
      slot_at = slot_at == (Keys::kAhead - 1) * Keys::Raw::kBytes ? 0 : slot_at + Keys::Raw::kBytes;
      const int32_t row = index * kScanRows + warp * 16 + lane / 4;
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        if (visible[t] <= index * kScanRows) continue;
        const char* packed = queries + t * kStride;
        const ScanQuery query{packed, reinterpret_cast<const float4*>(packed + kLayout.Pairs()),
                              reinterpret_cast<const float4*>(packed + kLayout.Blocks())};
        float score[2];
        ScoreRows<Keys, kHeads>(tile, query, score);
        if constexpr (Keys::kFp4) {
          if (!tile.exact || unaligned[t] != 0) {
            const int32_t both[2] = {min(row, rows - 1), min(row + 8, rows - 1)};
            Keys::template Slow<kHeads>(keys, both, query, score);
          }
        }
        const int32_t own_row = row + (lane % 4 == 1 ? 8 : 0);
        const float own = lane % 4 == 1 ? score[1] : score[0];
        const bool mine = lane % 4 < 2 && own_row < visible[t];
        const auto at = static_cast<uint32_t>((local + t) * p.scores_stride + own_row);
        if (mine) p.scores[at] = own;
        StoreGroup(p, at, own, mine, lane);
      }
    }
    CopyAsyncWaitFor<0>();
  }
}

template <class Keys, int kHeads>
constexpr int64_t ScanSharedBytes() {
  return 1024 +
         int64_t{kScanTokens} * ((PackedLayout{kHeads, Keys::kFp4}.Bytes() + 1023) / 1024 * 1024) +
         Keys::kAhead * Keys::Raw::kBytes;
}

constexpr int64_t ScanFloatSharedBytes(int heads) {
  return int64_t{heads} * (kIndexDim + 1) * 4;
}

// grid (ranges of rows, tokens): a thread per row, the exact chain in float32.
static __global__ void __launch_bounds__(kScanThreads)
    ScanFloat(const __grid_constant__ IndexerParams p) {
  extern __shared__ __align__(16) float query[];
  LetNextStart();
  WaitForPrevious();
  const int64_t local = blockIdx.y, token = p.first_token + local;
  const int32_t visible = VisibleRows(p, token);
  if (!IsScored(p, visible)) return;
  float* const w = query + p.heads * kIndexDim;
  for (int i = threadIdx.x; i < p.heads * kIndexDim; i += kScanThreads) {
    query[i] = LoadFloat(p.q, p.q_bf16, token * p.q_stride + i);
  }
  for (int h = threadIdx.x; h < p.heads; h += kScanThreads) {
    w[h] = LoadFloat(p.w, p.w_bf16, token * p.w_stride + h);
  }
  __syncthreads();
  KeyRows keys;
  keys.pages = p.keys;
  keys.page_shift = p.page_shift;
  keys.blocks = p.step.block_table + int64_t{p.step.sequence[token]} * p.step.max_blocks;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  for (int32_t row = static_cast<int32_t>(blockIdx.x * kScanThreads + threadIdx.x);
       row - lane < visible; row += static_cast<int32_t>(gridDim.x) * kScanThreads) {
    const std::byte *data, *scale;
    keys.Find(min(row, visible - 1), RowDataBytesOf(p.keys.format, kIndexDim),
              RowScaleBytesOf(p.keys.format), &data, &scale);
    float key[kIndexDim];
#pragma unroll
    for (int c = 0; c < kIndexDim; ++c) {
      key[c] = DecodeChannel(keys.pages.format, data, scale, c);
    }
    float score = 0;
#pragma unroll 1
    for (int h = 0; h < p.heads; ++h) {
      const auto* q = reinterpret_cast<const float4*>(query + h * kIndexDim);
      float dot = 0;
#pragma unroll
      for (int c = 0; c < kIndexDim; c += 4) {
        const float4 four = q[c / 4];
        dot = __fmaf_rn(four.x, key[c], dot);
        dot = __fmaf_rn(four.y, key[c + 1], dot);
        dot = __fmaf_rn(four.z, key[c + 2], dot);
        dot = __fmaf_rn(four.w, key[c + 3], dot);
      }
      score = __fmaf_rn(w[h], fmaxf(dot, 0.0f), score);
    }
    const auto at = static_cast<uint32_t>(local * p.scores_stride + row);
    if (row < visible) p.scores[at] = score;
    uint32_t best = row < visible ? GroupKeyOf(score) : 0;
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) {
      best = max(best, __shfl_xor_sync(0xffffffffu, best, offset));
    }
    if (lane % kGroupRows == 0 && row < visible) p.groups[at / kGroupRows] = best;
  }
}

}  // namespace fathom::ops::cuda
