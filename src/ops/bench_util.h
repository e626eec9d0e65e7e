// What the op benchmarks share: the machine's measured peaks, a timer, and one CSV row per case.
//
//   ThreadPool pool(threads);
//   const bench::Peaks peaks = bench::MeasurePeaks(pool);
//   bench::PrintHeader();
//   const double us = bench::TimeUs([&] { LinearCpu(args, pool); });
//   bench::Print({.op = "linear", .shape = "512x1024x4096 fp8", .threads = pool.size(), .us = us,
//                 .flops = 2.0 * 512 * 1024 * 4096, .bytes = 4e6,
//                 .bound_us = bench::BoundUs(peaks, flops, bytes)});
//
// Wall-clock numbers of a shared machine are compared only within one run; peaks are measured in
// the same process for that reason, and a case is the minimum of many repeats.
#pragma once

#include <functional>
#include <string>

#include "core/thread_pool.h"

namespace fathom::bench {

struct Peaks {
  double f32_gflops = 0;   // f32 fused multiply-add, widest vectors of CpuIsa(), all threads
  double bf16_gflops = 0;  // vdpbf16ps; equals f32_gflops where CpuIsa() has no bf16 product
  double copy_gbs = 0;     // read + written bytes of a copy far larger than the caches
  double read_gbs = 0;     // streaming read of the same size
};

// Takes about a second. Both rates count two operations per multiply-add.
Peaks MeasurePeaks(ThreadPool& pool);

// Microseconds of one call: calls are batched until a batch takes 200 us, batches are repeated for
// `budget_ms`, the fastest batch counts. The first batch (cold caches, page faults) is dropped.
// FATHOM_BENCH_CPU_TIME=1 counts the caller's CPU time instead, for one thread on a busy machine.
double TimeUs(const std::function<void()>& call, double budget_ms = 150);

// The larger of the time the arithmetic needs at f32 or bf16 peak and the time the bytes need at
// the streaming rate. Up to 4 MiB stay in cache from call to call and claim no time.
double BoundUs(const Peaks& peaks, double flops, double bytes, bool bf16 = true);

struct Row {
  std::string op;
  std::string shape;
  int threads = 1;
  double us = 0;
  double flops = 0;
  double bytes = 0;
  double bound_us = 0;  // 0: no bound is claimed
};

void PrintHeader();                           // op,shape,isa,threads,us,gflops,gbs,bound_us,share
void Print(const Row& row);                   // isa is the current CpuIsa()
void Print(const Peaks& peaks, int threads);  // as comment lines

}  // namespace fathom::bench
