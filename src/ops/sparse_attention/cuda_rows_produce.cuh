// The producers of AttendRows (cuda_rows.cuh): they find the rows of a tile, fetch them into
// shared memory and registers a tile ahead, and expand them to bf16 in the tile's place.
//
// Code that runs once per block is kept short: its first run waits for its instructions.
#pragma once

#include "ops/cuda/hopper.cuh"
#include "ops/sparse_attention/entries.cuh"

namespace fathom::ops::cuda {

constexpr int kTileRows = 64;
constexpr int kPanels = kHeadDim / 64;
constexpr int kPanelBytes = 64 * 128;
constexpr int kTileBytes = kPanels * kPanelBytes;
constexpr int kStages = 2;
constexpr int kConsumerThreads = 256, kProducerThreads = 256;

// Tiles of rows on their way from the producers to the consumers, 1,024-byte aligned.
struct TileRing {
  char keys[kStages][kTileBytes];
};

// FP8 rows on their way to the producers: pieces of 16 bytes of every thread.
constexpr int kStagedPieces = 6;
struct StagedCodes {
  uint4 pieces[kStagedPieces][kProducerThreads];
};

// A warp arrives once.
struct TileBarriers {
  uint64_t full[kStages], empty[kStages];

  __device__ void Init() {
    for (int i = 0; i < kStages; ++i) {
      BarrierInit(&full[i], kProducerThreads / 32);
      BarrierInit(&empty[i], kConsumerThreads / 32);
    }
  }
};

__device__ inline void WarpArrive(uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) BarrierArrive(barrier);
}

// 16 bytes, asked for here and now; zeros when not `valid`.
__device__ inline uint4 LoadNow(const std::byte* at, bool valid) {
  uint4 v;
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.u32 valid, %5, 0;\n"
      "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
      "@valid ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n"
      "}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(at), "r"(valid ? 1u : 0u));
  return v;
}

__device__ inline uint32_t MultiplyPair(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Sixteen e4m3 codes times a power of two, as bf16: exact, for scales up to kPlainScale and codes
// that are no NaN. most: per half the largest magnitude of a code so far; a NaN's is kNanMagnitude.
constexpr uint32_t kPlainScale = 254 - 120;
constexpr uint32_t kNanMagnitude = 0x07f0;
__device__ inline void ExpandPlain(const uint4& codes, uint32_t ue8m0, uint4 (&out)[2],
                                   uint32_t* most) {
  // A code's exponent field in bf16's place is too small by 2^120.
  const uint32_t factor = (ue8m0 + 120) * 0x00800080u;
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  uint32_t expanded[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Codes in the upper bytes of the halves: signs are where they belong, and magnitudes shift
    // within the half, whose lower byte is zero.
    const uint32_t low = __byte_perm(words[i], 0, 0x1404);
    const uint32_t high = __byte_perm(words[i], 0, 0x3424);
    const uint32_t a = (low >> 4) & 0x07f007f0u, b = (high >> 4) & 0x07f007f0u;
    *most = __vimax3_u16x2(*most, a, b);
    expanded[2 * i] = MultiplyPair((low & 0x80008000u) | a, factor);
    expanded[2 * i + 1] = MultiplyPair((high & 0x80008000u) | b, factor);
  }
  out[0] = {expanded[0], expanded[1], expanded[2], expanded[3]};
  out[1] = {expanded[4], expanded[5], expanded[6], expanded[7]};
}

// Two codes, in the low bytes of the halves, under any scale; NaN codes stay NaN.
__device__ inline uint32_t ExpandTwo(uint32_t codes, uint32_t ue8m0) {
  // bf16 ends at 2^127, so a large scale takes two factors.
  const uint32_t field = ue8m0 + 120, first = min(field, 254u);
  uint32_t two = (codes * 256 & 0x80008000u) | (codes * 16 & 0x07f007f0u);
  two = MultiplyPair(two, first * 0x00800080u);
  two = MultiplyPair(two, (127 + field - first) * 0x00800080u);
  if ((codes & 0x7fu) == 0x7fu) two |= 0x7fffu;
  if ((codes & 0x7f0000u) == 0x7f0000u) two |= 0x7fff0000u;
  return two;
}

// The cache row that compressed entry `entry` of the token is, or -1 for an entry of the window and
// beyond the last one.
__device__ inline int32_t CompressedRow(const AttentionParams& p, const Entries& entries,
                                        int entry) {
  const int compressed = entry - entries.window;
  if (compressed < 0 || compressed >= entries.compressed) return -1;
  return p.selected == nullptr ? compressed
                               : __ldg(p.selected + int64_t{entries.token} * p.top_k + compressed);
}

// The block of a cache row.
__device__ inline int32_t BlockOf(const AttentionParams& p, const Entries& entries, int32_t row) {
  if (row < 0) return 0;
  return __ldg(p.step.block_table + int64_t{entries.sequence} * p.step.max_blocks +
               PageOf(row, p.page_factor));
}

// Where a row lies; data == nullptr beyond the last entry.
struct RowAddress {
  const std::byte* data;
  const std::byte* scales;
};

// floor(n / d) for 0 <= n < 2^24 and d >= 1, where it is below 2^20: a third of a division's time.
__device__ inline int QuickDivide(int n, int d) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(static_cast<float>(d)));
  const auto guess = static_cast<int>(static_cast<float>(n) * inverse);  // at most one off
  const int rest = n - guess * d;
  return guess + (rest >= d ? 1 : 0) - (rest < 0 ? 1 : 0);
}

