// What happens to activations before a product: as they are, rounded to bf16, or quantised.
#pragma once

#include "ops/cuda/hopper.cuh"
#include "ops/linear/cuda_expand.cuh"

namespace fathom::ops::cuda {

// How a product reads its activations.
enum class Form : uint8_t {
  kFloat,      // f32, not rounded: kReference and F32 weights
  kPlain,      // bf16, natural order: BF16 weights
  kQuantised,  // bf16 values of the activation quantiser: FP8 and FP4 weights
  // The same for many rows (cuda_wide.cuh): within a half unit the words lie in the order in which
  // products of the weight's format take them, those of the four quarters side by side.
  kWideFp8,
  kWideFp4,
  kWidePlain,  // not quantised, for FP8 weights
};

// The form of a product with many rows.
inline Form WideForm(Form form, WeightFormat format) {
  if (form == Form::kPlain && format == Format::kFp8Block128) return Form::kWidePlain;
  if (form != Form::kQuantised) return form;
  return format == Format::kFp8Block128 ? Form::kWideFp8 : Form::kWideFp4;
}

inline Form FormOf(WeightFormat format, Numerics numerics) {
  if (numerics == Numerics::kReference || format == WeightFormat::kF32) return Form::kFloat;
  return format == WeightFormat::kBF16 ? Form::kPlain : Form::kQuantised;
}

// The activation quantiser's scale of a unit whose largest magnitude is `most`.
__device__ inline float ActivationScale(float most) {
  return PowerOfTwoUp(fmaxf(most, 1e-4f) * (1.0f / 448.0f));
}

// The activation quantiser on a unit: the lane's 4 inputs of 128.
__device__ inline void QuantiseUnit(float (&v)[4]) {
  const float most =
      WarpMax(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
  const float scale = ActivationScale(most);
  const float inverse = 1.0f / scale;  // exact: a power of two
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = FromE4m3(ToE4m3(v[i] * inverse)) * scale;
}

__device__ inline uint2 PackBf16(const float (&v)[4]) {
  const auto pack = [](float low, float high) {
    return static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(low))) |
           static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
  };
  return make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
}

// One unit of a row by one warp: `value` holds inputs 4*lane .. 4*lane + 3 (zero beyond the row's
// end), `row` the whole padded row in the given form.
__device__ inline void StoreUnit(Form form, const float value[4], int unit, void* row) {
  const int lane = threadIdx.x % 32;
  const int64_t at = int64_t{unit} * kUnit + 4 * lane;
  if (form == Form::kFloat) {
    *reinterpret_cast<float4*>(static_cast<float*>(row) + at) =
        make_float4(value[0], value[1], value[2], value[3]);
    return;
  }
  float v[4] = {value[0], value[1], value[2], value[3]};
  const bool quantised =
      form == Form::kQuantised || form == Form::kWideFp8 || form == Form::kWideFp4;
  if (quantised) QuantiseUnit(v);
  const uint2 words = PackBf16(v);
  if (form == Form::kPlain || form == Form::kQuantised) {
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(row) + at) = words;
    return;
  }
  // Chunk lane / 2 of the unit in ascending order is chunk e of quarter q (UnitChunk); word w of it
  // goes to 64 (e / 2) + 32 (e % 2) + 8 w + 2 q.
  const int chunk = lane / 2;
  const int q = form == Form::kWideFp4 ? chunk / 4 : chunk % 8 / 2;
  const int e = form == Form::kWideFp4 ? chunk % 4 : chunk / 8 * 2 + chunk % 2;
  auto* const to = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(row) +
                                               int64_t{unit} * kUnit + 32 * e + 2 * q) +
                   lane % 2 * 8;
  to[0] = words.x;
  to[4] = words.y;
}

__device__ inline void LoadFour(const float* x, float (&v)[4]) {
  const float4 four = *reinterpret_cast<const float4*>(x);
  v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}
