// Per-ISA kernels of hyper_connection.
#pragma once

#include <cstdint>

namespace fathom::ops {

inline constexpr int kSeamTile = 16;  // tokens a kernel call handles at most

struct SeamTile {
  int tokens = 0;      // 1..kSeamTile
  int64_t d = 0;       // hidden size, a multiple of 16
  float* x = nullptr;  // [tokens, 4*D]
  int64_t x_stride = 0;
  const float* o = nullptr;  // [tokens, D] or null
  int64_t o_stride = 0;
  float* post = nullptr;      // [tokens, 4]
  float* comb = nullptr;      // [tokens, 16]
  const float* fn = nullptr;  // null: no `pre`
  const float* base = nullptr;
  const float* scale = nullptr;
  int mixes = 0;
  float* u = nullptr;
  int64_t u_stride = 0;
  const float* norm = nullptr;  // null: no norm
  float* z = nullptr;
  int64_t z_stride = 0;
  int iterations = 0;
  float eps = 0;
  float norm_eps = 0;
  bool round = false;
};

void SeamAvx2(const SeamTile& tile);
void SeamAvx512(const SeamTile& tile);

}  // namespace fathom::ops