// 8 warps, each 8 rows of every tile, four lanes a row. The block of a row is asked for a tile
// before the row, which row it is a tile earlier still.
template <bool kFp8>
struct Producer {
  const AttentionParams& p;
  const Entries& entries;
  int row, part;      // of the tile, of the row
  int ring_row;       // of the window's first entry
  int entry;          // of the row that Next turns to
  int32_t cache_row;  // that row in the cache, or -1 for an entry of the window
  int32_t block;      // of cache_row
  int32_t row_after;  // the cache row of the tile after that

  __device__ Producer(const AttentionParams& params, const Entries& list, int first_tile)
      : p(params),
        entries(list),
        row(static_cast<int>(threadIdx.x - kConsumerThreads) / 4),
        part(threadIdx.x % 4) {
    entry = first_tile * kTileRows + row;
    cache_row = CompressedRow(p, entries, entry);
    row_after = CompressedRow(p, entries, entry + kTileRows);
    ring_row = entries.window_begin;
    ring_row -= QuickDivide(ring_row, p.ring.rows_per_page) * p.ring.rows_per_page;
    block = BlockOf(p, entries, cache_row);
  }

  __device__ RowAddress Address() const {
    constexpr int kDataBytes = kFp8 ? 576 : 1024;
    const bool compressed = cache_row >= 0;
    if (!compressed && entry >= entries.window) return {nullptr, nullptr};
    const int in_step = entries.window_begin + entry - entries.first;
    const bool of_step = !compressed && in_step >= 0;
    int in_page = ring_row + entry;
    if (in_page >= p.ring.rows_per_page) in_page -= p.ring.rows_per_page;
    if (of_step) in_page = entries.start + in_step;
    if (compressed) {
      in_page = cache_row - PageOf(cache_row, p.page_factor) * p.compressed.rows_per_page;
    }
    const PagedRows& rows = compressed ? p.compressed : of_step ? p.step_rows : p.ring;
    const std::byte* page = rows.base + (compressed ? block
                                         : of_step  ? 0
                                                    : entries.slot) *
                                            rows.block_stride;
    return {page + in_page * kDataBytes, page + rows.rows_per_page * kDataBytes + in_page * 8};
  }
  // Turns to the next tile, whose row lies in block `next_block`.
  __device__ void Advance(int32_t next_block) {
    entry += kTileRows;
    cache_row = row_after;
    block = next_block;
    row_after = CompressedRow(p, entries, entry + kTileRows);
  }
  // Where the row of the next tile lies.
  __device__ RowAddress Next() {
    const RowAddress found = Address();
    Advance(BlockOf(p, entries, row_after));
    return found;
  }
  // Asks for an FP8 row to come to L2: it touches five lines, its scales one.
  __device__ void Prefetch(const RowAddress& at) const {
    if (at.data == nullptr) return;
    PrefetchToL2(at.data + 128 * part);
    if (part < 2) PrefetchToL2(part == 0 ? at.data + 512 : at.scales);
  }
  __device__ void Store(char* panel, int half, const uint4& value) const {
    *reinterpret_cast<uint4*>(panel + SwizzledOffset(row, 32 * part + 16 * half)) = value;
  }
};

// The thread's part of a row at `data` again, whatever its codes and scales.
template <class Producer>
__device__ inline void ExpandAnyRow(const Producer& producer, const std::byte* data,
                                    const uint2& scales, char* keys) {
#pragma unroll 1
  for (int i = 0; i < 7; ++i) {
    const uint32_t scale = (i < 4 ? scales.x >> 8 * i : scales.y >> 8 * (i - 4)) & 0xffu;
#pragma unroll 1
    for (int word = 0; word < 4; ++word) {
      const uint32_t codes =
          __ldg(reinterpret_cast<const uint32_t*>(data + 64 * i + 16 * producer.part + 4 * word));
      *reinterpret_cast<uint2*>(keys + i * kPanelBytes +
                                SwizzledOffset(producer.row, 32 * producer.part + 8 * word)) = {
          ExpandTwo(__byte_perm(codes, 0, 0x4140), scale),
          ExpandTwo(__byte_perm(codes, 0, 0x4342), scale)};
    }
  }
}

