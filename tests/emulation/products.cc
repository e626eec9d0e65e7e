// mma and wgmma: operands from lanes or described panels, sums in float64 or exact.
#include <algorithm>

#include "machine.h"

namespace emu {

// --- matrix products

struct ProductRequest : Exchange {
  const MmaShape* mma = nullptr;
  const WgmmaShape* wgmma = nullptr;
  uint32_t* d[4];
  uint32_t a[4], b[2], c[4];
  char* to = nullptr;
  uint64_t a_descriptor = 0, b_descriptor = 0;
  bool add = false;
};

void WarpMma(const MmaShape& shape, uint32_t* const d[4], const uint32_t a[4], const uint32_t b[2],
             const uint32_t c[4]) {
  ProductRequest request;
  request.mma = &shape;
  std::copy_n(d, 4, request.d);
  std::copy_n(a, 4, request.a);
  std::copy_n(b, 2, request.b);
  std::copy_n(c, 4, request.c);
  Meet(Meeting::kMma, 0xffffffffu, &request, Where::current());
}
void WarpgroupMma(const WgmmaShape& shape, void* d, const uint32_t* a, uint64_t a_descriptor,
                  uint64_t b_descriptor, bool add) {
  ProductRequest request;
  request.wgmma = &shape;
  request.to = static_cast<char*>(d);
  if (a != nullptr) std::copy_n(a, 4, request.a);
  request.a_descriptor = a_descriptor;
  request.b_descriptor = b_descriptor;
  request.add = add;
  Meet(Meeting::kWgmma, 0xffffffffu, &request, Where::current());
}

// Panels must lie in the block's shared memory.
const char* DescribedByte(const Block* block, uint64_t logical) {
  const uint64_t at = logical ^ ((logical >> 7 & 7) << 4);
  if (at < kFirstShared || at >= block->shared_end) {
    Fail("wgmma reads shared+%lld of %zu", static_cast<long long>(at) - 1024,
         block->shared_end - kFirstShared);
  }
  return block->shared + at;
}

struct Panel {
  uint64_t start, leading, stride;
  explicit Panel(uint64_t descriptor)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) Fail("wgmma: only panels with a swizzle of 128 bytes");
    if ((descriptor >> 49 & 7) != 0) Fail("wgmma: a base offset");
    if (start % 1024 >= 128 && start % 128 != 0)
      Fail("wgmma: a panel that begins nowhere sensible");
  }
};

