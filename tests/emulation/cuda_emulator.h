// CUDA kernels on the CPU, thread by thread: what CUDA sources see in place of the device.
// README.md says what is emulated and how; rewrite.py turns what no header can (inline PTX, <<<>>>,
// __shared__) into calls of this file.
//
// Included before everything else (g++ -include). Every CUDA thread is a fiber; all threads of the
// blocks of a cluster, and of a few clusters of the grid, are resident together. A seeded scheduler
// decides who runs on whenever threads meet, wait or signal.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <source_location>
#include <tuple>
#include <type_traits>
#include <utility>

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#undef __forceinline__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ emu_shared  // rewrite.py
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline

extern dim3 blockDim, gridDim;  // of the grid that runs

namespace emu {

using Where = std::source_location;

// What a thread knows of itself.
struct Place {
  uint3 thread, block;
};
extern Place* here;

// --- launches ----------------------------------------------------------------------------------

struct Launch {
  dim3 grid, block;
  size_t shared = 0;
  unsigned cluster = 1;
  bool overlapped = false;
  const void* kernel = nullptr;
  const char* name = nullptr;
  std::function<void()> call;
};
void Run(Launch launch);

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
  Configuration(dim3 g, dim3 b, size_t bytes = 0, cudaStream_t s = nullptr)
      : grid(g), block(b), shared(bytes), stream(s) {}
};
template <class Call>
void RunCall(const Configuration& c, const char* name, Call call) {
  Run({c.grid, c.block, c.shared, 1, false, nullptr, name,
       std::function<void()>([call]() mutable { call(); })});
}

void ReadConfig(const cudaLaunchConfig_t& config, Launch& launch);

template <class... Parameters, class... Arguments>
cudaError_t LaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                           Arguments&&... arguments) {
  Launch launch;
  ReadConfig(*config, launch);
  launch.kernel = reinterpret_cast<const void*>(kernel);
  launch.call = [kernel,
                 values = std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)] {
    std::apply(kernel, values);
  };
  Run(std::move(launch));
  return cudaSuccess;
}

}  // namespace emu

// What cuda_runtime.h gives nvcc alone.
template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute,
                                 int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
template <class... Parameters>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void (*kernel)(Parameters...),
                                           const cudaLaunchConfig_t* config) {
  return cudaOccupancyMaxActiveClusters(clusters, reinterpret_cast<const void*>(kernel), config);
}

namespace emu {

// --- memory ------------------------------------------------------------------------------------

void* DynamicShared();
void* StaticShared(int declaration, size_t bytes, size_t alignment);
uint32_t SharedAddress(const void* pointer);
void* SharedPointer(uint32_t address);

// --- threads that meet -------------------------------------------------------------------------

// Somebody else may run here.
void Preempt();

struct Exchange {
  uint64_t in = 0, out = 0;
  int from = 0;  // lane
};
enum class Meeting : uint8_t {
  kSync,
  kShuffle,
  kAny,
  kAll,
  kBallot,
  kAdd,
  kMinSigned,
  kMaxSigned,
  kMin,
  kMax,
  kAnd,
  kOr,
  kXor,
  kMma,
  kWgmma,
  kAligned,
};
void Meet(Meeting kind, uint32_t mask, Exchange* exchange, Where where);
void SyncBlock(int name, int threads, Where where);  // threads 0: all that live
uint64_t SyncBlockReduce(Meeting kind, uint64_t value, Where where);

// --- inline PTX ----------------------------------------------------------------------------------

struct Operand {
  uint64_t value = 0;
  void* to = nullptr;
  uint32_t bytes = 0;
};
template <char kConstraint, class T>
constexpr void CheckOperand() {
  static_assert(kConstraint == 'h'                         ? sizeof(T) == 2
                : kConstraint == 'r' || kConstraint == 'f' ? sizeof(T) == 4
                : kConstraint == 'l' || kConstraint == 'd' ? sizeof(T) == 8
                                                           : kConstraint == 'n',
                "an operand of another size than its constraint");
  static_assert((kConstraint == 'f' || kConstraint == 'd') ==
                    (std::is_floating_point_v<T> && kConstraint != 'n'),
                "a float in an integer register, or the other way round");
}
template <char kConstraint, class T>
Operand Out(T& to) {
  CheckOperand<kConstraint, T>();
  return {0, const_cast<std::remove_const_t<T>*>(&to), sizeof(T)};
}
template <char kConstraint, class T>
Operand In(const T& value) {
  Operand in;
  if constexpr (std::is_array_v<T>) {
    const void* const pointer = value;
    static_assert(kConstraint == 'l');
    std::memcpy(&in.value, &pointer, sizeof(pointer));
    in.bytes = 8;
  } else if constexpr (kConstraint == 'r' && std::is_same_v<T, bool>) {
    in.value = value;
    in.bytes = 4;
  } else {
    CheckOperand<kConstraint, T>();
    std::memcpy(&in.value, &value, sizeof(T));
    in.bytes = sizeof(T);
  }
  return in;
}
struct Code;
const Code* Compile(const char* text, const char* file, int line);
void Execute(const Code* code, const Operand* operands);

}  // namespace emu

