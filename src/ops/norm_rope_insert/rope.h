// Rotary position embedding (model.md 4.1): interleaved pairs on the last 64 channels of a head.
//
// The angle is fl(fl(t) * f_i), rounded to f32 BEFORE cos and sin: at t near 1e6 an engine that
// reduces the angle in higher precision differs from the model's own code.
// Layers of ratio 0 use theta 10000 without scaling; layers of ratio 4 and 128 use theta 160000
// with YaRN for everything in them. No magnitude correction anywhere.
#pragma once

#include <array>
#include <cstdint>

namespace fathom::ops {

inline constexpr int kRopePairs = 32;

struct YarnParams {
  double factor = 16;
  double original_max_position = 65536;
  double beta_fast = 32;
  double beta_slow = 1;
};

// f_i of the 32 pairs.
struct RopeFrequencies {
  std::array<float, kRopePairs> f{};
};

RopeFrequencies PlainRope(double theta);
RopeFrequencies YarnRope(double theta, const YarnParams& yarn);

// cos and sin of one position: table[2*i] = cos a_i, table[2*i+1] = sin a_i. Backends build these
// once per step per frequency set ([T, 64] f32) and share them among the layers.
void RopeTableRow(const RopeFrequencies& frequencies, int64_t position, float* table);

// Rotates 64 channels in place by the table (inverse: by its conjugate). No rounding.
void RotateRow(float* x, const float* table, bool inverse);

}  // namespace fathom::ops