// Tiles [first_tile, last_tile). Rows are on their way to L2 more than a tile before they are
// fetched, and a piece's codes are read while the piece before it is expanded.
__device__ inline void ProduceFp8(const AttentionParams& p, const Entries& entries, int first_tile,
                                  int last_tile, TileRing& ring, StagedCodes& staged,
                                  TileBarriers& barriers) {
  Producer<true> producer(p, entries, first_tile);
  uint4* const mine = &staged.pieces[0][threadIdx.x - kConsumerThreads];
  uint4 last, rope[2];  // the last piece of codes, and what is bf16
  uint2 next_scales = {0, 0};
  const std::byte* next = nullptr;
  const int32_t second_block = BlockOf(p, entries, producer.row_after);  // beside the first
  RowAddress ahead = producer.Address();
  producer.Prefetch(ahead);
  producer.Advance(second_block);
  // The round before the first tile only asks.
#pragma unroll 1
  for (int tile = first_tile - 1; tile < last_tile; ++tile) {
    const int count = tile - first_tile;
    const int stage = count % kStages;
    char* const keys = ring.keys[count < 0 ? 0 : stage];
    const std::byte* const data = next;
    const uint2 scales = next_scales;
    next = tile + 1 < last_tile ? ahead.data : nullptr;
    next_scales =
        next == nullptr ? uint2{0, 0} : __ldg(reinterpret_cast<const uint2*>(ahead.scales));
    ahead = producer.Next();
    if (tile + 2 < last_tile) producer.Prefetch(ahead);
    if (count >= kStages) BarrierWait(&barriers.empty[stage], (count / kStages - 1) & 1);
    uint32_t most = 0;
    const auto expand = [&](const uint4& codes, int i) {
      const uint32_t scale =
          __byte_perm(scales.x, scales.y, static_cast<uint32_t>(i) | 0x4440u) & 0xffu;
      uint4 out[2];
      ExpandPlain(codes, scale, out, &most);
      producer.Store(keys + i * kPanelBytes, 0, out[0]);
      producer.Store(keys + i * kPanelBytes, 1, out[1]);
    };
    if (count >= 0) {
      producer.Store(keys + 7 * kPanelBytes, 0, rope[0]);
      producer.Store(keys + 7 * kPanelBytes, 1, rope[1]);
      expand(last, kStagedPieces);
    }
    last = LoadNow(next + 64 * kStagedPieces + 16 * producer.part, next != nullptr);
    rope[0] = LoadNow(next + kNopeDim + 32 * producer.part, next != nullptr);
    rope[1] = LoadNow(next + kNopeDim + 32 * producer.part + 16, next != nullptr);
    CopyAsyncWaitFor<0>();
    const std::byte* const from = next == nullptr ? p.step_rows.base : next + 16 * producer.part;
    uint4 codes = mine[0];
#pragma unroll 2
    for (int i = 0; i < kStagedPieces; ++i) {
      const uint4 at_hand = codes;
      CopyAsync16(SharedAddress(mine + i * kProducerThreads), from + 64 * i, next != nullptr);
      if (i + 1 < kStagedPieces) codes = mine[(i + 1) * kProducerThreads];
      if (count >= 0) expand(at_hand, i);
    }
    CopyAsyncCommit();
    if (count < 0) continue;
    const bool large = (__vcmpgtu4(scales.x, kPlainScale * 0x01010101u) |
                        __vcmpgtu4(scales.y & 0x00ffffffu, kPlainScale * 0x01010101u)) != 0;
    if (data != nullptr &&
        (large || (most & 0xffffu) == kNanMagnitude || most >> 16 == kNanMagnitude)) {
      ExpandAnyRow(producer, data, scales, keys);
    }
    FenceForWgmma();
    WarpArrive(&barriers.full[stage]);
  }
}

__device__ inline void ProduceBf16(const AttentionParams& p, const Entries& entries, int first_tile,
                                   int last_tile, TileRing& ring, TileBarriers& barriers) {
  Producer<false> producer(p, entries, first_tile);
#pragma unroll 1
  for (int tile = first_tile; tile < last_tile; ++tile) {
    const int count = tile - first_tile;
    const int stage = count % kStages, round = count / kStages;
    char* const keys = ring.keys[stage];
    const std::byte* const data = producer.Next().data;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 words[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        words[i] = LoadNow(data + (4 * half + i / 2) * 128 + 32 * producer.part + i % 2 * 16,
                           data != nullptr);
      }
      if (half == 0 && round > 0) BarrierWait(&barriers.empty[stage], (round - 1) & 1);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        producer.Store(keys + (4 * half + i / 2) * kPanelBytes, i % 2, words[i]);
      }
    }
    FenceForWgmma();
    WarpArrive(&barriers.full[stage]);
  }
}

}  // namespace fathom::ops::cuda
