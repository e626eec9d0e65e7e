#include "ops/bench_util.h"

#include <immintrin.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "core/cpu_features.h"

namespace fathom::bench {
namespace {

// Wall-clock, or with FATHOM_BENCH_CPU_TIME set the calling thread's CPU time: on a machine that
// others use too, a call longer than a time slice is never seen undisturbed. Meaningful for one
// thread only.
double Now() {
  static const bool cpu_time = std::getenv("FATHOM_BENCH_CPU_TIME") != nullptr;
  timespec now;
  clock_gettime(cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double Seconds(double begin) {
  return Now() - begin;
}

// Each peak loop keeps enough independent chains to cover the latency of two units. The results
// are stored so that the loop stays.
constexpr int kPeakSteps = 4000;

__attribute__((target("avx2,fma"))) double PeakAvx2(float* sink) {
  __m256 acc[12];
  for (auto& a : acc) a = _mm256_set1_ps(sink[0]);
  const __m256 x = _mm256_set1_ps(sink[1]);
  for (int i = 0; i < kPeakSteps; ++i) {
#pragma GCC unroll 16
    for (auto& a : acc) a = _mm256_fmadd_ps(a, x, x);
  }
  for (auto& a : acc) _mm256_storeu_ps(sink, _mm256_add_ps(a, _mm256_loadu_ps(sink)));
  return 2.0 * 8 * 12 * kPeakSteps;
}

__attribute__((target("avx512f"))) double PeakAvx512(float* sink) {
  __m512 acc[16];
  for (auto& a : acc) a = _mm512_set1_ps(sink[0]);
  const __m512 x = _mm512_set1_ps(sink[1]);
  for (int i = 0; i < kPeakSteps; ++i) {
#pragma GCC unroll 16
    for (auto& a : acc) a = _mm512_fmadd_ps(a, x, x);
  }
  for (auto& a : acc) _mm512_storeu_ps(sink, _mm512_add_ps(a, _mm512_loadu_ps(sink)));
  return 2.0 * 16 * 16 * kPeakSteps;
}

__attribute__((target("avx512f,avx512bf16"))) double PeakBf16(float* sink) {
  __m512 acc[16];
  for (auto& a : acc) a = _mm512_set1_ps(sink[0]);
  const __m512bh x = (__m512bh)_mm512_set1_ps(sink[1]);
  for (int i = 0; i < kPeakSteps; ++i) {
#pragma GCC unroll 16
    for (auto& a : acc) a = _mm512_dpbf16_ps(a, x, x);
  }
  for (auto& a : acc) _mm512_storeu_ps(sink, _mm512_add_ps(a, _mm512_loadu_ps(sink)));
  return 2.0 * 32 * 16 * kPeakSteps;
}

double PeakScalar(float* sink) {
  float acc[16];
  for (auto& a : acc) a = sink[0];
  const float x = sink[1];
  for (int i = 0; i < kPeakSteps; ++i) {
    for (auto& a : acc) a = a * x + x;
  }
  for (auto& a : acc) sink[0] += a;
  return 2.0 * 16 * kPeakSteps;
}

// Operations per second of `loop` on every thread of the pool at once.
double Rate(ThreadPool& pool, double (*loop)(float*)) {
  double best = 0;
  constexpr int kRounds = 20;
  for (int repeat = 0; repeat < 8; ++repeat) {
    std::vector<double> done(pool.size() * 8, 0.0);
    const auto begin = Now();
    pool.ParallelFor(pool.size() * kRounds, 1, [&](int64_t, int64_t, int worker) {
      float sink[16] = {0.5f, 0.5f};
      done[worker * 8] += loop(sink);
      volatile float keep = sink[0];
      (void)keep;
    });
    const double seconds = Seconds(begin);
    double operations = 0;
    for (double d : done) operations += d;
    best = std::max(best, operations / seconds);
  }
  return best;
}

__attribute__((target("avx2"))) void ReadBytes(const std::byte* data, size_t bytes, float* sink) {
  __m256i acc[4] = {};
  for (size_t i = 0; i + 128 <= bytes; i += 128) {
    // Across the 4 KiB page at which the hardware prefetcher stops.
    _mm_prefetch(reinterpret_cast<const char*>(data) + i + 4096, _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(data) + i + 4160, _MM_HINT_T0);
    for (int j = 0; j < 4; ++j) {
      acc[j] = _mm256_xor_si256(
          acc[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(data + i + 32 * j)));
    }
  }
  acc[0] = _mm256_xor_si256(_mm256_xor_si256(acc[0], acc[1]), _mm256_xor_si256(acc[2], acc[3]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(sink), acc[0]);
}

}  // namespace

Peaks MeasurePeaks(ThreadPool& pool) {
  Peaks peaks;
  switch (CpuIsa()) {
    case Isa::kScalar: peaks.f32_gflops = Rate(pool, PeakScalar) * 1e-9; break;
    case Isa::kAvx2: peaks.f32_gflops = Rate(pool, PeakAvx2) * 1e-9; break;
    case Isa::kAvx512: peaks.f32_gflops = Rate(pool, PeakAvx512) * 1e-9; break;
  }
  peaks.bf16_gflops = CpuIsa() == Isa::kAvx512 ? Rate(pool, PeakBf16) * 1e-9 : peaks.f32_gflops;

  constexpr size_t kBytes = size_t{512} << 20;  // beyond any last-level cache this runs on
  constexpr int64_t kPiece = 1 << 20;
  std::unique_ptr<std::byte, decltype(&std::free)> source(
      static_cast<std::byte*>(std::aligned_alloc(4096, kBytes)), &std::free);
  std::unique_ptr<std::byte, decltype(&std::free)> target(
      static_cast<std::byte*>(std::aligned_alloc(4096, kBytes)), &std::free);
  std::memset(source.get(), 1, kBytes);
  std::memset(target.get(), 2, kBytes);
  const bool avx2 = CpuIsa() != Isa::kScalar;
  for (int repeat = 0; repeat < 3; ++repeat) {
    auto begin = Now();
    pool.ParallelFor(kBytes / kPiece, 4, [&](int64_t first, int64_t last, int) {
      std::memcpy(target.get() + first * kPiece, source.get() + first * kPiece,
                  (last - first) * kPiece);
    });
    peaks.copy_gbs = std::max(peaks.copy_gbs, 2e-9 * kBytes / Seconds(begin));
    begin = Now();
    pool.ParallelFor(kBytes / kPiece, 4, [&](int64_t first, int64_t last, int) {
      float sink[8];
      if (avx2) ReadBytes(source.get() + first * kPiece, (last - first) * kPiece, sink);
      volatile float keep = sink[0];
      (void)keep;
    });
    if (avx2) peaks.read_gbs = std::max(peaks.read_gbs, 1e-9 * kBytes / Seconds(begin));
  }
  if (!avx2) peaks.read_gbs = peaks.copy_gbs;
  return peaks;
}

double TimeUs(const std::function<void()>& call, double budget_ms) {
  auto begin = Now();
  call();
  int batch = std::max(1, static_cast<int>(200e-6 / std::max(Seconds(begin), 1e-7)));
  double best = 1e30;
  const auto start = Now();
  for (int repeat = 0; repeat < 5 || Seconds(start) < budget_ms * 1e-3; ++repeat) {
    begin = Now();
    for (int i = 0; i < batch; ++i) call();
    const double seconds = Seconds(begin);
    if (repeat > 0) best = std::min(best, seconds / batch);
    if (seconds < 150e-6) batch *= 2;  // the first, cold call misjudged the size
    if (repeat >= 3 && Seconds(start) > 4e-3 * budget_ms) break;
  }
  return best * 1e6;
}

constexpr double kCachedBytes = 4 << 20;  // what repeated calls leave in the caches of two cores

double BoundUs(const Peaks& peaks, double flops, double bytes, bool bf16) {
  const double gflops = bf16 ? peaks.bf16_gflops : peaks.f32_gflops;
  const double streamed = bytes > kCachedBytes ? bytes : 0;
  return std::max(flops / gflops, streamed / peaks.read_gbs) * 1e-3;
}

void PrintHeader() {
  std::puts("op,shape,isa,threads,us,gflops,gbs,bound_us,share");
}

void Print(const Row& row) {
  const double share = row.bound_us > 0 ? row.bound_us / row.us : 0;
  std::printf("%s,%s,%s,%d,%.3f,%.1f,%.2f,%.3f,%.3f\n", row.op.c_str(), row.shape.c_str(),
              std::string(IsaName(CpuIsa())).c_str(), row.threads, row.us,
              row.flops / row.us * 1e-3, row.bytes / row.us * 1e-3, row.bound_us, share);
  std::fflush(stdout);
}

void Print(const Peaks& peaks, int threads) {
  std::printf("# %d threads: f32 %.1f GFLOP/s, bf16 %.1f GFLOP/s, copy %.1f GB/s, read %.1f GB/s\n",
              threads, peaks.f32_gflops, peaks.bf16_gflops, peaks.copy_gbs, peaks.read_gbs);
}

}  // namespace fathom::bench