#define threadIdx (::emu::here->thread)
#define blockIdx (::emu::here->block)
#define warpSize 32

// --- cooperative groups, as far as they are used
// ---------------------------------------------------

namespace emu {
uint32_t MapRank(uint32_t address, uint32_t rank);
uint32_t ClusterRank();
uint32_t ClusterSize();
void ClusterArrive();
void ClusterWait();
}  // namespace emu

namespace cooperative_groups {
struct cluster_group {
  static unsigned block_rank() { return emu::ClusterRank(); }
  static unsigned num_blocks() { return emu::ClusterSize(); }
  struct arrival_token {};
  static arrival_token barrier_arrive() {
    emu::ClusterArrive();
    return {};
  }
  static void barrier_wait(arrival_token&& = {}) { emu::ClusterWait(); }
  static void barrier_wait(const arrival_token&) { emu::ClusterWait(); }
  static void sync() {
    emu::ClusterArrive();
    emu::ClusterWait();
  }
  template <class T>
  static T* map_shared_rank(T* at, unsigned rank) {
    return static_cast<T*>(emu::SharedPointer(emu::MapRank(emu::SharedAddress(at), rank)));
  }
};
inline cluster_group this_cluster() {
  return {};
}
}  // namespace cooperative_groups

// --- CUDA's device functions ---------------------------------------------------------------------

inline void __syncthreads(emu::Where where = emu::Where::current()) {
  emu::SyncBlock(0, 0, where);
}
inline int __syncthreads_or(int value, emu::Where where = emu::Where::current()) {
  return emu::SyncBlockReduce(emu::Meeting::kAny, value != 0, where) != 0;
}
inline int __syncthreads_and(int value, emu::Where where = emu::Where::current()) {
  return emu::SyncBlockReduce(emu::Meeting::kAll, value != 0, where) != 0;
}
inline int __syncthreads_count(int value, emu::Where where = emu::Where::current()) {
  return static_cast<int>(emu::SyncBlockReduce(emu::Meeting::kAdd, value != 0, where));
}
inline void __syncwarp(unsigned mask = 0xffffffffu, emu::Where where = emu::Where::current()) {
  emu::Meet(emu::Meeting::kSync, mask, nullptr, where);
}

