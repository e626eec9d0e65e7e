// Inverse RoPE of every head of one token, one function per ISA (bit-equal to RotateRow). Plain
// declarations only: the per-ISA file includes this header.
#pragma once

namespace fathom::ops {

// o [heads * 512]: channels 448..511 of each head rotated by the conjugate of `table` [64];
// -> bf16 when `round`.
void InverseRotateHeadsScalar(float* o, int heads, const float* table, bool round);
void InverseRotateHeadsAvx2(float* o, int heads, const float* table, bool round);

}  // namespace fathom::ops