__device__ inline void LoadFour(const __nv_bfloat16* x, float (&v)[4]) {
  const uint2 four = *reinterpret_cast<const uint2*>(x);
  v[0] = __uint_as_float(four.x << 16), v[1] = __uint_as_float(four.x & 0xffff0000u);
  v[2] = __uint_as_float(four.y << 16), v[3] = __uint_as_float(four.y & 0xffff0000u);
}

// x [rows, in] to out [rows, units * 128] of `form`.
template <class T>
struct Preparation {
  const T* x;
  int64_t stride;
  int rows, in, units;
  Form form;
  void* out;
  bool vector;  // rows begin at multiples of 16 bytes and hold a multiple of 4 inputs

  // The lane's share of a unit of row t.
  __device__ void Load(int64_t t, int unit, float (&v)[4]) const {
    const int k = unit * kUnit + 4 * static_cast<int>(threadIdx.x % 32);
    if (vector && k < in) return LoadFour(x + t * stride + k, v);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = k + i < in ? ToFloat(x[t * stride + k + i]) : 0.0f;
  }

  // By a warp: unit number `job` of all rows'.
  __device__ void Run(int64_t job) const {
    if (job >= int64_t{rows} * units) return;
    const int64_t t = job / units;
    const int unit = static_cast<int>(job % units);
    float v[4];
    Load(t, unit, v);
    const int64_t row_bytes = int64_t{units} * kUnit * (form == Form::kFloat ? 4 : 2);
    StoreUnit(form, v, unit, static_cast<char*>(out) + t * row_bytes);
  }
};

template <class T>
Preparation<T> MakePreparation(const MatrixView& x, Form form, void* out) {
  return {.x = static_cast<const T*>(x.data),
          .stride = x.stride,
          .rows = static_cast<int>(x.rows),
          .in = static_cast<int>(x.cols),
          .units = static_cast<int>(CudaDepth(x.cols) / kUnit),
          .form = form,
          .out = out,
          .vector = x.cols % 4 == 0 && x.stride * ElementBytes(x.dtype) % 16 == 0 &&
                    reinterpret_cast<uintptr_t>(x.data) % 16 == 0};
}

template <class T>
__global__ void __launch_bounds__(256) PrepareKernel(Preparation<T> p) {
  LetNextStart();
  WaitForPrevious();
  p.Run(int64_t{blockIdx.x} * 8 + threadIdx.x / 32);
}

inline void Prepare(const MatrixView& x, Form form, void* out, cudaStream_t stream) {
  WithActivationType(x.dtype, [&]<class T>(T) {
    const auto p = MakePreparation<T>(x, form, out);
    LaunchOverlapped(PrepareKernel<T>, Blocks(x.rows * p.units, 8), 256, 0, stream, 1, p);
  });
}

// Four consecutive results of a row, count of them real; `vector` says that y's rows are aligned.
template <class T>
__device__ inline void StoreResults(T* at, const float4& v, int count, bool round, bool vector) {
  const float value[4] = {RoundIf(v.x, round), RoundIf(v.y, round), RoundIf(v.z, round),
                          RoundIf(v.w, round)};
  if (vector && count == 4) {
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float4*>(at) = make_float4(value[0], value[1], value[2], value[3]);
    } else {
      T four[4] = {FromFloat<T>(value[0]), FromFloat<T>(value[1]), FromFloat<T>(value[2]),
                   FromFloat<T>(value[3])};
      *reinterpret_cast<uint2*>(at) = *reinterpret_cast<const uint2*>(four);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < count) at[i] = FromFloat<T>(value[i]);
  }
}

// Whether four consecutive elements of any row, from a multiple of four on, may be stored at once.
inline bool RowsAligned(const MatrixView& y) {
  const auto bytes = static_cast<uintptr_t>(4 * ElementBytes(y.dtype));
  return reinterpret_cast<uintptr_t>(y.data) % bytes == 0 && y.stride % 4 == 0;
}

}  // namespace fathom::ops::cuda