void RunWgmma(const WarpProduct& p) {
  const WgmmaShape& shape = p.shape;
  const Block* const block = p.block;
  const int n = shape.n;
  const Panel panel(p.b_descriptor);
  if (shape.integers) {
    static int8_t b[256][32];
    for (int row = 0; row < n; ++row) {
      const uint64_t begin = panel.start + static_cast<uint64_t>(row / 8) * panel.stride +
                             static_cast<uint64_t>(row % 8) * 128;
      for (uint64_t piece = 0; piece < 2; ++piece) {
        std::memcpy(&b[row][16 * piece], DescribedByte(block, begin + 16 * piece), 16);
      }
    }
    int32_t a[16][32];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, q = lane % 4;
      for (int i = 0; i < 4; ++i) {
        for (int byte = 0; byte < 4; ++byte) {
          const auto code = static_cast<uint8_t>(p.a[lane][i] >> (8 * byte));
          a[g + 8 * (i & 1)][16 * (i >> 1) + 4 * q + byte] =
              shape.a_signed ? static_cast<int8_t>(code) : code;
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, q = lane % 4;
      auto* const d = reinterpret_cast<int32_t*>(p.d[lane]);
      for (int j = 0; j < n / 8; ++j) {
        for (int i = 0; i < 4; ++i) {
          const int row = g + 8 * (i >> 1), column = 8 * j + 2 * q + (i & 1);
          int32_t sum = p.add ? d[4 * j + i] : 0;
          for (int k = 0; k < 32; ++k) sum += a[row][k] * b[column][k];
          d[4 * j + i] = sum;
        }
      }
    }
    return;
  }
  static double b[16][256];  // [k][column]
  if (!shape.b_transposed) {
    for (int row = 0; row < n; ++row) {
      const uint64_t begin = panel.start + static_cast<uint64_t>(row / 8) * panel.stride +
                             static_cast<uint64_t>(row % 8) * 128;
      for (uint64_t piece = 0; piece < 2; ++piece) {
        uint16_t values[8];
        std::memcpy(values, DescribedByte(block, begin + 16 * piece), 16);
        for (uint64_t i = 0; i < 8; ++i) b[8 * piece + i][row] = FromBf16(values[i]);
      }
    }
  } else {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < n; column += 8) {
        const uint64_t begin = panel.start + static_cast<uint64_t>(column / 64) * panel.leading +
                               static_cast<uint64_t>(k / 8) * panel.stride +
                               static_cast<uint64_t>(k % 8) * 128 +
                               static_cast<uint64_t>(column % 64) * 2;
        uint16_t values[8];
        std::memcpy(values, DescribedByte(block, begin), 16);
        for (int i = 0; i < 8; ++i) b[k][column + i] = FromBf16(values[i]);
      }
    }
  }
  double a[16][16];
  if (p.a_panel == nullptr) {
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, q = lane % 4;
      for (int i = 0; i < 4; ++i) {
        for (int half = 0; half < 2; ++half) {
          a[g + 8 * (i & 1)][8 * (i >> 1) + 2 * q + half] =
              FromBf16(static_cast<uint16_t>(p.a[lane][i] >> (16 * half)));
        }
      }
    }
  } else {
    const Panel a_panel(p.a_descriptor);
    const int first = block->warps.empty() ? 0 : static_cast<int>(p.a[0][0]);  // row of the warp
    for (int r = 0; r < 16; ++r) {
      const int row = first + r;
      const uint64_t begin = a_panel.start + static_cast<uint64_t>(row / 8) * a_panel.stride +
                             static_cast<uint64_t>(row % 8) * 128;
      for (uint64_t piece = 0; piece < 2; ++piece) {
        uint16_t values[8];
        std::memcpy(values, DescribedByte(block, begin + 16 * piece), 16);
        for (uint64_t i = 0; i < 8; ++i) a[r][8 * piece + i] = FromBf16(values[i]);
      }
    }
  }
  alignas(64) static float sums[16][256];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, q = lane % 4;
    const auto* const d = reinterpret_cast<const float*>(p.d[lane]);
    for (int j = 0; j < n / 8; ++j) {
      for (int i = 0; i < 4; ++i) {
        sums[g + 8 * (i >> 1)][8 * j + 2 * q + (i & 1)] = p.add ? d[4 * j + i] : 0.0f;
      }
    }
  }
  MultiplyBf16(a, &b[0][0], 256, n, &sums[0][0], 256);
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, q = lane % 4;
    auto* const d = reinterpret_cast<float*>(p.d[lane]);
    for (int j = 0; j < n / 8; ++j) {
      for (int i = 0; i < 4; ++i) {
        d[4 * j + i] = sums[g + 8 * (i >> 1)][8 * j + 2 * q + (i & 1)];
      }
    }
  }
}

void FinishProducts(Warp* warp, uint32_t through) {
  size_t done = 0;
  while (done < warp->products.size() && warp->products[done].group < through) {
    RunWgmma(warp->products[done++]);
  }
  warp->products.erase(warp->products.begin(), warp->products.begin() + static_cast<long>(done));
}

