// quantise: every rounding of model.md that is not a plain cast, one function each, on one row.
// These scalar forms are the reference; backends fuse them and must produce the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/paged_rows.h"

namespace fathom::ops {

// Activation quantiser (model.md 2.1), in place: per 128 consecutive channels (last block may be
// shorter) a = max(max|x|, 1e-4), s = pow2up(a * (1/448)), x <- e4m3(clamp(x/s, +-448)) * s.
void QuantiseActivationRow(float* x, int64_t channels);

// KV rounding (4.2 step 6), in place on a 512-channel row: channels 0..447 in 7 blocks of 64,
// a = max(max|x|, 1e-4), s = pow2up(a / 448), x <- bf16(e4m3(x/s) * s). 448..511 stay.
void RoundKvRow(float* x);

// Hadamard (5.6), in place: y = bf16(128^-0.5 * H128 x), Sylvester order, f32 inside.
// round = false leaves the result in f32.
void HadamardRow(float* x, bool round);

// FP4 rounding (5.6), in place on 128 channels in blocks of 32: a = max(max|x|, 6*2^-126),
// s = pow2up(a * (1/6)), x <- bf16(e2m1(clamp(x/s, +-6)) * s).
void RoundFp4Row(float* x);

// FP8 index rounding (5.6, vLLM's default cache): one block of 128, a = max(max|x|, 1e-4),
// s = pow2up(a/448), x <- e4m3(x/s) * s.
void RoundFp8IndexRow(float* x);

// Encodes an unrounded row into its storage format: the rounding above is part of the encoding.
//   kFp8Main: RoundKvRow; kFp8Index: RoundFp8IndexRow; kFp4Index: RoundFp4Row (the caller has
//   applied Hadamard); kBf16: rn_bf16; kF32: as is.
// data, scale: PagedRows::data / ::scale of the row.
void EncodeRow(RowFormat format, int channels, const float* x, std::byte* data, std::byte* scale);

// The same bytes, with the CPU's vector instructions for kFp8Main and kBf16.
void EncodeRowCpu(RowFormat format, int channels, const float* x, std::byte* data,
                  std::byte* scale);

// The stored row as float32. DecodeRow(EncodeRow(x)) equals the rounding named above.
void DecodeRow(RowFormat format, int channels, const std::byte* data, const std::byte* scale,
               float* x);

}  // namespace fathom::ops