namespace emu {
template <class T>
T Shuffle(unsigned mask, T value, int from, Where where) {
  static_assert(sizeof(T) <= 8);
  Exchange exchange;
  std::memcpy(&exchange.in, &value, sizeof(T));
  exchange.from = from;
  Meet(Meeting::kShuffle, mask, &exchange, where);
  std::memcpy(&value, &exchange.out, sizeof(T));
  return value;
}
inline uint64_t Reduce(Meeting kind, unsigned mask, uint64_t value, Where where) {
  Exchange exchange{value, 0, 0};
  Meet(kind, mask, &exchange, where);
  return exchange.out;
}
inline int Lane() {
  return static_cast<int>(
      (here->thread.x + blockDim.x * (here->thread.y + blockDim.y * here->thread.z)) % 32);
}
}  // namespace emu

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32,
              emu::Where where = emu::Where::current()) {
  const int lane = emu::Lane();
  return emu::Shuffle(mask, value, lane / width * width + (from & (width - 1)), where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32,
                  emu::Where where = emu::Where::current()) {
  const int lane = emu::Lane(), from = lane ^ bits;
  return emu::Shuffle(mask, value, from / width > lane / width ? lane : from, where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 emu::Where where = emu::Where::current()) {
  const int lane = emu::Lane(), from = lane - static_cast<int>(delta);
  return emu::Shuffle(mask, value, from < lane / width * width ? lane : from, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   emu::Where where = emu::Where::current()) {
  const int lane = emu::Lane(), from = lane + static_cast<int>(delta);
  return emu::Shuffle(mask, value, from >= (lane / width + 1) * width ? lane : from, where);
}
inline int __any_sync(unsigned mask, int value, emu::Where where = emu::Where::current()) {
  return static_cast<int>(emu::Reduce(emu::Meeting::kAny, mask, value != 0, where));
}
inline int __all_sync(unsigned mask, int value, emu::Where where = emu::Where::current()) {
  return static_cast<int>(emu::Reduce(emu::Meeting::kAll, mask, value != 0, where));
}
inline unsigned __ballot_sync(unsigned mask, int value, emu::Where where = emu::Where::current()) {
  return static_cast<unsigned>(emu::Reduce(emu::Meeting::kBallot, mask, value != 0, where));
}
#define EMU_REDUCE(name, type, kind)                                                           \
  inline type name(unsigned mask, type value, emu::Where where = emu::Where::current()) {      \
    return static_cast<type>(emu::Reduce(                                                      \
        emu::Meeting::kind, mask, static_cast<uint64_t>(static_cast<int64_t>(value)), where)); \
  }
EMU_REDUCE(__reduce_add_sync, int, kAdd)
EMU_REDUCE(__reduce_add_sync, unsigned, kAdd)
EMU_REDUCE(__reduce_min_sync, int, kMinSigned)
EMU_REDUCE(__reduce_min_sync, unsigned, kMin)
EMU_REDUCE(__reduce_max_sync, int, kMaxSigned)
EMU_REDUCE(__reduce_max_sync, unsigned, kMax)
EMU_REDUCE(__reduce_and_sync, unsigned, kAnd)
EMU_REDUCE(__reduce_or_sync, unsigned, kOr)
EMU_REDUCE(__reduce_xor_sync, unsigned, kXor)
#undef EMU_REDUCE

template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
T __ldlu(const T* at) {
  return *at;
}
template <class T>
T __ldcv(const T* at) {
  emu::Preempt();
  return *at;
}
template <class T, class V>
void __stcg(T* at, const V& value) {
  *at = value;
}
template <class T, class V>
void __stcs(T* at, const V& value) {
  *at = value;
}
template <class T, class V>
void __stwt(T* at, const V& value) {
  *at = value;
}

namespace emu {
template <class T, class Fn>
T Atomic(T* at, Fn&& fn) {
  Preempt();
  const T old = *at;
  *at = fn(old);
  Preempt();
  return old;
}
}  // namespace emu
template <class T>
T atomicAdd(T* at, std::type_identity_t<T> v) {
  return emu::Atomic(at, [v](T x) { return static_cast<T>(x + v); });
}
template <class T>
T atomicSub(T* at, std::type_identity_t<T> v) {
  return emu::Atomic(at, [v](T x) { return static_cast<T>(x - v); });
}
template <class T>
T atomicMax(T* at, std::type_identity_t<T> v) {
  return emu::Atomic(at, [v](T x) { return std::max(x, v); });
}
template <class T>
T atomicMin(T* at, std::type_identity_t<T> v) {
  return emu::Atomic(at, [v](T x) { return std::min(x, v); });
}
template <class T>
T atomicOr(T* at, std::type_identity_t<T> v) {
  return emu::Atomic(at, [v](T x) { return x | v; });
}
template <class T>
T atomicAnd(T* at, std::type_identity_t<T> v) {
  return emu::Atomic(at, [v](T x) { return x & v; });
}
template <class T>
T atomicXor(T* at, std::type_identity_t<T> v) {
  return emu::Atomic(at, [v](T x) { return x ^ v; });
}
template <class T>
T atomicExch(T* at, std::type_identity_t<T> v) {
  return emu::Atomic(at, [v](T) { return v; });
}
template <class T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
  return emu::Atomic(at, [=](T x) { return x == expected ? v : x; });
}
inline void __threadfence() {
  emu::Preempt();
}
inline void __threadfence_block() {
  emu::Preempt();
}
inline void __threadfence_system() {
  emu::Preempt();
}
inline void __nanosleep(unsigned) {
  emu::Preempt();
}

inline size_t __cvta_generic_to_shared(const void* pointer) {
  return emu::SharedAddress(pointer);
}
inline void* __cvta_shared_to_generic(size_t address) {
  return emu::SharedPointer(static_cast<uint32_t>(address));
}

template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> min(
    A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
  else return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> max(
    A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
  else return T(a) > T(b) ? T(a) : T(b);
}

namespace emu {
template <class To, class From>
To Bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
template <class To, class From>
To Saturate(From x) {
  if (x != x) return 0;
  if (x <= static_cast<From>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (x >= static_cast<From>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return static_cast<To>(x);
}
}  // namespace emu
inline unsigned __float_as_uint(float x) {
  return emu::Bits<unsigned>(x);
}
inline int __float_as_int(float x) {
  return emu::Bits<int>(x);
}
inline float __uint_as_float(unsigned x) {
  return emu::Bits<float>(x);
}
inline float __int_as_float(int x) {
  return emu::Bits<float>(x);
}
inline long long __double_as_longlong(double x) {
  return emu::Bits<long long>(x);
}
inline double __longlong_as_double(long long x) {
  return emu::Bits<double>(x);
}
inline float __fmaf_rn(float a, float b, float c) {
  return std::fma(a, b, c);
}
inline double __fma_rn(double a, double b, double c) {
  return std::fma(a, b, c);
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float a) {
  return 1.0f / a;
}
inline float __fsqrt_rn(float a) {
  return std::sqrt(a);
}
inline float __frsqrt_rn(float a) {
  return static_cast<float>(1.0 / std::sqrt(double{a}));
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline double __dmul_rn(double a, double b) {
  return a * b;
}
inline double __dadd_rn(double a, double b) {
  return a + b;
}
inline double __dsub_rn(double a, double b) {
  return a - b;
}
inline double __ddiv_rn(double a, double b) {
  return a / b;
}
inline float rsqrtf(float x) {
  return static_cast<float>(1.0 / std::sqrt(double{x}));
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __exp2f(float x) {
  return std::exp2(x);
}
inline float __logf(float x) {
  return std::log(x);
}
inline float __saturatef(float x) {
  return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f;
}
inline int __float2int_rn(float x) {
  return emu::Saturate<int>(std::nearbyint(x));
}
inline int __float2int_rz(float x) {
  return emu::Saturate<int>(std::trunc(x));
}
inline int __float2int_rd(float x) {
  return emu::Saturate<int>(std::floor(x));
}
inline unsigned __float2uint_rn(float x) {
  return emu::Saturate<unsigned>(std::nearbyint(x));
}
inline unsigned __float2uint_rz(float x) {
  return emu::Saturate<unsigned>(std::trunc(x));
}
inline float __int2float_rn(int x) {
  return static_cast<float>(x);
}
inline float __uint2float_rn(unsigned x) {
  return static_cast<float>(x);
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __popcll(unsigned long long x) {
  return __builtin_popcountll(x);
}
inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
  return __builtin_ffsll(x);
}
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1u) << (31 - i);
  return y;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(uint64_t{a} * b >> 32);
}
inline int __mulhi(int a, int b) {
  return static_cast<int>(int64_t{a} * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = uint64_t{b} << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= static_cast<unsigned>(both >> (8 * (selector >> (4 * i) & 7u)) & 0xffu) << (8 * i);
  }
  return out;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
namespace emu {
template <class Part, class Fn>
unsigned ByParts(unsigned a, unsigned b, Fn&& fn) {
  constexpr int kBits = 8 * sizeof(Part);
  unsigned out = 0;
  for (int i = 0; i < 32; i += kBits) {
    const auto part = static_cast<std::make_unsigned_t<Part>>(
        fn(static_cast<Part>(a >> i), static_cast<Part>(b >> i)));
    out |= static_cast<unsigned>(part) << i;
  }
  return out;
}
}  // namespace emu
#define EMU_SIMD(name, type, expression)                                                           \
  inline unsigned name(unsigned x, unsigned y) {                                                   \
    return emu::ByParts<type>(x, y, [](type a, type b) { return static_cast<type>(expression); }); \
  }
EMU_SIMD(__vadd4, uint8_t, a + b)
EMU_SIMD(__vsub4, uint8_t, a - b)
EMU_SIMD(__vadd2, uint16_t, a + b)
EMU_SIMD(__vsub2, uint16_t, a - b)
EMU_SIMD(__vcmpgtu4, uint8_t, a > b ? 0xff : 0)
EMU_SIMD(__vcmpgeu4, uint8_t, a >= b ? 0xff : 0)
EMU_SIMD(__vcmpltu4, uint8_t, a < b ? 0xff : 0)
EMU_SIMD(__vcmpeq4, uint8_t, a == b ? 0xff : 0)
EMU_SIMD(__vcmpne4, uint8_t, a != b ? 0xff : 0)
EMU_SIMD(__vcmpgtu2, uint16_t, a > b ? 0xffff : 0)
EMU_SIMD(__vcmpgeu2, uint16_t, a >= b ? 0xffff : 0)
EMU_SIMD(__vcmpeq2, uint16_t, a == b ? 0xffff : 0)
EMU_SIMD(__vmaxu4, uint8_t, a > b ? a : b)
EMU_SIMD(__vminu4, uint8_t, a < b ? a : b)
EMU_SIMD(__vmaxu2, uint16_t, a > b ? a : b)
EMU_SIMD(__vminu2, uint16_t, a < b ? a : b)
EMU_SIMD(__vmaxs2, int16_t, a > b ? a : b)
EMU_SIMD(__vmins2, int16_t, a < b ? a : b)
#undef EMU_SIMD
inline unsigned __vimax3_u16x2(unsigned a, unsigned b, unsigned c) {
  return __vmaxu2(__vmaxu2(a, b), c);
}
inline unsigned __vimax_u16x2(unsigned a, unsigned b) {
  return __vmaxu2(a, b);
}
inline int __viaddmax_s32(int a, int b, int c) {
  return std::max(static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)), c);
}
inline int __viaddmin_s32(int a, int b, int c) {
  return std::min(static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)), c);
}
inline int __vimax3_s32(int a, int b, int c) {
  return std::max({a, b, c});
}
inline unsigned __vimax3_u32(unsigned a, unsigned b, unsigned c) {
  return std::max({a, b, c});
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
  return c;
}
