// Which instruction set the CPU backends use, decided once per process.
#pragma once

#include <string_view>

namespace fathom {

enum class Isa { kScalar, kAvx2, kAvx512 };  // kAvx512: F, BW, DQ, VL, VBMI, VNNI and BF16 together

// The best set this CPU has, or the one the environment variable FATHOM_ISA names
// (scalar | avx2 | avx512) when the CPU has it.
Isa CpuIsa();

// For tests: overrides CpuIsa() for the process. Returns false when the CPU lacks it.
bool SetCpuIsa(Isa isa);

std::string_view IsaName(Isa isa);

}  // namespace fathom
