// The inner loops of the compressor, one set per instruction set, with the same bits in both: lanes
// are channels, so every sum over members or tokens runs in their order; the mean of squares uses
// the one tree of vec16.h.
#pragma once

#include <cstdint>

namespace fathom::ops {

// One pooled token: its half of c, of g, and what is added to g (zeros where g holds it already).
struct PoolMember {
  const float* c = nullptr;
  const float* g = nullptr;
  const float* ape = nullptr;
};

// A run of tokens inside one group of 128, for one slice of channels.
struct RecordRun {
  const float* c = nullptr;  // first token
  const float* g = nullptr;
  const float* ape = nullptr;  // row of the first token
  int64_t c_stride = 0, g_stride = 0, ape_stride = 0;
  int tokens = 0;
  int channels = 0;    // multiple of 64
  bool fresh = false;  // the first token starts the group: m, l, a hold nothing yet
  float* m = nullptr;  // in/out
  float* l = nullptr;
  float* a = nullptr;
};

struct CompressorKernels {
  // row [channels] = sum_i softmax_i(g_i + ape_i) c_i, members oldest first, at most 8.
  void (*pool)(const PoolMember* members, int count, int channels, float* row);
  void (*advance)(const RecordRun& run);
  // out = a / b.
  void (*divide)(const float* a, const float* b, int n, float* out);
  // out = a + b.
  void (*add)(const float* a, const float* b, int n, float* out);
  // model.md 5.4 steps 1 and 2 in place: bf16, RMSNorm, RoPE on the last 64 channels. `round`
  // false leaves out every rounding.
  void (*norm_rope)(float* row, int channels, const float* norm, float eps,
                    const float* frequencies, float position, bool round);
  // kFp4Index bytes of 128 channels, equal to EncodeRow's.
  void (*encode_fp4)(const float* x, uint8_t* data, uint8_t* scale);
};

extern const CompressorKernels kCompressorAvx2;
extern const CompressorKernels kCompressorAvx512;

}  // namespace fathom::ops
