#include "core/cpu_features.h"

#include <atomic>
#include <cstdlib>
#include <string>

namespace fathom {
namespace {

bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
}

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
         __builtin_cpu_supports("avx512bf16");
}

bool Supported(Isa isa) {
  return isa == Isa::kScalar || (isa == Isa::kAvx2 && HasAvx2()) ||
         (isa == Isa::kAvx512 && HasAvx512());
}

Isa Detect() {
  const Isa best = HasAvx512() ? Isa::kAvx512 : HasAvx2() ? Isa::kAvx2 : Isa::kScalar;
  if (const char* wish = std::getenv("FATHOM_ISA")) {
    for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
      if (IsaName(isa) == wish && Supported(isa)) return isa;
    }
  }
  return best;
}

std::atomic<Isa>& Current() {
  static std::atomic<Isa> isa{Detect()};
  return isa;
}

}  // namespace

Isa CpuIsa() {
  return Current().load(std::memory_order_relaxed);
}

bool SetCpuIsa(Isa isa) {
  if (!Supported(isa)) return false;
  Current().store(isa, std::memory_order_relaxed);
  return true;
}

std::string_view IsaName(Isa isa) {
  switch (isa) {
    case Isa::kScalar: return "scalar";
    case Isa::kAvx2: return "avx2";
    case Isa::kAvx512: return "avx512";
  }
  return "?";
}

}  // namespace fathom