void RunWarpProduct_(Warp* warp) {
  const auto request = [&](int lane) {
    return static_cast<ProductRequest*>(warp->lanes[lane]->exchange);
  };
  if (warp->done != 0) Fail("a product by a warp of which lanes have ended");
  if (request(0)->wgmma != nullptr) {
    WarpProduct& p = warp->products.emplace_back();
    const ProductRequest& first = *request(0);
    p.shape = *first.wgmma;
    p.block = warp->block;
    p.a_panel = p.shape.a_shared ? warp->block->shared : nullptr;
    p.a_descriptor = first.a_descriptor;
    p.b_descriptor = first.b_descriptor;
    p.add = first.add;
    p.group = warp->product_groups;
    for (int lane = 0; lane < 32; ++lane) {
      const ProductRequest& r = *request(lane);
      if (r.b_descriptor != p.b_descriptor || r.a_descriptor != p.a_descriptor) {
        Fail("wgmma: lanes have different descriptors");
      }
      std::copy_n(r.a, 4, p.a[lane]);
      p.d[lane] = r.to;
    }
    if (p.shape.a_shared) p.a[0][0] = static_cast<uint32_t>(warp->index % 4 * 16);
    return;
  }
  const MmaShape& shape = *request(0)->mma;
  if (shape.integers) {
    int32_t a[16][32], b[32][8];
    for (int lane = 0; lane < 32; ++lane) {
      const ProductRequest& r = *request(lane);
      const int g = lane / 4, q = lane % 4;
      const auto byte_of = [](uint32_t word, int i, bool is_signed) -> int32_t {
        const auto code = static_cast<uint8_t>(word >> (8 * i));
        return is_signed ? static_cast<int8_t>(code) : code;
      };
      for (int i = 0; i < 4; ++i) {
        for (int byte = 0; byte < 4; ++byte) {
          a[g + 8 * (i & 1)][16 * (i >> 1) + 4 * q + byte] = byte_of(r.a[i], byte, shape.a_signed);
        }
      }
      for (int i = 0; i < 2; ++i) {
        for (int byte = 0; byte < 4; ++byte) {
          b[16 * i + 4 * q + byte][g] = byte_of(r.b[i], byte, shape.b_signed);
        }
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const ProductRequest& r = *request(lane);
      const int g = lane / 4, q = lane % 4;
      for (int i = 0; i < 4; ++i) {
        const int row = g + 8 * (i >> 1), column = 2 * q + (i & 1);
        auto sum = static_cast<int32_t>(r.c[i]);
        for (int k = 0; k < 32; ++k) sum += a[row][k] * b[k][column];
        *r.d[i] = static_cast<uint32_t>(sum);
      }
    }
    return;
  }
  double a[16][16];
  alignas(64) double b[16][8];
  alignas(64) float sums[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const ProductRequest& r = *request(lane);
    const int g = lane / 4, q = lane % 4;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i) {
        a[g + 8 * (i & 1)][8 * (i >> 1) + 2 * q + half] =
            FromBf16(static_cast<uint16_t>(r.a[i] >> (16 * half)));
      }
      for (int i = 0; i < 2; ++i) {
        b[8 * i + 2 * q + half][g] = FromBf16(static_cast<uint16_t>(r.b[i] >> (16 * half)));
      }
    }
    for (int i = 0; i < 4; ++i) sums[g + 8 * (i >> 1)][2 * q + (i & 1)] = Bits<float>(r.c[i]);
  }
  MultiplyBf16(a, &b[0][0], 8, 8, &sums[0][0], 8);
  for (int lane = 0; lane < 32; ++lane) {
    const ProductRequest& r = *request(lane);
    const int g = lane / 4, q = lane % 4;
    for (int i = 0; i < 4; ++i) *r.d[i] = Bits<uint32_t>(sums[g + 8 * (i >> 1)][2 * q + (i & 1)]);
  }
}

void RunWarpProduct(void* fiber) {
  RunWarpProduct_(static_cast<Fiber*>(fiber)->warp);
}
// By every lane: the last one to come does it for all.
void WgmmaCommit() {
  Meet(Meeting::kAligned, 0xffffffffu, nullptr, Where::current());
  Fiber* const me = current;
  if (me->groups >> 31) Fail("too many groups");
  me->warp->product_groups += me->lane == 0 ? 1 : 0;
  Meet(Meeting::kAligned, 0xffffffffu, nullptr, Where::current());
  if (me->lane == 0 && mood.eager != 0 && Below(256) < mood.eager) {
    FinishProducts(me->warp, me->warp->product_groups);
  }
}
void WgmmaWait(uint32_t pending) {
  Preempt();
  Meet(Meeting::kAligned, 0xffffffffu, nullptr, Where::current());
  Warp* const warp = current->warp;
  FinishProducts(warp, warp->product_groups < pending ? 0 : warp->product_groups - pending);
  Meet(Meeting::kAligned, 0xffffffffu, nullptr, Where::current());
}

}  // namespace emu
